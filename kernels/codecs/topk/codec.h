// The top-k codec: the values of greatest magnitude of a block, with their indices.
//
// Of equal magnitudes the lower index is kept. The indices are in Elias-Fano form (../elias_fano.h). The values follow in the
// order of their indices: in the call's element type, or relative to the block's greatest magnitude, which is stored as fp32.
// In a block that is not finite all bytes are zero. These are no valid indices, and a block without valid indices decodes to
// NaN.
#pragma once

#include "../../shared/pack.h"
#include "../elias_fano.h"
#include "../sparse.h"

namespace QCCL_NAMESPACE {

// The form of the values; numbered as in qccl/codecs/sparse.py.
enum class TopKValues : u32 { exact = 0, float16 = 1, exp4 = 2 };

// A value of 4 bits is its sign (bit 3) and the number e of a level, greatest * 2^-e; e = 7 is the level 0.
constexpr u32 kTopKZero = 7;

QCCL_FN u32 topk_exponent_code(float x, float greatest) {
  const float share = greatest > 0.0f ? absolute(x) / greatest : 0.0f;
  const i32 below = 127 - (i32)(bits_of(share * (4.0f / 3.0f)) >> 23);  // the nearest level: between two, 3/4 of the greater
  const u32 level = below < 0 ? 0 : below < (i32)kTopKZero ? (u32)below : kTopKZero;
  return level | (x < 0.0f ? 8u : 0u);
}

// Without branches, which would be mispredicted.
QCCL_FN float topk_exponent_value(u32 code, float greatest) {
  const u32 level = code & 7;
  const float size = greatest * float_of(level == kTopKZero ? 0 : (127 - level) << 23);
  return float_of(bits_of(size) | (code & 8) << 28);
}

// The power of two by which float16 values are multiplied: the greatest becomes 2^14 or more and stays below 2^15, unless
// the power would be greater than 2^127.
QCCL_FN float topk_half_scale(float greatest) {
  const u32 exponent = bits_of(greatest) >> 23;
  return float_of((exponent > 14 ? 268 - exponent : 254) << 23);
}

struct TopK : CodecDefaults {
  static constexpr bool sparse = true, typed = true;

  QCCL_FN TopKValues form(const BucketOptions& options) { return (TopKValues)options.options[2]; }

  template <class T>
  QCCL_FN u64 values_nbytes(const BucketOptions& options, u64 keep) {
    const TopKValues values = form(options);
    if (values == TopKValues::exact) return keep * sizeof(typename T::Storage);
    return 4 + (values == TopKValues::float16 ? 2 * keep : packed_nbytes(keep, 4));
  }

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    const u64 keep = kept(options, n);
    return EliasFano::make((u32)keep, (u32)n).nbytes() + values_nbytes<T>(options, keep);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 0;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter&, const Values& x, u32 n, u8* codes,
                      u8*) {
    const u32 keep = (u32)kept(options, n);
    const EliasFano indices = EliasFano::make(keep, n);
    u8* values = codes + indices.nbytes();
    const u32* chosen = team.select(n, keep, [&](i32 i) { return magnitude(x[i]); });
    const i32 greatest = team.greatest(keep, [&](i32 j) { return magnitude(x[chosen[j]]); });
    if (greatest >= kInfinite) {
      return team.each((u32)(indices.nbytes() + values_nbytes<T>(options, keep)), [&](i32 i) { codes[i] = 0; });
    }
    indices.encode(team, chosen, codes);
    if (form(options) == TopKValues::exact) {
      return team.each(keep, [&](i32 j) { store_element<T>(values, j, x[chosen[j]]); });
    }
    const float most = float_of((u32)greatest);
    if (team.leads()) store_float(values, most);
    if (form(options) == TopKValues::float16) {
      const float scale = topk_half_scale(most);
      team.pack_halves(keep, [&](i32 j) { return Float16::from_float(x[chosen[j]] * scale); }, values + 4);
    } else {
      team.template pack<4>(keep, [&](i32 j) { return topk_exponent_code(x[chosen[j]], most); }, values + 4);
    }
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8*, u32 n,
                      const Take& take) {
    const u32 keep = (u32)kept(options, n);
    const EliasFano indices = EliasFano::make(keep, n);
    const u8* values = codes + indices.nbytes();
    const TopKValues how = form(options);
    const float most = how == TopKValues::exact ? 0.0f : load_float(values);
    bool valid = most >= 0.0f && is_finite(most);
    if (valid && how == TopKValues::exact) {
      valid = indices.decode(team, codes, [&](u32 j, u32 i) { take(i, load_element<T>(values, j)); });
    } else if (valid && how == TopKValues::float16) {
      const float unit = 1.0f / topk_half_scale(most);
      valid = indices.decode(team, codes, [&](u32 j, u32 i) {
        take(i, Float16::to_float((u16)load_number<2>(values + 4 + 2 * j)) * unit);
      });
    } else if (valid) {
      valid = indices.decode(team, codes, [&](u32 j, u32 i) {
        take(i, topk_exponent_value((u32)values[4 + j / 2] >> 4 * (j & 1) & 15, most));
      });
    }
    if (!valid) team.each(n, [&](i32 i) { take(i, float_of(kQuietNan)); });
  }
};

}  // namespace QCCL_NAMESPACE
