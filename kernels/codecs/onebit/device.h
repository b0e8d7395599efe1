// The one-bit codec's tile. Sums of a bucket take the order of ../../shared/bucket.h, so a bucket of a mean is one warp's at most.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

QCCL_FN float of_lane(float x, int distance) { return __shfl_xor_sync(kAllLanes, x, distance); }
QCCL_FN FloatPair of_lane(const FloatPair& x, int distance) {
  return {of_lane(x.first, distance), of_lane(x.second, distance)};
}

// The sum of term(x) over the values of a bucket, for units within a warp, in the order of kSumLanes and kSumTile.
template <class T, class S, class Term>
QCCL_FN auto sum_values(const Values<T, S>& x, const Unit& unit, Term term) {
  static_assert(S::lanes <= 32 && kSumTile >= S::lanes * S::vectors * kPerVector<T>, "a unit is one tile of the sum");
  using Sum = decltype(term(0.0f));
  constexpr u32 rows = kSumLanes / kPerRow<T>;  // that have lanes of their own
  Sum part[rows][kPerVector<T>] = {};
  for_each_element<T, S>([&](u32 j, u32 i) {
    const bool inside = is_whole<T>(unit) ? j < unit.vectors : unit.offset + j * kPerRow<T> + i < unit.size;
    if (inside) part[j % rows][i] = part[j % rows][i] + term(x[j][i]);
  });
#pragma unroll
  for (u32 i = 0; i < kPerVector<T>; ++i) {
    Sum& lane = part[0][i];
#pragma unroll
    for (u32 row = 1; row < rows; ++row) lane = lane + part[row][i];
#pragma unroll
    for (int half = S::lanes / 2; half > 0; half /= 2) lane = lane + of_lane(lane, half);
  }
#pragma unroll
  for (u32 half = kPerVector<T> / 2; half > 0; half /= 2) {
#pragma unroll
    for (u32 i = 0; i < half; ++i) part[0][i] = part[0][i] + part[0][i + half];
  }
  return part[0][0];
}

// The number of a group's values for which `which` is true.
template <class T, class S, class Which>
QCCL_FN u32 count_values(const Values<T, S>& x, const Unit& unit, Which which) {
  u32 number = 0;
  for_each_element<T, S>([&](u32 j, u32 i) {
    const bool inside = unit.offset + j * kPerRow<T> + i < unit.size;
    number += inside & which(x[j][i]);
  });
#pragma unroll
  for (int half = S::lanes / 2; half > 0; half /= 2) number += __shfl_xor_sync(kAllLanes, number, half);
  return number;
}

template <int Reconstruct>
struct OneBitCoder {
  static constexpr int bits = 1;
  static constexpr u32 floats = Reconstruct >= (int)OneBit::kMean ? 2 : 1;
  static constexpr bool draws = false, magnitudes = Reconstruct != OneBit::kMidpoint;
  static constexpr int reduce_blocks = Reconstruct == OneBit::kSign ? 3 : 2;
  template <class S>
  static constexpr bool shuffles = false;

  struct Encoder {};
  using Decoder = OneBit::Sides;

  QCCL_FN Meta<floats> meta_of(const OneBit::Sides& sides) {
    if constexpr (floats == 2) return {sides.lower, sides.upper};
    return {sides.upper};
  }

  template <class T, class S>
  QCCL_FN Meta<floats> find(const Values<T, S>& x, const Unit& unit, const KeyPair& keys) {
    if constexpr (Reconstruct == OneBit::kMidpoint) {
      return meta_of(OneBit::midpoints(finite_range(keys.lowest, keys.highest)));
    }
    const float nan = float_of(kQuietNan);
    const i32 greatest = greatest_magnitude(keys);
    const float pre = sum_scale(greatest);
    OneBit::Sides sides = {-1.0f, 1.0f};
    if constexpr (Reconstruct == OneBit::kScale) {
      const float sum = sum_values<T, S>(x, unit, [=](float y) { return absolute(y) * pre; });
      sides.upper = mean_of(sum, (float)unit.size, pre, greatest);
    } else if constexpr (Reconstruct == OneBit::kMean) {
      const FloatPair sums = sum_values<T, S>(x, unit, [=](float y) { return OneBit::terms(y, pre); });
      const float below = (float)count_values<T, S>(x, unit, [](float y) { return y < 0.0f; });
      sides = OneBit::means(sums, below, (float)unit.size, pre, greatest);
    }
    return meta_of(greatest < kInfinite ? sides : OneBit::Sides{nan, nan});
  }

  QCCL_FN bool is_nan(const Meta<floats>& meta) { return !is_finite(meta.at[floats - 1]); }
  template <class T, class S>
  QCCL_FN bool has_nan(const Meta<floats>& meta, const Values<T, S>&) {
    return meta.at[0] != meta.at[0] || meta.at[floats - 1] != meta.at[floats - 1];
  }

  QCCL_FN Encoder encoder(const Meta<floats>&) { return {}; }
  template <class S>
  QCCL_FN Decoder decoder(const Meta<floats>& meta) {
    return {floats == 2 ? meta.at[0] : -meta.at[0], meta.at[floats - 1]};
  }

  QCCL_FN bool is_common(const Encoder&) { return true; }
  template <class T, class S>
  QCCL_FN bool is_common(const Decoder&, const Pieces<1, T, S>&) {
    return true;
  }

  // Shifts in the sign; the addition makes -0 a +0.
  template <bool>
  QCCL_FN void insert(u64& piece, u32, float x, const Encoder&, u32) {
    piece = __funnelshift_l(bits_of(x + 0.0f), (u32)piece, 1);
  }
  template <bool, class S>
  QCCL_FN float value(const Decoder& sides, u64 piece, u32 i) {
    return (u32)piece >> i & 1 ? sides.lower : sides.upper;
  }
};

template <int Reconstruct>
struct OneBitTile : CodedTile<OneBitCoder<Reconstruct>> {};

}  // namespace QCCL_NAMESPACE
