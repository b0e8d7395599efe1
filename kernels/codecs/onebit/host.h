// The one-bit codec on the host, from and to elements of any type, without a copy as fp32: sixteen values at a time, with
// the results of codec.h bit for bit.
#pragma once

#include "../../host/bucket_loops.h"
#include "../../host/extremes.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

constexpr u32 kSumColumns = kSumLanes / kLanes;

// The sums that one pass over a bucket computes, by lanes (../../shared/bucket.h): of all magnitudes (first), or of the negative
// values (first) and of the others (second).
struct OneBitSurvey {
  f32xN first[kSumColumns], second[kSumColumns];
};

// acc + x in the lanes of `which`, elsewhere acc; acc is never -0.
QCCL_FN f32xN add_where(Mask which, const f32xN& acc, const f32xN& x) {
#if defined(QCCL_AVX512)
  return {_mm512_mask_add_ps(acc.part[0], which, acc.part[0], x.part[0])};
#else
  return acc + cast<float>(cast<i32>(x) & which);
#endif
}
QCCL_FN f32xN add_where_not(Mask which, const f32xN& acc, const f32xN& x) {
#if defined(QCCL_AVX512)
  return add_where((Mask)~which, acc, x);
#else
  i32xN others = cast<i32>(x);
  QCCL_EACH_PART others.part[p] &= ~which.part[p];
  return acc + cast<float>(others);
#endif
}

// One tile of `rows` rows of kSumLanes values: stores their bits to `codes` and adds to the sums. It goes through some
// columns of all rows, then the next, so that sums stay in registers. Values are not scaled by `pre`. `begins`: this is the
// first tile.
template <class T, u32 Reconstruct>
QCCL_LOOP void onebit_tile(const typename T::Storage* x, u32 rows, bool begins, u8* codes, OneBitSurvey& survey) {
  constexpr u32 columns = kParts < 4 ? 8 / kParts : 2;
  constexpr bool scale = Reconstruct == OneBit::kScale, mean = Reconstruct == OneBit::kMean;
  for (u32 begin = 0; begin < kSumColumns; begin += columns) {
    f32xN first[columns], second[columns];
    for (u32 c = 0; c < columns; ++c) first[c] = second[c] = all_lanes(0.0f);
    for (u32 row = 0; row < rows; ++row) {
      for (u32 c = 0; c < columns; ++c) {
        const u32 at = row * kSumLanes + (begin + c) * kLanes;
        const f32xN value = Elements<T>::load(x + at);
        if (begin == 0) __builtin_prefetch(x + at + columns * kLanes);  // keep memory accesses in order
        const Mask negative = is_less(value, all_lanes(0.0f));
        const u16 bits = (u16)bits_of(negative);
        __builtin_memcpy(codes + at / 8, &bits, sizeof bits);
        if constexpr (scale) first[c] = first[c] + cast<float>(cast<i32>(value) & 0x7fffffff);
        if constexpr (mean) {
          first[c] = add_where(negative, first[c], value);
          second[c] = add_where_not(negative, second[c], value);
        }
      }
    }
    for (u32 c = 0; c < columns; ++c) {
      if (scale || mean) survey.first[begin + c] = begins ? first[c] : survey.first[begin + c] + first[c];
      if (mean) survey.second[begin + c] = begins ? second[c] : survey.second[begin + c] + second[c];
    }
  }
}

// The greatest magnitude(), from the values' bits in memory. It is a pass of its own after the tiles: it reads the bucket in
// order up to its end, so the processor prefetches the next bucket.
template <class T>
QCCL_LOOP i32 greatest_magnitude(const typename T::Storage* x, u32 n) {
  using Signed = SignedOf<sizeof *x>;
  constexpr u32 at_once = sizeof(Lanes<Signed>) / sizeof(Signed);
  constexpr Signed most = (Signed)(((u64)1 << (8 * sizeof(Signed) - 1)) - 1);
  Lanes<Signed> sizes = all_lanes((Signed)0);
  u32 i = 0;
  for (; i + at_once <= n; i += at_once) sizes = greatest(sizes, load_lanes<Signed>(x + i) & most);
  alignas(64) Signed each[at_once];
  store_lanes(sizes, each);
  Signed all = 0;
  for (const Signed size : each) all = size > all ? size : all;
  for (; i < n; ++i) {
    const Signed size = (Signed)(__builtin_bit_cast(Signed, x[i]) & most);
    all = size > all ? size : all;
  }
  return magnitude(T::to_float(__builtin_bit_cast(typename T::Storage, all)));
}

// Adds the upper half of the lanes to the lower half until one lane remains.
static inline float folded(f32xN (&sums)[kSumColumns]) {
  for (u32 half = kSumColumns / 2; half; half /= 2) {
    for (u32 c = 0; c < half; ++c) sums[c] = sums[c] + sums[c + half];
  }
  alignas(64) float lanes[kLanes];
  store_lanes(sums[0], lanes);
  for (u32 half = kLanes / 2; half; half /= 2) {
    for (u32 i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class T, u32 Reconstruct>
void onebit_survey(const typename T::Storage* x, u32 n, u8* codes, OneBitSurvey& survey) {
  constexpr u32 tile_rows = kSumTile / kSumLanes;
  const u32 rows = n / kSumLanes, rest = n % kSumLanes;
  for (u32 row = 0; row < rows; row += tile_rows) {
    // a tile whose last row is incomplete is padded in a copy below, because its lanes belong to the same sums
    const u32 here = rows - row < tile_rows ? rows - row : tile_rows;
    if (here < tile_rows && rest) break;
    onebit_tile<T, Reconstruct>(x + row * kSumLanes, here, row == 0, codes + row * kSumLanes / 8, survey);
  }
  if (!rest) return;
  const u32 done = rows / tile_rows * kSumTile, left = n - done;
  alignas(64) typename T::Storage some[kSumTile];
  alignas(64) u8 bits[kSumTile / 8];
  const u32 padded = (left + kSumLanes - 1) / kSumLanes * kSumLanes;
  __builtin_memset(some + left, 0, (padded - left) * sizeof *some);
  __builtin_memcpy(some, x + done, left * sizeof *some);
  onebit_tile<T, Reconstruct>(some, padded / kSumLanes, done == 0, bits, survey);
  __builtin_memcpy(codes + done / 8, bits, (left + 7) / 8);
}

// How many of n bits are set; the rest of the last byte is zeros.
static inline u32 ones(const u8* codes, u32 n) {
  const u32 nbytes = (n + 7) / 8;
  u32 number = 0, i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    u64 word;
    __builtin_memcpy(&word, codes + i, sizeof word);
    number += (u32)__builtin_popcountll(word);
  }
  for (; i < nbytes; ++i) number += (u32)__builtin_popcount(codes[i]);
  return number;
}

template <class T, u32 Reconstruct>
bool onebit_encode(const typename T::Storage* x, u32 n, u8* codes, OneBit::Sides& sides) {
  OneBitSurvey survey;
  onebit_survey<T, Reconstruct>(x, n, codes, survey);
  if constexpr (Reconstruct == OneBit::kMidpoint) {
    Extremes<T> extremes;
    extremes.extend(x, n);
    const Range range = extremes.range();
    sides = OneBit::midpoints(range);
    return is_finite(range.low);
  }
  const i32 greatest = greatest_magnitude<T>(x, n);
  if (greatest >= kInfinite) return false;
  if constexpr (Reconstruct == OneBit::kSign) {
    sides = {-1.0f, 1.0f};
    return true;
  }
  if (sum_scale(greatest) != 1.0f) return false;
  if constexpr (Reconstruct == OneBit::kScale) {
    const float mean = mean_of(folded(survey.first), (float)n, 1.0f, greatest);
    sides = {-mean, mean};
  } else {
    const float below = (float)ones(codes, n);
    sides = OneBit::means({folded(survey.first), folded(survey.second)}, below, (float)n, 1.0f, greatest);
  }
  return true;
}

// Encodes a bucket. Returns false if the scalar functions must do it: some value is not finite, or sums need a `pre`.
template <class T>
bool onebit_encode(const BucketOptions& options, const typename T::Storage* x, u32 n, u8* codes, u8* meta) {
  OneBit::Sides sides = {0.0f, 0.0f};
  const u32 reconstruct = options.options[0];
  const bool done = reconstruct == OneBit::kSign    ? onebit_encode<T, OneBit::kSign>(x, n, codes, sides)
                    : reconstruct == OneBit::kScale ? onebit_encode<T, OneBit::kScale>(x, n, codes, sides)
                    : reconstruct == OneBit::kMean  ? onebit_encode<T, OneBit::kMean>(x, n, codes, sides)
                                                    : onebit_encode<T, OneBit::kMidpoint>(x, n, codes, sides);
  if (done) OneBit::store_sides(reconstruct, sides, meta);
  return done;
}

// For each of n bits, stores `lower` if it is set, otherwise `upper`.
template <class Storage>
QCCL_LOOP void choose_by_bits(const u8* codes, u32 n, Storage lower, Storage upper, Storage* to) {
  u32 i = 0;
#if defined(QCCL_AVX512)
  if constexpr (sizeof(Storage) == 2) {
    for (; i + 32 <= n; i += 32) {
      u32 bits;
      __builtin_memcpy(&bits, codes + i / 8, sizeof bits);
      _mm512_storeu_si512(
          to + i, _mm512_mask_blend_epi16(bits, _mm512_set1_epi16((short)upper), _mm512_set1_epi16((short)lower)));
    }
  } else {
    for (; i + 16 <= n; i += 16) {
      u16 bits;
      __builtin_memcpy(&bits, codes + i / 8, sizeof bits);
      _mm512_storeu_ps(to + i, _mm512_mask_blend_ps(bits, _mm512_set1_ps(upper), _mm512_set1_ps(lower)));
    }
  }
#else
  // each lane tests one bit
  using Bits = UnsignedOf<sizeof(Storage)>;
  typedef Bits Some __attribute__((vector_size(kRegisterBytes)));
  constexpr u32 step = kRegisterBytes / sizeof(Storage);
  static_assert(step <= 8 * sizeof(Bits) && (step % 8 == 0 || step == 4), "a register's bits are in few bytes");
  Some places;
  for (u32 k = 0; k < step; ++k) places[k] = (Bits)(1u << k);
  const Some low = __builtin_bit_cast(Bits, lower) - Some{}, high = __builtin_bit_cast(Bits, upper) - Some{};
  for (; i + step <= n; i += step) {
    u32 bits = codes[i / 8];
    if (step == 16) bits |= (u32)codes[i / 8 + 1] << 8;
    const Some set = places & (Bits)(bits >> i % 8);
    const Some chosen = set != 0 ? low : high;
    __builtin_memcpy(to + i, &chosen, sizeof chosen);
  }
#endif
  for (; i < n; ++i) to[i] = codes[i / 8] >> i % 8 & 1 ? lower : upper;
}

template <class T>
void onebit_decode(const BucketOptions& options, const u8* codes, const u8* meta, u32 n, typename T::Storage* to) {
  const OneBit::Sides sides = OneBit::load_sides(options.options[0], meta);
  choose_by_bits(codes, n, T::from_float(sides.lower), T::from_float(sides.upper), to);
}

template <class T>
struct OneBucket<OneBit, T> {
  using Format = WireFormat<OneBit, T>;

  QCCL_LOOP static void decode(const Format& format, const u8* wire, u64 b, const RngCounter&, bool, float* y) {
    const u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    onebit_decode<Float32>(format.options, codes, meta, Format::size_of(format, b), y);
  }

  // The scalar functions: BucketOfElements calls this if the loops above cannot.
  QCCL_LOOP static void encode(const Format& format, const float* x, u64 b, const RngCounter& counter, u8* wire, float* scratch) {
    u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    OneBit::encode<T>(HostTeam(nullptr, scratch), format.options, counter, x, Format::size_of(format, b), codes, meta);
  }
};

template <class T>
struct BucketOfElements<OneBit, T> {
  using Storage = typename T::Storage;
  template <class Bucket, class Format>
  static void encode(const Format& format, const Storage* from, u64 b, const RngCounter& counter, u8* wire, float* values,
                     float* scratch) {
    const u32 n = Format::size_of(format, b);
    u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    // The scalar functions read fp32 in order, which is 1.3 times as fast at 16 MiB; with two sums (kMean) they are slower.
    const bool in_order = T::code == Float32::code && format.options.options[0] != OneBit::kMean;
    if (!in_order && onebit_encode<T>(format.options, from, n, codes, meta)) return;
    Bucket::encode(format, as_floats<T>(from, n, values), b, counter, wire, scratch);
  }
  template <class Bucket, class Format>
  static void decode(const Format& format, const u8* wire, u64 b, const RngCounter&, float*, Storage* to) {
    const u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    onebit_decode<T>(format.options, codes, meta, Format::size_of(format, b), to);
  }
};

}  // namespace QCCL_NAMESPACE
