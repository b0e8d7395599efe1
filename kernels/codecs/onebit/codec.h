// The one-bit codec: one bit for the sign of each value, and for each bucket (a column, in CNTK) the values that the two
// signs decode to.
//
// A bit is 1 for x < 0, so -0 counts as +0. The meta section is one fp32 for the upper side (the lower side is
// its negative), or two, the lower side first. They are NaN for a bucket with a NaN or an infinity.
#pragma once

#include "../../shared/bucket.h"

namespace QCCL_NAMESPACE {

// The power of two by which values are multiplied before they are added; `greatest` is their greatest magnitude().
QCCL_FN float sum_scale(i32 greatest) {
  return greatest >= 0x5f800000 ? 0x1p-64f : greatest < 0x1f800000 ? 0x1p64f : 1.0f;
}

// The mean of n values, 0 if there are none. The sum is that of the values times `pre`, their sum_scale(). The mean is clamped,
// because rounding must not exceed the greatest value.
QCCL_FN float mean_of(float sum, float n, float pre, i32 greatest) {
  const float mean = n > 0.0f ? sum / n : 0.0f, most = float_of((u32)greatest) * pre;
  return (mean > most ? most : mean < -most ? -most : mean) * (1.0f / pre);
}

struct OneBit : CodecDefaults {
  // The first option.
  static constexpr u32 kSign = 0, kScale = 1, kMean = 2, kMidpoint = 3;

  struct Sides {
    float lower, upper;
  };

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions&, u64 n) {
    return (n + 7) / 8;
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions& options, u64) {
    return options.options[0] >= kMean ? 8 : 4;
  }

  // The NaNs are explicit, because devices' arithmetic makes other NaNs.
  QCCL_FN Sides midpoints(const Range& range) {
    if (!is_finite(range.low)) return {float_of(kQuietNan), float_of(kQuietNan)};
    return {0.75f * range.low + 0.25f * range.high, 0.25f * range.low + 0.75f * range.high};
  }

  // A value's terms of the sums of the two sides.
  QCCL_FN FloatPair terms(float x, float pre) {
    const float scaled = x * pre;
    return {x < 0.0f ? scaled : 0.0f, x < 0.0f ? 0.0f : scaled};
  }

  // The means of the `below` negative values and of the other n - below, from their sums.
  QCCL_FN Sides means(const FloatPair& sums, float below, float n, float pre, i32 greatest) {
    return {mean_of(sums.first, below, pre, greatest), mean_of(sums.second, n - below, pre, greatest)};
  }

  QCCL_FN void store_sides(u32 reconstruct, const Sides& sides, u8* meta) {
    const bool two = reconstruct >= kMean;
    if (two) store_float(meta, sides.lower);
    store_float(meta + (two ? 4 : 0), sides.upper);
  }
  QCCL_FN Sides load_sides(u32 reconstruct, const u8* meta) {
    const bool two = reconstruct >= kMean;
    const float upper = load_float(meta + (two ? 4 : 0));
    return {two ? load_float(meta) : -upper, upper};
  }

  template <class Team, class Values>
  QCCL_FN Sides find_sides(const Team& team, u32 reconstruct, const Values& x, u32 n) {
    const float nan = float_of(kQuietNan);
    if (reconstruct == kMidpoint) {
      const i32 high = team.greatest(n, [&](i32 i) { return order_key(bits_of(x[i])); });
      const i32 low = ~team.greatest(n, [&](i32 i) { return ~order_key(bits_of(x[i])); });
      return midpoints(finite_range(low, high));
    }
    const i32 greatest = team.greatest(n, [&](i32 i) { return magnitude(x[i]); });
    if (greatest >= kInfinite) return {nan, nan};
    if (reconstruct == kSign) return {-1.0f, 1.0f};
    const float pre = sum_scale(greatest);
    if (reconstruct == kScale) {
      const float sum = team.sum(n, [&](i32 i) { return absolute(x[i]) * pre; });
      const float mean = mean_of(sum, (float)n, pre, greatest);
      return {-mean, mean};
    }
    const FloatPair sums = team.sum(n, [&](i32 i) { return terms(x[i], pre); });
    const float number = (float)team.count(n, [&](i32 i) { return x[i] < 0.0f; });
    return means(sums, number, (float)n, pre, greatest);
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter&, const Values& x, u32 n, u8* codes,
                      u8* meta) {
    const Sides sides = find_sides(team, options.options[0], x, n);
    const bool finite = is_finite(sides.upper);
    if (team.leads()) store_sides(options.options[0], sides, meta);
    team.template pack<1>(n, [&](i32 i) { return (u32)(finite & (x[i] < 0.0f)); }, codes);
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta, u32 n,
                      const Take& take) {
    const Sides sides = load_sides(options.options[0], meta);
    team.template unpack<1>(codes, n, [&](i32 i, u32 code) { take(i, code ? sides.lower : sides.upper); });
  }
};

}  // namespace QCCL_NAMESPACE
