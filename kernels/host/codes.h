// Loads and stores sixteen codes, one per lane in registers and 2 * Bits bytes on the wire. Loads read up to eight bytes
// more, which the meta section provides; stores write exactly their bytes.
#pragma once

#include "../shared/pack.h"
#include "lanes.h"

namespace QCCL_NAMESPACE {

typedef u8 Bytes __attribute__((vector_size(16)));
typedef u64 Pair __attribute__((vector_size(16)));

// The lowest byte of each lane; all lanes hold 0 to 255.
QCCL_FN Bytes narrow(const i32xN& x) {
#if defined(QCCL_AVX512)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)x.part[0]);
#elif defined(QCCL_AVX2)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x.part[0], (__m256i)x.part[1]), 0xd8);
  return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#elif defined(__SSE2__)
  return (Bytes)_mm_packus_epi16(_mm_packs_epi32((__m128i)x.part[0], (__m128i)x.part[1]),
                                 _mm_packs_epi32((__m128i)x.part[2], (__m128i)x.part[3]));
#else
  Bytes bytes;
  for (u32 i = 0; i < kLanes; ++i) bytes[i] = (u8)x.part[i / 4][i % 4];
  return bytes;
#endif
}

// The inverse of narrow().
QCCL_FN i32xN widen(Bytes x) {
#if defined(QCCL_AVX512)
  return {(i32xN::Part)_mm512_cvtepu8_epi32((__m128i)x)};
#elif defined(QCCL_AVX2)
  return {{(i32xN::Part)_mm256_cvtepu8_epi32((__m128i)x),
           (i32xN::Part)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)x, 8))}};
#elif defined(__SSE2__)
  const __m128i zero{}, low = _mm_unpacklo_epi8((__m128i)x, zero), high = _mm_unpackhi_epi8((__m128i)x, zero);
  return {{(i32xN::Part)_mm_unpacklo_epi16(low, zero), (i32xN::Part)_mm_unpackhi_epi16(low, zero),
           (i32xN::Part)_mm_unpacklo_epi16(high, zero), (i32xN::Part)_mm_unpackhi_epi16(high, zero)}};
#else
  i32xN y;
  for (u32 i = 0; i < kLanes; ++i) y.part[i / 4][i % 4] = x[i];
  return y;
#endif
}

#if defined(QCCL_AVX512) || defined(QCCL_AVX2)
// The byte shuffle that brings the two bytes of a lane's code into the lane, and the shift of the code in them.
template <int Bits>
struct CodeShuffle {
  u8 bytes[4 * kLanes] = {};
  u32 shifts[kLanes] = {};

  constexpr CodeShuffle() {
    for (u32 i = 0; i < kLanes; ++i) {
      const u32 bit = i * Bits;
      bytes[4 * i] = (u8)(bit / 8);
      bytes[4 * i + 1] = (u8)(bit / 8 + 1);
      bytes[4 * i + 2] = bytes[4 * i + 3] = 0x80;  // zero
      shifts[i] = bit % 8;
    }
  }
};

// Sixteen codes, each with bits of other codes above its own.
template <int Bits>
QCCL_FN i32xN load_codes_with_others(const u8* from) {
  alignas(64) static constexpr CodeShuffle<Bits> places;
  const auto* address = reinterpret_cast<const __m128i*>(from);
  const __m128i packed = Bits <= 4 ? _mm_loadl_epi64(address) : _mm_loadu_si128(address);
#if defined(QCCL_AVX512)
  const __m512i all = Bits <= 4 ? _mm512_broadcastq_epi64(packed) : _mm512_broadcast_i32x4(packed);
  const __m512i two = _mm512_shuffle_epi8(all, _mm512_load_si512(places.bytes));
  return {(i32xN::Part)_mm512_srlv_epi32(two, _mm512_load_si512(places.shifts))};
#else
  const __m256i all = Bits <= 4 ? _mm256_broadcastq_epi64(packed) : _mm256_broadcastsi128_si256(packed);
  const auto part = [&](u32 p) {
    const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(places.bytes + 32 * p));
    const __m256i shifts = _mm256_load_si256(reinterpret_cast<const __m256i*>(places.shifts + 8 * p));
    return (i32xN::Part)_mm256_srlv_epi32(_mm256_shuffle_epi8(all, bytes), shifts);
  };
  return {{part(0), part(1)}};
#endif
}

template <int Bits>
QCCL_FN i32xN load_codes(const u8* from) {
  if constexpr (Bits == 8) return widen((Bytes)_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return load_codes_with_others<Bits>(from) & ((1 << Bits) - 1);
}

// The byte shuffle that joins the low 8 * Bits bits of the two halves.
template <int Bits>
struct JoinShuffle {
  u8 bytes[16] = {};

  constexpr JoinShuffle() {
    for (int i = 0; i < 16; ++i) bytes[i] = i < Bits ? (u8)i : i < 2 * Bits ? (u8)(8 + i - Bits) : 0x80;
  }
};

// Three steps join pairs, fours and eights of codes; the first two are multiplications that shift and add.
template <int Bits>
QCCL_FN __m128i join_codes(__m128i bytes) {
  alignas(16) static constexpr JoinShuffle<Bits> places;
  constexpr u64 low = (1ull << 4 * Bits) - 1;
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi16((short)(1 | 1 << (8 + Bits))), bytes);
  const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(1 | 1 << (16 + 2 * Bits)));
  const __m128i second = _mm_srli_epi64(fours, 32 - 4 * Bits);
  const __m128i eights = _mm_or_si128(_mm_and_si128(fours, _mm_set1_epi64x(low)),
                                      _mm_and_si128(second, _mm_set1_epi64x(low << 4 * Bits)));
  return _mm_shuffle_epi8(eights, _mm_load_si128(reinterpret_cast<const __m128i*>(places.bytes)));
}

// Four bits need the first step only.
QCCL_FN __m128i join_nibbles(__m128i bytes) {
  const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(1 | 16 << 8));
  return _mm_shuffle_epi8(pairs, _mm_set1_epi64x(0x0e0c0a0806040200));
}

// Stores sixteen codes, given as bytes, in 2 * Bits bytes: one integer, or two that overlap.
template <int Bits>
QCCL_FN void store_bytes(__m128i bytes, u8* to) {
  if constexpr (Bits == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  } else if constexpr (Bits == 1) {
    const u16 word = (u16)_mm_movemask_epi8(_mm_slli_epi16(bytes, 7));
    __builtin_memcpy(to, &word, sizeof word);
  } else if constexpr (Bits <= 3) {
    const __m128i x = join_codes<Bits>(bytes);
    const u32 first = (u32)_mm_cvtsi128_si32(x), last = (u32)_mm_cvtsi128_si32(_mm_srli_si128(x, 2 * Bits - 4));
    __builtin_memcpy(to, &first, sizeof first);
    if (Bits == 3) __builtin_memcpy(to + 2 * Bits - 4, &last, sizeof last);
  } else if constexpr (Bits == 4) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), join_nibbles(bytes));
  } else {
    const __m128i x = join_codes<Bits>(bytes);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * Bits - 8), _mm_srli_si128(x, 2 * Bits - 8));
  }
}

template <int Bits>
QCCL_FN void store_bytes(Bytes bytes, u8* to) {
  store_bytes<Bits>((__m128i)bytes, to);
}

// Converts kTogether * 16 codes at once, whose bytes fill a register, with fewer instructions. The packing instructions
// work within 128 bits, so a permutation of fours of codes restores the order.
#if defined(QCCL_AVX512)
constexpr u32 kTogether = 4;
using ManyBytes = __m512i;

QCCL_FN __m512i in_order(__m512i fours) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), fours);
}

QCCL_FN ManyBytes narrow_together(const i32xN (&x)[kTogether]) {
  const auto part = [&](u32 g) QCCL_INLINE { return (__m512i)x[g].part[0]; };
  return in_order(_mm512_packus_epi16(_mm512_packus_epi32(part(0), part(1)), _mm512_packus_epi32(part(2), part(3))));
}

template <int Bits>
QCCL_FN void store_together(ManyBytes bytes, u8* to) {
  if constexpr (Bits == 8) {
    _mm512_storeu_si512(to, bytes);
  } else if constexpr (Bits == 4) {
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(1 | 16 << 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(pairs));
  } else if constexpr (Bits == 2) {
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(1 | 4 << 8));
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 16 << 16));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(fours));
  } else if constexpr (Bits == 1) {
    const u64 bits = _mm512_test_epi8_mask(bytes, bytes);
    __builtin_memcpy(to, &bits, sizeof bits);
  } else {
    store_bytes<Bits>(_mm512_castsi512_si128(bytes), to);
    store_bytes<Bits>(_mm512_extracti32x4_epi32(bytes, 1), to + 2 * Bits);
    store_bytes<Bits>(_mm512_extracti32x4_epi32(bytes, 2), to + 4 * Bits);
    store_bytes<Bits>(_mm512_extracti32x4_epi32(bytes, 3), to + 6 * Bits);
  }
}
#else
constexpr u32 kTogether = 2;
using ManyBytes = __m256i;

QCCL_FN ManyBytes narrow_together(const i32xN (&x)[kTogether]) {
  const auto part = [&](u32 p) QCCL_INLINE { return (__m256i)x[p / kParts].part[p % kParts]; };
  const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(part(0), part(1)), _mm256_packus_epi32(part(2), part(3)));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <int Bits>
QCCL_FN void store_together(ManyBytes bytes, u8* to) {
  if constexpr (Bits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  } else if constexpr (Bits == 4) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(1 | 16 << 8));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  } else if constexpr (Bits == 2) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(1 | 4 << 8));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 16 << 16));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  } else if constexpr (Bits == 1) {
    const u32 bits = (u32)_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7));
    __builtin_memcpy(to, &bits, sizeof bits);
  } else {
    store_bytes<Bits>(_mm256_castsi256_si128(bytes), to);
    store_bytes<Bits>(_mm256_extracti128_si256(bytes, 1), to + 2 * Bits);
  }
}
#endif
#else
constexpr u32 kTogether = 1;
using ManyBytes = Bytes;

template <int Bits>
QCCL_FN i32xN load_codes(const u8* from) {
  Bytes bytes;
  if constexpr (Bits == 8) {
    __builtin_memcpy(&bytes, from, sizeof bytes);
  } else {
    u64 first = 0, second = 0;
    __builtin_memcpy(&first, from, 8);
    __builtin_memcpy(&second, from + Bits, 8);
    bytes = (Bytes)unpack8<Bits, Pair>(Pair{first, second});
  }
  return widen(bytes);
}

QCCL_FN ManyBytes narrow_together(const i32xN (&x)[kTogether]) { return narrow(x[0]); }

template <int Bits>
QCCL_FN void store_bytes(Bytes bytes, u8* to) {
  if constexpr (Bits == 8) {
    __builtin_memcpy(to, &bytes, sizeof bytes);
  } else {
    const Pair packed = pack8<Bits, Pair>((Pair)bytes);
    const u64 first = packed[0], second = packed[1];
    __builtin_memcpy(to, &first, Bits);
    __builtin_memcpy(to + Bits, &second, Bits);
  }
}

template <int Bits>
QCCL_FN void store_together(const ManyBytes& bytes, u8* to) {
  store_bytes<Bits>(bytes, to);
}
#endif

template <int Bits>
QCCL_FN void store_codes(const i32xN& codes, u8* to) {
  store_bytes<Bits>(narrow(codes), to);
}

// The codes of less than 32 values, with space for 32.
template <int Bits>
struct SomeCodes {
  u8 bytes[32] = {};

  void read(const u8* from, u32 n) { __builtin_memcpy(bytes, from, packed_nbytes(n, Bits)); }

  // Clears the bits behind the last code.
  void write(u8* to, u32 n) {
    const u32 nbytes = (u32)packed_nbytes(n, Bits), used = n * Bits % 8;
    if (used) bytes[nbytes - 1] &= (u8)((1u << used) - 1);
    __builtin_memcpy(to, bytes, nbytes);
  }
};

}  // namespace QCCL_NAMESPACE
