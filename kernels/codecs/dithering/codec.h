// The dithering codec: each value is rounded at random to one of the two levels around it; the result is unbiased.
//
// A code is a level, 0 to k, with the sign bit above it. Levels are the bucket's norm times 1/k, 2/k, ..., 1 ("linear") or
// times 2^(1-k), ..., 1/2, 1 ("natural"). The meta section is the norm as fp32, NaN for a bucket with a NaN or
// an infinity.
#pragma once

#include "../../shared/bucket.h"
#include "../../shared/pack.h"

namespace QCCL_NAMESPACE {

struct Dithering : CodecDefaults {
  // The options: number of levels above 0, the partition (1: natural), the norm (1: l2).
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

  // Factors that encoding and decoding use, derived from the norm. `pre` is a power of two that keeps products and
  // quotients clear of overflow and underflow, `post` its inverse.
  struct Scale {
    float pre, post;
    float inverse;  // levels (linear) or 1 (natural) per scaled norm
    float unit;     // scaled value of one level (linear), or of the greatest level (natural)
    float most;     // the scaled norm
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
    // divide by the exponent of the greatest, so that no square exceeds 4; the power of two must be normal
    const i32 exponent = greatest >> 23, power = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    const float pre = float_of((u32)(254 - power) << 23), post = float_of((u32)power << 23);
    const float squares = team.sum(n, [&](i32 i) { return (x[i] * pre) * (x[i] * pre); });
    const float norm = square_root(squares) * post;
    return is_finite(norm) ? norm : float_of(0x7f7fffffu);  // the greatest float: any norm that is not below a value is valid
  }

  // The level of y, in units of a level (linear) or of the norm (natural); `uniform` is a random number in [0, 1).
  QCCL_FN u32 linear_level(float y, float uniform, u32 levels) {
    const i32 below = (i32)y, most = (i32)levels;
    const i32 level = uniform < y - (float)below ? below + 1 : below;
    return (u32)(level < most ? level : most);
  }
  QCCL_FN u32 natural_level(float y, float uniform, u32 levels) {
    const float least = float_of((128u - levels) << 23);  // 2^(1-k)
    const bool above = y >= least;
    const float below = above ? float_of(bits_of(y) & 0x7f800000u) : 0.0f, gap = above ? below : least;
    const u32 number = above ? (bits_of(y) >> 23) + levels - 127u : 0u;
    const u32 level = number + (uniform * gap < y - below);
    return level < levels ? level : levels;
  }

  template <int Bits, bool Natural, class Team, class Values>
  QCCL_FN void make_codes(const Team& team, const Scale& scale, u32 levels, const Draws& draws, const Values& x, u32 n,
                          bool finite, u8* codes) {
    team.template pack<Bits>(n, [&](i32 i) {
      const float y = absolute(x[i]) * scale.pre * scale.inverse;
      const float uniform = (float)(i32)(draws.word(i) >> 8) * 0x1p-24f;
      const u32 level = Natural ? natural_level(y, uniform, levels) : linear_level(y, uniform, levels);
      return finite ? level | (u32)(x[i] < 0.0f) << (Bits - 1) : 0u;
    }, codes);
  }

  template <int Bits, bool Natural, class Team, class Take>
  QCCL_FN void take_codes(const Team& team, const Scale& scale, u32 levels, const u8* codes, u32 n, const Take& take) {
    team.template unpack<Bits>(codes, n, [&](i32 i, u32 code) {
      const u32 level = code & ((1u << (Bits - 1)) - 1);
      const float weight = !Natural ? (float)(i32)level : level ? float_of((127u + level - levels) << 23) : 0.0f;
      const float scaled = weight * scale.unit;  // rounding must not exceed the norm, which may be the greatest float
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
