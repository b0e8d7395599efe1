// The tile of the codec none: the wire is the values themselves.
#pragma once

#include "../../cuda/tile.h"

namespace QCCL_NAMESPACE {

struct NoCodecTile {
  static constexpr int reduce_blocks = 2;

  template <class T, class S>
  struct Wire {
    Values<T, S> x;
  };

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64, const Unit& unit, Wire<T, S>& to) {
    load_values<T, S, u8>(wire, unit, [&](u32 j, u32 i, float value) { to.x[j][i] = value; });
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch_raw<T>(wire, unit);
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit&, Take take) {
    for_each_element<T, S>([&](u32 j, u32 i) { take(j, i, wire.x[j][i]); });
  }

  template <Pass, class T, class S>
  QCCL_FN bool encode(const Values<T, S>& x, u8* wire, const Unit& unit, const TileJob&, const Parameters&, const Memory&,
                      Wire<T, S>& made) {
    const bool nan = any_nan<T, S>(x);
    store_values<T, S, u8>(wire, unit, x, nan);
    for_each_element<T, S>([&](u32 j, u32 i) { made.x[j][i] = rounded<T>(x[j][i]); });
    return nan;
  }
};

}  // namespace QCCL_NAMESPACE
