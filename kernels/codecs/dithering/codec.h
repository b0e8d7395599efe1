// The dithering codec: each value goes at random to one of the two levels around it, so that its mean is the value.
//
// A code is a level, 0 to k, and above it the sign. Levels are equal parts of the norm of the bucket ("linear"), or powers
// of two of it ("natural"): 2^(1-k), ..., 1/2, 1. The second part of the wire has the norms as fp32, NaN for a bucket with
// a NaN or an infinity.
#pragma once

#include "../../bucket.h"
#include "../../pack.h"

namespace QCCL_NAMESPACE {

struct Dithering : CodecDefaults {
  // The options: levels but for 0, the partition (1: natural), the norm (1: l2).
  QCCL_FN u32 levels(const BucketOptions& options) { return options.options[0]; }
  QCCL_FN bool natural(const BucketOptions& options) { return options.options[1] != 0; }

  QCCL_FN u32 bits(u32 levels) {
    u32 bits = 1;
    for (; levels; levels /= 2) ++bits;
    return bits;
  }

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return packed_nbytes(n, bits(levels(options)));
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 4;
  }

  // What encoding and decoding need of a norm: as in minmax.h, with differences replaced by the norm itself.
  struct Scale {
    float pre, post;
    float inverse;  // levels (linear) or 1 (natural) for the norm
    float unit;     // of one level (linear), or of the greatest (natural)
    float most;     // the norm
  };

  QCCL_FN Scale scale_of(float norm, float parts) {
    const float pre = norm > 0x1p100f ? 0x1p-100f : norm < 0x1p-100f ? 0x1p100f : 1.0f;
    const float scaled = norm * pre;
    return {pre, 1.0f / pre, scaled > 0.0f ? parts / scaled : 0.0f, scaled / parts, scaled};
  }

  template <class Team, class Values>
  QCCL_FN float find_norm(const Team& team, const BucketOptions& options, const Values& x, u32 n) {
    const i32 greatest = team.greatest(n, [&](i32 i) { return magnitude(x[i]); });
    if (greatest >= kInfinite) return float_of(kQuietNan);
    if (options.options[2] == 0) return float_of((u32)greatest);
    // squares of numbers below 4: the greatest is taken to its exponent, as far as that power of two is normal
    const i32 exponent = greatest >> 23, power = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    const float pre = float_of((u32)(254 - power) << 23), post = float_of((u32)power << 23);
    const float squares = team.sum(n, [&](i32 i) { return (x[i] * pre) * (x[i] * pre); });
    const float norm = square_root(squares) * post;
    return is_finite(norm) ? norm : float_of(0x7f7fffffu);  // the greatest float: any norm above all values will do
  }

  // The level of y, which is in units of a level (linear) or of the norm (natural), for a number `chance` in [0, 1).
  QCCL_FN u32 linear_level(float y, float chance, u32 levels) {
    const i32 below = (i32)y, most = (i32)levels;
    const i32 level = chance < y - (float)below ? below + 1 : below;
    return (u32)(level < most ? level : most);
  }
  QCCL_FN u32 natural_level(float y, float chance, u32 levels) {
    const float least = float_of((128u - levels) << 23);  // 2^(1-k)
    const bool above = y >= least;
    const float below = above ? float_of(bits_of(y) & 0x7f800000u) : 0.0f, gap = above ? below : least;
    const u32 number = above ? (bits_of(y) >> 23) + levels - 127u : 0u;
    const u32 level = number + (chance * gap < y - below);
    return level < levels ? level : levels;
  }

  template <int Bits, bool Natural, class Team, class Values>
  QCCL_FN void make_codes(const Team& team, const Scale& scale, u32 levels, const Draws& draws, const Values& x, u32 n,
                          bool finite, u8* codes) {
    team.template pack<Bits>(n, [&](i32 i) {
      const float y = absolute(x[i]) * scale.pre * scale.inverse;
      const float chance = (float)(i32)(draws.word(i) >> 8) * 0x1p-24f;
      const u32 level = Natural ? natural_level(y, chance, levels) : linear_level(y, chance, levels);
      return finite ? level | (u32)(x[i] < 0.0f) << (Bits - 1) : 0u;
    }, codes);
  }

  template <int Bits, bool Natural, class Team, class Take>
  QCCL_FN void take_codes(const Team& team, const Scale& scale, u32 levels, const u8* codes, u32 n, const Take& take) {
    team.template unpack<Bits>(codes, n, [&](i32 i, u32 code) {
      const u32 level = code & ((1u << (Bits - 1)) - 1);
      const float weight = !Natural ? (float)(i32)level : level ? float_of((127u + level - levels) << 23) : 0.0f;
      const float scaled = weight * scale.unit;  // rounding may not take it beyond the norm, which may be the last float
      const float value = (scaled > scale.most ? scale.most : scaled) * scale.post;
      take(i, code >> (Bits - 1) ? -value : value);
    });
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter& counter, const Values& x, u32 n,
                      u8* codes, u8* meta) {
    const float norm = find_norm(team, options, x, n);
    if (team.leads()) store_float(meta, norm);
    const u32 most = levels(options);
    const Scale scale = scale_of(norm, natural(options) ? 1.0f : (float)most);
    const Draws draws = make_draws(options.seed, counter);
    with_bits(bits(most), [&](auto bits) QCCL_INLINE {
      if (natural(options)) {
        make_codes<bits.value, true>(team, scale, most, draws, x, n, is_finite(norm), codes);
      } else {
        make_codes<bits.value, false>(team, scale, most, draws, x, n, is_finite(norm), codes);
      }
    });
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta,
                      u32 n, const Take& take) {
    const u32 most = levels(options);
    const Scale scale = scale_of(load_float(meta), natural(options) ? 1.0f : (float)most);
    with_bits(bits(most), [&](auto bits) QCCL_INLINE {
      if (natural(options)) {
        take_codes<bits.value, true>(team, scale, most, codes, n, take);
      } else {
        take_codes<bits.value, false>(team, scale, most, codes, n, take);
      }
    });
  }
};

}  // namespace QCCL_NAMESPACE
