// The tile of the codec none: the wire is the values themselves.
#pragma once

#include "../../cuda/tile.h"

namespace QCCL_NAMESPACE {

struct NoCodecTile {
  static constexpr int encode_blocks = 4, decode_blocks = 4, reduce_blocks = 2, state_blocks = 2;

  template <class T, class S>
  struct Wire {
    uint4 vectors[S::vectors];
  };

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64, const Unit& unit, Wire<T, S>& to) {
#pragma unroll
    for (u32 row = 0; row < S::vectors; row += kRows<S>) {
      uint4 vectors[kRows<S>];
      load_rows<T, S, u8>(wire, unit, row, vectors);
#pragma unroll
      for (u32 j = 0; j < kRows<S>; ++j) to.vectors[row + j] = vectors[j];
    }
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch_raw<T>(wire, unit);
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit&, Take take) {
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      float x[kPerVector<T>];
      widen<T>(wire.vectors[j], x);
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) take(j, i, x[i]);
    }
  }

  template <Pass, class T, class S>
  QCCL_FN bool encode(const Values<T, S>& x, u8* wire, const Unit& unit, const TileJob&, const Parameters&, const Memory&,
                      Wire<T, S>& made) {
    const bool nan = any_nan<T, S>(x);
    store_values<T, S, u8>(wire, unit, x, nan);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) made.vectors[j] = narrow<T>(x[j], nan);
    return nan;
  }
};

}  // namespace QCCL_NAMESPACE
