// The cast codec: float16, bfloat16, or 8-bit floats that share a power of two as their scale in each bucket.
//
// The meta section is the scale of the 8-bit numbers as fp32: the least power of two for which the bucket's
// greatest number fits. It is NaN for a bucket with a NaN or an infinity.
#pragma once

#include "../../shared/bucket.h"

namespace QCCL_NAMESPACE {

// 8-bit floats with `Mantissa` bits of mantissa. The greatest is 1.75 * 2^Top, that is 448 or 57344.
template <int Mantissa, int Bias, int Top>
struct Float8 {
  static constexpr int bias = Bias, shift = 23 - Mantissa;
  static constexpr u32 special = Mantissa == 3 ? 0x7f : 0x7c;  // the least code, without sign, of a NaN or an infinity
  static constexpr u32 rebias = (127 - Bias) << 23;

  // The code of x, clamped to `most` in magnitude and rounded to nearest even; `most` is the greatest number or less.
  QCCL_FN u32 from_float(float x, u32 most) {
    const u32 sign = bits_of(x) >> 24 & 0x80u, given = bits_of(x) & 0x7fffffffu, magnitude = given < most ? given : most;
    const u32 normal = (magnitude + ((1u << (shift - 1)) - 1) + (magnitude >> shift & 1u) - rebias) >> shift;
    // the last place of this number is the step of the subnormals, so the addition rounds to that step
    constexpr u32 place = (127 + 23 + 1 - Bias - Mantissa) << 23;
    const float bounded = magnitude < rebias + (1u << 23) ? float_of(magnitude) : 0.0f;
    const u32 small = bits_of(bounded + float_of(place)) - place;
    return (magnitude < rebias + (1u << 23) ? small : normal) | sign;
  }

  QCCL_FN float to_float(u32 code) {
    const u32 magnitude = (code & 0x7fu) << shift, sign = (code & 0x80u) << 24;
    const u32 small = bits_of(float_of(magnitude + rebias + (1u << 23)) - float_of(rebias + (1u << 23)));
    const bool nan = (code & 0x7fu) > (Mantissa == 3 ? 0x7eu : 0x7cu);
    const bool infinite = Mantissa == 2 && (code & 0x7fu) == 0x7cu;
    const u32 number = magnitude < (1u << 23) ? small : magnitude + rebias;
    return float_of((nan ? kQuietNan : infinite ? 0x7f800000u : number) | sign);
  }

  // The scale of numbers whose greatest magnitude() is given, and its inverse.
  QCCL_FN float unit(i32 greatest) {
    const i32 exponent = (greatest >> 23) - Top + ((greatest & 0x7fffff) > 0x600000);
    return float_of((u32)(exponent > 1 ? exponent : 1) << 23);
  }
  QCCL_FN float inverse(float unit) { return float_of((254u << 23) - bits_of(unit)); }

  // The bits of the greatest number that stays finite when it is multiplied by the scale.
  QCCL_FN u32 most(float unit) {
    const u32 exponent = 381u - (bits_of(unit) >> 23);
    return (exponent < 254u ? exponent : 254u) << 23 | (0x7fffffu & ~((1u << shift) - 1));
  }
};

using Float8E4M3 = Float8<3, 7, 8>;
using Float8E5M2 = Float8<2, 15, 15>;

struct Cast : CodecDefaults {
  // The first option.
  static constexpr u32 kFloat16 = 0, kBFloat16 = 1, kE4M3 = 2, kE5M2 = 3;

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return options.options[0] <= kBFloat16 ? 2 * n : n;
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions& options, u64) {
    return options.options[0] <= kBFloat16 ? 0 : 4;
  }

  template <class To, class Team, class Values>
  QCCL_FN void encode_scaled(const Team& team, const Values& x, u32 n, u8* codes, u8* meta) {
    const i32 greatest = team.greatest(n, [&](i32 i) { return magnitude(x[i]); });
    const bool finite = greatest < kInfinite;
    const float unit = finite ? To::unit(greatest) : float_of(kQuietNan), inverse = finite ? To::inverse(unit) : 0.0f;
    const u32 most = To::most(unit);
    if (team.leads()) store_float(meta, unit);
    team.template pack<8>(n, [&](i32 i) { return finite ? To::from_float(x[i] * inverse, most) : 0u; }, codes);
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter&, const Values& x, u32 n, u8* codes,
                      u8* meta) {
    switch (options.options[0]) {
      case kFloat16: return team.pack_halves(n, [&](i32 i) { return Float16::from_float(x[i]); }, codes);
      case kBFloat16: return team.pack_halves(n, [&](i32 i) { return BFloat16::from_float(x[i]); }, codes);
      case kE4M3: return encode_scaled<Float8E4M3>(team, x, n, codes, meta);
      default: return encode_scaled<Float8E5M2>(team, x, n, codes, meta);
    }
  }

  template <class From, class Team, class Take>
  QCCL_FN void decode_scaled(const Team& team, const u8* codes, const u8* meta, u32 n, const Take& take) {
    const float unit = load_float(meta);
    team.template unpack<8>(codes, n, [&](i32 i, u32 code) { take(i, From::to_float(code) * unit); });
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta, u32 n,
                      const Take& take) {
    switch (options.options[0]) {
      case kFloat16: return team.unpack_halves(codes, n, [&](i32 i, u16 h) { take(i, Float16::to_float(h)); });
      case kBFloat16: return team.unpack_halves(codes, n, [&](i32 i, u16 h) { take(i, BFloat16::to_float(h)); });
      case kE4M3: return decode_scaled<Float8E4M3>(team, codes, meta, n, take);
      default: return decode_scaled<Float8E5M2>(team, codes, meta, n, take);
    }
  }
};

}  // namespace QCCL_NAMESPACE
