// The codec that converts: to float16, bfloat16, or an 8-bit float scaled by a power of two for each bucket.
//
// The second part of the wire has what the 8-bit numbers of a bucket are multiplied by, as fp32: the least power of two
// with which the bucket's greatest number fits. A bucket with a NaN or an infinity is NaN there.
#pragma once

#include "../../bucket.h"

namespace QCCL_NAMESPACE {

// 8-bit numbers of `Mantissa` bits; the greatest has the exponent `Top` and the mantissa 1.75, that is 448 or 57344.
template <int Mantissa, int Bias, int Top>
struct Float8 {
  static constexpr int shift = 23 - Mantissa;
  static constexpr u32 rebias = (127 - Bias) << 23;

  // The number nearest to x, or to `most` where that is less; neither is above the greatest one. Ties go to the even one.
  QCCL_FN u32 from_float(float x, u32 most) {
    const u32 sign = bits_of(x) >> 24 & 0x80u, given = bits_of(x) & 0x7fffffffu, magnitude = given < most ? given : most;
    const u32 normal = (magnitude + ((1u << (shift - 1)) - 1) + (magnitude >> shift & 1u) - rebias) >> shift;
    // a number whose last place is that of the subnormals, so that the addition rounds to it
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

  // The power of two for numbers of which the greatest is of this magnitude, and its inverse.
  QCCL_FN float unit(i32 greatest) {
    const i32 exponent = (greatest >> 23) - Top + ((greatest & 0x7fffff) > 0x600000);
    return float_of((u32)(exponent > 1 ? exponent : 1) << 23);
  }
  QCCL_FN float inverse(float unit) { return float_of((254u << 23) - bits_of(unit)); }

  // The bits of the greatest number that is finite after multiplication by the unit.
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
