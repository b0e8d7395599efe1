// The scalar functions of the min-max codec: codes 0..L, evenly spaced from a bucket's least to its greatest value.
//
// All arithmetic is fp32, each operation rounded to nearest even, none fused. The least and the greatest value are exact.
// In a bucket with a NaN or an infinity all values decode to NaN.
#pragma once

#include "../../shared/numeric.h"

namespace QCCL_NAMESPACE {

// Factors that encoding and decoding use, derived from a bucket's range. `pre` is a power of two that keeps differences
// clear of overflow and underflow, `post` its inverse.
struct MinMaxScale {
  float pre, post;
  float low, high;  // the range, times pre
  float inverse;    // codes per unit of value
  float unit;       // value per code
  u32 levels;       // L = 2^bits - 1
};

QCCL_FN MinMaxScale minmax_scale(Range range, u32 levels) {
  const float nan = float_of(kQuietNan);
  if (!is_finite(range.low) || !is_finite(range.high)) return {1.0f, 1.0f, nan, nan, 0.0f, nan, levels};
  const float width = range.high - range.low;
  float pre = 1.0f, post = 1.0f;
  if (!is_finite(width)) {
    pre = 0.25f, post = 4.0f;
  } else if (width > 0.0f && width < 0x1p-100f) {  // then both ends are below 2^-76, and the products are finite
    pre = 0x1p100f, post = 0x1p-100f;
  }
  const float low = range.low * pre, high = range.high * pre;
  const float scaled = high - low;
  return {pre, post, low, high, scaled > 0.0f ? (float)levels / scaled : 0.0f, scaled / (float)levels, levels};
}

QCCL_FN bool minmax_is_nan(const MinMaxScale& scale) { return is_nan(scale.unit); }

QCCL_FN float minmax_position(float x, const MinMaxScale& scale) { return (x * scale.pre - scale.low) * scale.inverse; }

QCCL_FN u32 minmax_clamp(u32 code, u32 levels) { return code < levels ? code : levels; }

// The nearest code; ties go to the even one. The unit in the last place of 2^23 is 1, so the addition rounds.
QCCL_FN u32 minmax_nearest(float x, const MinMaxScale& scale) {
  const u32 code = bits_of(minmax_position(x, scale) + 0x1p23f) - 0x4b000000u;
  return minmax_clamp(code, scale.levels);
}

// One of the two codes around x, chosen by the upper 24 bits of `random`; the expected code is the exact position.
QCCL_FN u32 minmax_stochastic(float x, const MinMaxScale& scale, u32 random) {
  const float position = minmax_position(x, scale);
  const float below = (float)(i32)position;
  const float uniform = (float)(i32)(random >> 8) * 0x1p-24f;
  const float code = uniform < position - below ? below + 1.0f : below;
  return minmax_clamp((u32)(i32)code, scale.levels);
}

// The value of a code, computed from the nearer end of the range, so that both ends are exact.
QCCL_FN float minmax_value(u32 code, const MinMaxScale& scale) {
  const bool lower = code <= scale.levels / 2;
  const float end = lower ? scale.low : scale.high;
  const i32 steps = (i32)code - (lower ? 0 : (i32)scale.levels);
  return (end + (float)steps * scale.unit) * scale.post;
}

}  // namespace QCCL_NAMESPACE
