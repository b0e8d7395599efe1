// The trellis codec: trellis-coded quantisation (Marcellin and Fischer 1990) with Ungerboeck's trellis of four states. The
// codes of a sequence are chosen together for the least squared error.
//
// A bucket has up to 2048 values around a common centre, in blocks with a scale each; a few outliers are stored apart. A
// block has twice as many levels as its codes have values. The levels are unit * u (1 + u^2) for evenly spaced u from -1 to
// 1: denser in the middle, where most values are. Levels have four classes, by their number modulo four. A code selects a
// level of two of the classes; the lowest bits of the two codes before it in its sequence determine which two. Element i of
// a bucket is in sequence i mod 32. So a decoder reads three codes for a value, and the encoder finds the best codes of
// each sequence by the Viterbi algorithm.
#pragma once

#include "../../shared/bucket.h"
#include "../../shared/pack.h"

namespace QCCL_NAMESPACE {

constexpr u32 kTrellisBucket = 2048;  // most elements of a bucket
constexpr u32 kTrellisSequences = 32;
constexpr u32 kTrellisBlocks = kTrellisBucket / 32;  // most blocks of a bucket
constexpr u32 kTrellisOutliers = 16;                 // most outliers of a bucket
constexpr u32 kTrellisNoOutlier = 0xffe00000u;

// The meta section of a bucket: centre, scale, then from this offset outliers (a word each) and blocks' scales (a byte
// each).
constexpr u32 kTrellisOutlierOffset = 8;

struct TrellisOptions {
  u32 bits, block, outliers;
};

QCCL_FN TrellisOptions trellis_options(const BucketOptions& options) {
  return {options.options[0], options.options[1], options.options[2]};
}

QCCL_FN u32 trellis_blocks(const TrellisOptions& options, u32 n) { return (n + options.block - 1) / options.block; }

// The levels of a block are numbered 0 to `top`. `reach` is the part of a block's range that they cover: with few bits,
// less than all of it gives a smaller error.
struct TrellisLevels {
  i32 top;
  float step, reach;
};

QCCL_FN constexpr TrellisLevels trellis_levels(u32 bits) {
  const i32 top = (2 << bits) - 1;
  const float reach = bits == 1 ? 0.4375f : bits == 2 ? 0.6875f : bits == 3 ? 0.84375f : bits == 4 ? 0.9375f : 1.0f;
  return {top, 1.0f / (float)top, reach};
}

// A bucket's centre, and its scale: the largest distance from the centre. `pre` is the power of two that keeps quotients
// clear of underflow, `post` its inverse.
struct TrellisFrame {
  float centre, scale, pre, post;
};

constexpr float kTrellisTiny = 0x1p-100f;
constexpr float kTrellisHuge = 0x1p125f;  // with values from here on the centre is 0, so that no distance overflows

QCCL_FN TrellisFrame trellis_frame(float centre, float scale) {
  const bool tiny = scale < kTrellisTiny;
  return {centre, scale, tiny ? 0x1p100f : 1.0f, tiny ? 0x1p-100f : 1.0f};
}

// The middle of a block. The centre of a bucket is the median of its blocks' middles: it removes a common offset, and
// outliers do not move it.
QCCL_FN float trellis_middle(float low, float high) { return low + (high - low) * 0.5f; }

// The position of number b in sorted order.
QCCL_FN u32 trellis_rank(const float* numbers, u32 n, u32 b) {
  u32 rank = 0;
  for (u32 i = 0; i < n; ++i) rank += (numbers[i] < numbers[b]) | ((numbers[i] == numbers[b]) & (i < b));
  return rank;
}

// The position of the median of n, the lower one of two.
QCCL_FN u32 trellis_median(u32 n) { return (n - 1) / 2; }

// A block's largest distance as a share of the bucket's, rounded up to a float with four bits of mantissa. The byte is its
// exponent and mantissa, offset so that 255 is the whole and 1 the least share; 0 means that all distances are zero.
constexpr u32 kTrellisShares = 2032 - 255;

QCCL_FN u32 trellis_share(float distance, const TrellisFrame& frame) {
  if (!(distance > 0.0f)) return 0;
  const float quotient = (distance * frame.pre) / (frame.scale * frame.pre);
  const u32 rounded_up = (bits_of(quotient) + 0x7ffffu) >> 19;
  return rounded_up > kTrellisShares ? rounded_up - kTrellisShares : 1;
}

// The unit of a block, half of its highest level, times `pre`.
QCCL_FN float trellis_unit(u32 share, const TrellisFrame& frame, const TrellisLevels& levels) {
  if (!share) return 0.0f;
  return float_of((share + kTrellisShares) << 19) * (frame.scale * frame.pre) * (0.5f * levels.reach);
}

QCCL_FN float trellis_inverse(float unit) { return unit > 0.0f ? 1.0f / unit : 0.0f; }

// The value of a level in units.
QCCL_FN constexpr float trellis_level(i32 level, const TrellisLevels& levels) {
  const float u = (float)(2 * level - levels.top) * levels.step;
  return u * (1.0f + u * u);
}

// The first of four neighbouring levels, one of each class, that are the candidates for a value at `position` (in units). A
// rational function approximates the u with u (1 + u^2) = position to 0.0013.
QCCL_FN i32 trellis_window(float position, const TrellisLevels& levels) {
  float z = position > -2.0f ? position : -2.0f;
  z = z < 2.0f ? z : 2.0f;
  const float s = z * z;
  const float u = (z * (0.987f + s * 0.9056f)) / (1.0f + s * (1.6856f + s * 0.093f));
  const float half = 0.5f * (float)levels.top;
  i32 first = (i32)(u * half + half) - 1;
  first = first > 0 ? first : 0;
  return first < levels.top - 3 ? first : levels.top - 3;
}

QCCL_FN constexpr i32 trellis_candidate(i32 window, u32 level_class) { return window + (i32)((level_class - (u32)window) & 3); }

// The class of a code's level, from the lowest bits of the code and of the two before it.
QCCL_FN u32 trellis_class(u32 bit, u32 before, u32 before_that) { return 2 * (bit ^ before_that) + before; }

QCCL_FN u32 trellis_code(i32 level, u32 bit) { return (u32)level / 4 * 2 + bit; }

QCCL_FN i32 trellis_level_of(u32 code, u32 before, u32 before_that) {
  return (i32)(code / 2 * 4 + trellis_class(code & 1, before & 1, before_that & 1));
}

QCCL_FN float trellis_value(i32 level, float unit, const TrellisFrame& frame, const TrellisLevels& levels) {
  return trellis_level(level, levels) * unit * frame.post + frame.centre;
}

// An outlier: the element's number in the bucket, and the upper 21 bits of its distance from the centre, rounded, but not
// to infinity. The distance 0 marks an unused entry.
QCCL_FN u32 trellis_outlier(u32 element, float distance) {
  const u32 bits = bits_of(distance), rounded = (bits & 0x7fffffffu) + 0x3ffu + (bits >> 11 & 1);
  const u32 size = rounded < 0x7f7ff800u ? rounded : 0x7f7ff800u;
  return element << 21 | ((bits & 0x80000000u) | size) >> 11;
}
QCCL_FN u32 trellis_outlier_element(u32 word) { return word >> 21; }
QCCL_FN float trellis_outlier_distance(u32 word) { return float_of(word << 11); }

// host.h and device.h have trellis_encode and trellis_decode, each for its team.
struct Trellis : CodecDefaults {
  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return packed_nbytes(n, trellis_options(options).bits);
  }

  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions& options, u64 n) {
    const TrellisOptions o = trellis_options(options);
    return kTrellisOutlierOffset + 4 * o.outliers + (trellis_blocks(o, (u32)n) + 3) / 4 * 4;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter&, const Values& x, u32 n, u8* codes,
                      u8* meta) {
    trellis_encode(team, trellis_options(options), x, n, codes, meta);
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta, u32 n,
                      const Take& take) {
    trellis_decode(team, trellis_options(options), codes, meta, n, take);
  }
};

}  // namespace QCCL_NAMESPACE
