// Values that share a scale in each small block: levels of 2 to 4 bits, and the formats mxfp8, mxfp4 and nvfp4.
//
// A *format* is a table of numbers, which codes select, and a rule for the scales. Its functions take one number (float,
// i32) on the device and sixteen (f32xN, i32xN) on the host. All arithmetic is fp32, each operation rounded, none fused.
//
// The meta section of a bucket is a float, which the formats of OCP MX lack, and a byte for the scale of each block, up to a
// multiple of four bytes. In a block with a NaN or an infinity the byte means NaN, and the codes are 0.
#pragma once

#include "../../shared/bucket.h"
#include "../../shared/pack.h"

namespace QCCL_NAMESPACE {

// The functions of host/lanes.h for one number. alike(x, n) is the number n, in as many lanes as x has.
QCCL_FN float alike(float, float x) { return x; }
QCCL_FN i32 alike(i32, i32 x) { return x; }
QCCL_FN float to_floats(i32 x) { return (float)x; }
QCCL_FN i32 truncate(float x) { return (i32)x; }
QCCL_FN i32 to_nearest(float x) { return (i32)bits_of(x + 0x1p23f) - 0x4b000000; }
QCCL_FN i32 as_integer(float x) { return (i32)bits_of(x); }
QCCL_FN float as_float(i32 x) { return float_of((u32)x); }
QCCL_FN float least(float a, float b) { return a < b ? a : b; }
QCCL_FN float greatest(float a, float b) { return a > b ? a : b; }
QCCL_FN i32 least(i32 a, i32 b) { return a < b ? a : b; }
QCCL_FN i32 greatest(i32 a, i32 b) { return a > b ? a : b; }
QCCL_FN bool is_less(float a, float b) { return a < b; }
QCCL_FN bool is_less(i32 a, i32 b) { return a < b; }
QCCL_FN float select(bool which, float yes, float no) { return which ? yes : no; }
QCCL_FN i32 select(bool which, i32 yes, i32 no) { return which ? yes : no; }
QCCL_FN float within_one(float x) { return greatest(least(x, 1.0f), -1.0f); }

// The number that scales of a bucket are relative to, times `pre`: a power of two that keeps scales and their inverses
// normal numbers. `post` is its inverse.
struct BlockFrame {
  float pre, post, unit;
};
QCCL_FN BlockFrame block_frame(float number) {
  const float size = absolute(number);
  const float pre = size >= 0x1p64f ? 0x1p-64f : size < 0x1p-64f ? 0x1p64f : 1.0f;
  return {pre, 1.0f / pre, number * pre};
}

// The code of the nearest level: position 0 is positive, and an edge belongs to the level farther from 0.
template <class Table>
QCCL_FN i32 level_code(float position) {
  i32 above = 0;
  for (i32 k = 1; k <= Table::top / 2; ++k) above += absolute(position) >= Table::edge(k);
  return position < 0.0f ? Table::top / 2 - above : Table::top / 2 + 1 + above;
}

// Symmetric levels from -1 to 1. bench/fit_levels.py finds the constants.
template <int Bits>
struct LevelTable {
  static constexpr int bits = Bits;
  static constexpr bool draws = true;  // has stochastic()
  static constexpr i32 top = (1 << Bits) - 1;
  // With few levels, least squares correct a block's scale, which begins at its greatest magnitude times `reach`.
  static constexpr bool least_squares = Bits < 4;
  static constexpr float reach = Bits == 2 ? 0.6f : Bits == 3 ? 0.92f : 0.984f;
  static constexpr float slope = Bits == 2 ? 0.82f : Bits == 3 ? 0.73f : 0.61f;

  // The positive levels, and the edge below each, in the middle of two levels.
  QCCL_FN constexpr float positive(i32 number) {
    const float u = (float)(2 * number + 1) / (float)top;
    return u * (u * u * (1.0f - slope) + slope);
  }
  QCCL_FN constexpr float edge(i32 number) { return 0.5f * (positive(number - 1) + positive(number)); }

  template <class I>
  QCCL_FN auto value(const I& code) {
    const auto u = to_floats((code << 1) - top) * (1.0f / (float)top);
    return u * (u * u * (1.0f - slope) + slope);
  }

  // The code of the nearest level.
  template <class F>
  QCCL_FN auto code(const F& position) {
    return level_code<LevelTable>(position);
  }

  // One of the two levels around a position, chosen by a number from 0 to 1: the expected level is the position.
  template <class F>
  QCCL_FN auto stochastic(const F& position, const F& uniform) {
    const F x = within_one(position);
    const auto near = code(position);
    const auto below = least(select(is_less(x, value(near)), near - 1, near), alike(near, top - 1));
    const F low = value(below);
    return select(is_less(uniform * (value(below + 1) - low), x - low), below + 1, below);
  }
};

// Floats of a sign bit, `Exponent` bits and `Mantissa` bits: E2M1, E4M3, E5M2. Codes are rounded to nearest even and clamped.
template <int Exponent, int Mantissa>
struct FloatTable {
  static constexpr int bits = 1 + Exponent + Mantissa, shift = 23 - Mantissa, bias = (1 << (Exponent - 1)) - 1;
  static constexpr bool draws = false, least_squares = false;
  static constexpr float reach = 1.0f;
  static constexpr float most = Exponent == 2 ? 6.0f : Exponent == 4 ? 448.0f : 57344.0f;
  static constexpr i32 half = 1 << (bits - 1), rebias = (127 - bias) << 23, normal = rebias + (1 << 23);
  // The least code, without sign, of a NaN or an infinity.
  static constexpr i32 special = Exponent == 2 ? half : Exponent == 4 ? 0x7f : 0x7c;

  template <class F>
  QCCL_FN auto code(const F& position) {
    const auto size = least(absolute(position), alike(position, most));
    const auto given = as_integer(size);
    const auto large = (given + ((given >> shift) & 1) + ((1 << (shift - 1)) - 1 - rebias)) >> shift;
    // the last place of this number is the step of the subnormals, so the addition rounds to that step
    constexpr i32 place = normal + (shift << 23);
    const auto small = as_integer(size + float_of((u32)place)) - place;
    return select(is_less(given, alike(given, normal)), small, large) + ((as_integer(position) >> 31) & half);
  }

  template <class I>
  QCCL_FN auto value(const I& code) {
    const auto magnitude = (code & (half - 1)) << shift;
    const auto small = as_integer(as_float(magnitude + normal) - float_of((u32)normal));
    auto number = select(is_less(magnitude, alike(magnitude, 1 << 23)), small, magnitude + rebias);
    if constexpr (special < half) {  // a mantissa of E5M2 that is 0 means infinity
      const auto infinite = (magnitude & (Exponent == 4 ? 0 : 0x7fffff)) + (Exponent == 4 ? (i32)kQuietNan : kInfinite);
      number = select(is_less(magnitude, alike(magnitude, special << shift)), number, infinite);
    }
    return as_float(number + ((code & half) << (32 - bits)));
  }
};

// Scales of `levels`: a code counts sixteenths of an octave below the bucket's greatest magnitude.
struct OctaveScale {
  static constexpr u32 number_nbytes = 4;
  static constexpr i32 zero = 254, nan = 255, smallest = 253;

  QCCL_FN float number(i32 greatest) { return float_of((u32)greatest); }

  // 16 times the binary logarithm of frame.unit over the scale wanted, at most 0.02 off; from 0 to `smallest`.
  template <class F>
  QCCL_FN F steps(const F& wanted, const BlockFrame& frame) {
    const F share = wanted / frame.unit;
    const auto bits = as_integer(share);
    const F x = as_float((bits & 0x7fffff) + 0x3f800000) - 1.0f;
    const F log = to_floats(bits - 0x3f800000) * 0x1p-23f + x * (x * -1.0f + 1.0f) * (x * -0.15639f + 0.42086f);
    const F steps = log * -16.0f;
    return greatest(least(steps, alike(steps, (float)smallest)), alike(steps, 0.0f));
  }

  template <class F>
  QCCL_FN auto code(const F& wanted, const BlockFrame& frame) {
    return to_nearest(steps(wanted, frame));
  }
  // The smallest scale that is not below the one wanted.
  template <class F>
  QCCL_FN auto code_above(const F& wanted, const BlockFrame& frame) {
    const auto code = truncate(steps(wanted, frame));
    return select(is_less(scale(code, frame), wanted), code - 1, code);
  }

  template <class I>
  QCCL_FN auto scale(const I& code, const BlockFrame& frame) {
    const auto t = to_floats(code & 15) * 0.0625f;
    const auto part = ((t * -0.04007f + 0.23174f) * t - 0.69174f) * t + 1.0f;  // 2^-t
    const auto scale = part * as_float((alike(code, 127) - (code >> 4)) << 23) * frame.unit;
    const auto other = select(is_less(code, alike(code, nan)), alike(scale, 0.0f), alike(scale, float_of(kQuietNan)));
    return select(is_less(code, alike(code, zero)), scale, other);
  }
};

// Scales of OCP MX: powers of two (E8M0). `Top` is the exponent of the greatest number of the table.
template <int Top>
struct PowerScale {
  static constexpr u32 number_nbytes = 0;
  static constexpr i32 zero = 0, nan = 255;

  QCCL_FN float number(i32) { return 1.0f; }
  template <class F>
  QCCL_FN auto code(const F& wanted, const BlockFrame&) {
    const auto exponent = as_integer(wanted) >> 23;
    return greatest(exponent - Top, alike(exponent, 0));
  }
  template <class I>
  QCCL_FN auto scale(const I& code, const BlockFrame&) {
    const auto bits = select(is_less(code, alike(code, 1)), alike(code, 1 << 22), code << 23);
    return as_float(select(is_less(code, alike(code, nan)), bits, alike(code, (i32)kQuietNan)));
  }
};

// Scales of NVFP4: an E4M3 number times the bucket's number. With the greatest of both, the greatest code means the bucket's
// greatest magnitude.
struct TensorScale {
  using Table = FloatTable<4, 3>;
  static constexpr u32 number_nbytes = 4;
  static constexpr i32 zero = 0, nan = Table::special;
  static constexpr float most = FloatTable<2, 1>::most;  // of the codes

  QCCL_FN float number(i32 greatest) { return float_of((u32)greatest) / (Table::most * most); }
  template <class F>
  QCCL_FN auto code(const F& wanted, const BlockFrame& frame) {
    return Table::code(wanted / (frame.unit * most));
  }
  template <class I>
  QCCL_FN auto scale(const I& code, const BlockFrame& frame) {
    return Table::value(code) * frame.unit;
  }
};

// The same for a tensor whose number is not on the wire.
struct PlainScale : TensorScale {
  static constexpr u32 number_nbytes = 0;
  QCCL_FN float number(i32) { return 1.0f; }
};

template <class TableType, class ScaleType>
struct BlockFormat {
  using Table = TableType;
  using Scale = ScaleType;
};

// The format of a codec's first option: 2 to 4 are the bits of `levels`.
template <u32 Format>
struct FormatOf;
template <>
struct FormatOf<0> : BlockFormat<FloatTable<4, 3>, PowerScale<8>> {};  // mxfp8:type=e4m3
template <>
struct FormatOf<1> : BlockFormat<FloatTable<5, 2>, PowerScale<15>> {};  // mxfp8:type=e5m2
template <>
struct FormatOf<2> : BlockFormat<LevelTable<2>, OctaveScale> {};
template <>
struct FormatOf<3> : BlockFormat<LevelTable<3>, OctaveScale> {};
template <>
struct FormatOf<4> : BlockFormat<LevelTable<4>, OctaveScale> {};
template <>
struct FormatOf<5> : BlockFormat<FloatTable<2, 1>, PowerScale<2>> {};  // mxfp4
template <>
struct FormatOf<6> : BlockFormat<FloatTable<2, 1>, TensorScale> {};  // nvfp4
template <>
struct FormatOf<7> : BlockFormat<FloatTable<2, 1>, PlainScale> {};  // nvfp4 of an Encoded

// body(FormatOf<format>()), for a number that is known at run time.
template <u32 Last = 7, class Body>
QCCL_FN auto with_format(u32 format, const Body& body) {
  if constexpr (Last > 0) {
    if (format < Last) return with_format<Last - 1>(format, body);
  }
  return body(FormatOf<Last>());
}

// Magnitudes are fitted as integers, in units of the first scale / kFitUnit, so that their sums do not depend on the order.
constexpr float kFitUnit = 0x1p20f;
// The least first scale whose inverse times kFitUnit is finite. Blocks with a lesser one get the smallest scale in any case: a
// bucket's number times `pre` is 2^-85 or more.
constexpr float kLeastFitted = 0x1p-105f;

// The factor that makes a block's first scale the one of least squares. sums[k] and counts[k] are the sum and the number of the
// magnitudes above edge(k); with k = 0, of all of the block.
template <class Table, class I>
QCCL_FN auto fit_ratio(const I* sums, const I* counts) {
  auto product = to_floats(sums[0]) * Table::positive(0);
  auto square = to_floats(counts[0]) * (Table::positive(0) * Table::positive(0));
  for (i32 k = 1; k <= Table::top / 2; ++k) {
    const float level = Table::positive(k), below = Table::positive(k - 1);
    product = product + to_floats(sums[k]) * (level - below);
    square = square + to_floats(counts[k]) * (level * level - below * below);
  }
  return product * (1.0f / kFitUnit) / square;
}

// Options: the format, the elements of a block, and whether the rounding is stochastic.
struct Blocks : CodecDefaults {
  QCCL_FN u32 bits(u32 format) {
    return with_format(format, [](auto of) { return (u32)decltype(of)::Table::bits; });
  }

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return packed_nbytes(n, bits(options.options[0]));
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions& options, u64 n) {
    const u32 block = options.options[1];
    const u64 number = with_format(options.options[0], [](auto of) { return decltype(of)::Scale::number_nbytes; });
    return number + ((n + block - 1) / block + 3) / 4 * 4;
  }
};

}  // namespace QCCL_NAMESPACE
