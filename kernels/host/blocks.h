// Loops over one block of at most kBlock elements, in and out of a scratch in L1. Plain loops over plain arrays, so that
// the compiler vectorises them for whichever instruction set this build is for.
#pragma once

#include "../minmax.h"
#include "../pack.h"
#include "../random.h"
#include "calls.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace QCCL_NAMESPACE {

using qccl::Combine;

constexpr u32 kBlock = 2048;  // elements: 8 KiB of fp32 and 2 KiB of codes

QCCL_FN u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

template <class T>
const typename T::Storage* element(const void* base, u64 index) {
  return static_cast<const typename T::Storage*>(base) + index;
}

template <class T>
typename T::Storage* element(void* base, u64 index) {
  return static_cast<typename T::Storage*>(base) + index;
}

template <class T>
void load_block(const typename T::Storage* __restrict src, u32 n, float* __restrict to) {
  for (u32 i = 0; i < n; ++i) to[i] = T::to_float(src[i]);
}

template <class T>
void store_block(const float* __restrict from, u32 n, typename T::Storage* __restrict dst) {
  for (u32 i = 0; i < n; ++i) dst[i] = T::from_float(from[i]);
}

#ifdef __F16C__
// The processor's own conversion, which equals the integer one but for the payload of NaNs; no compiler finds it.
#ifdef __AVX512F__
constexpr u32 kHalfLanes = 16;
QCCL_FN void load_halves(const u16* from, float* to) {
  _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
QCCL_FN void store_halves(const float* from, u16* to) {
  const __m512 x = _mm512_loadu_ps(from);
  const __m512 quiet = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps(float_of(kQuietNan)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}
#else
constexpr u32 kHalfLanes = 8;
QCCL_FN void load_halves(const u16* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
QCCL_FN void store_halves(const float* from, u16* to) {
  const __m256 x = _mm256_loadu_ps(from);
  const __m256 quiet = _mm256_blendv_ps(x, _mm256_set1_ps(float_of(kQuietNan)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}
#endif

template <>
inline void load_block<Float16>(const u16* __restrict src, u32 n, float* __restrict to) {
  u32 i = 0;
  for (; i + kHalfLanes <= n; i += kHalfLanes) load_halves(src + i, to + i);
  for (; i < n; ++i) to[i] = Float16::to_float(src[i]);
}

template <>
inline void store_block<Float16>(const float* __restrict from, u32 n, u16* __restrict dst) {
  u32 i = 0;
  for (; i + kHalfLanes <= n; i += kHalfLanes) store_halves(from + i, dst + i);
  for (; i < n; ++i) dst[i] = Float16::from_float(from[i]);
}
#endif

// The block as fp32: in `scratch`, or where it is if it is fp32 already.
template <class T>
const float* as_float(const typename T::Storage* src, u32 n, float* scratch) {
  if constexpr (T::code == Float32::code) {
    return src;
  } else {
    load_block<T>(src, n, scratch);
    return scratch;
  }
}

// The least and the greatest order key so far.
struct KeyRange {
  i32 lowest = 0x7fffffff;
  i32 highest = -0x7fffffff - 1;
};

static inline void extend_range(const float* x, u32 n, KeyRange& range) {
  i32 lowest = range.lowest, highest = range.highest;
  for (u32 i = 0; i < n; ++i) {
    const i32 key = order_key(bits_of(x[i]));
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  range = {lowest, highest};
}

// acc = acc (op) x. A NaN on either side wins; of equal values the first stays.
template <Combine op>
QCCL_FN float combine(float acc, float x) {
  if constexpr (op == Combine::replace) return x;
  if constexpr (op == Combine::sum) return acc + x;
  if constexpr (op == Combine::min) return (x < acc) | is_nan(x) ? x : acc;
  if constexpr (op == Combine::max) return (x > acc) | is_nan(x) ? x : acc;
}

template <Combine op>
void combine_values(const float* __restrict x, u32 n, float* __restrict acc) {
  for (u32 i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], x[i]);
}

template <Combine op>
void combine_codes(const u8* __restrict codes, u32 n, const MinMaxScale scale, float* __restrict acc) {
  for (u32 i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], minmax_value(codes[i], scale));
}

static inline void scale_values(float scale, u32 n, float* acc) {
  for (u32 i = 0; i < n; ++i) acc[i] *= scale;
}

static inline void quantise_nearest(const float* __restrict x, u32 n, const MinMaxScale scale, u8* __restrict codes) {
  for (u32 i = 0; i < n; ++i) codes[i] = (u8)minmax_nearest(x[i], scale);
}

// `index` is the lower half of the first element's index; it may not wrap within the n elements.
static inline void quantise_stochastic(const float* __restrict x, u32 n, const MinMaxScale scale, RandomKey key,
                                       u32 index, u8* __restrict codes) {
  for (u32 i = 0; i < n; ++i) codes[i] = (u8)minmax_stochastic(x[i], scale, random_word(key, index + i));
}

// Bytes of n packed codes.
QCCL_FN u64 packed_nbytes(u64 n, u32 bits) { return n / 8 * bits + (n % 8 * bits + 7) / 8; }

// How many groups of `Bits` bytes, from the first on, leave room for an access of eight bytes within `nbytes`.
template <int Bits>
QCCL_FN u32 roomy_groups(u32 nbytes) {
  return nbytes < 8 ? 0 : (nbytes - 8) / Bits + 1;
}

// A group of packed codes as an integer at any address: of exactly `Bits` bytes where there is such an integer, which
// vectorises, otherwise of eight.
template <int Bits>
struct Group {
  typedef u64 Word __attribute__((aligned(1), may_alias));
  static constexpr bool exact = false;
};
template <>
struct Group<1> {
  typedef u8 Word;
  static constexpr bool exact = true;
};
template <>
struct Group<2> {
  typedef u16 Word __attribute__((aligned(1), may_alias));
  static constexpr bool exact = true;
};
template <>
struct Group<4> {
  typedef u32 Word __attribute__((aligned(1), may_alias));
  static constexpr bool exact = true;
};
typedef u64 EightCodes __attribute__((aligned(1), may_alias));

// n codes (the array has room for a multiple of eight) to exactly packed_nbytes(n) bytes.
template <int Bits>
void pack_block(u8* __restrict codes, u32 n, u8* __restrict wire) {
  using Word = typename Group<Bits>::Word;
  const u32 groups = (n + 7) / 8, nbytes = (u32)packed_nbytes(n, Bits);
  const auto* eights = reinterpret_cast<const EightCodes*>(codes);
  for (u32 i = n; i < 8 * groups; ++i) codes[i] = 0;
  u32 g = 0;
  if constexpr (Group<Bits>::exact) {
    auto* words = reinterpret_cast<Word*>(wire);
    for (; g < n / 8; ++g) words[g] = (Word)pack8<Bits>(eights[g]);
  } else {  // each store spills zeros into the next group, which then overwrites them
    u64 packed[kBlock / 8];
    for (u32 i = 0; i < groups; ++i) packed[i] = pack8<Bits>(eights[i]);
    for (; g < roomy_groups<Bits>(nbytes); ++g) *reinterpret_cast<Word*>(wire + Bits * g) = packed[g];
  }
  for (; g < groups; ++g) {
    const u64 x = pack8<Bits>(eights[g]);
    __builtin_memcpy(wire + Bits * g, &x, smaller(Bits, nbytes - Bits * g));
  }
}

// The inverse; writes whole groups of eight codes.
template <int Bits>
void unpack_block(const u8* __restrict wire, u32 n, u8* __restrict codes) {
  using Word = typename Group<Bits>::Word;
  const u32 groups = (n + 7) / 8, nbytes = (u32)packed_nbytes(n, Bits);
  auto* eights = reinterpret_cast<EightCodes*>(codes);
  u32 g = 0;
  if constexpr (Group<Bits>::exact) {
    const auto* words = reinterpret_cast<const Word*>(wire);
    for (; g < n / 8; ++g) eights[g] = unpack8<Bits>(words[g]);
  } else {  // each load takes some of the next group along, which unpack8 ignores
    u64 packed[kBlock / 8];
    const u32 roomy = roomy_groups<Bits>(nbytes);
    for (; g < roomy; ++g) packed[g] = *reinterpret_cast<const Word*>(wire + Bits * g);
    for (u32 i = 0; i < roomy; ++i) eights[i] = unpack8<Bits>(packed[i]);
  }
  for (; g < groups; ++g) {
    u64 x = 0;
    __builtin_memcpy(&x, wire + Bits * g, smaller(Bits, nbytes - Bits * g));
    eights[g] = unpack8<Bits>(x);
  }
}

}  // namespace QCCL_NAMESPACE
