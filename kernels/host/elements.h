// Sixteen elements of a type in memory, as fp32 in registers. The results are those of T::to_float and T::from_float,
// but a NaN that is stored has to be the quiet one.
#pragma once

#include "lanes.h"

namespace QCCL_NAMESPACE {

// With the quiet one, which has no sign and no payload, for every NaN.
QCCL_FN Floats quiet_nans(const Floats& x) { return select(is_nan(x), all_lanes(float_of(kQuietNan)), x); }

template <class T>
struct Elements {
  using Storage = typename T::Storage;

  QCCL_FN Floats load(const Storage* from) {
    alignas(64) float x[kLanes];
    for (u32 i = 0; i < kLanes; ++i) x[i] = T::to_float(from[i]);
    return load_lanes<float>(x);
  }

  QCCL_FN void store(const Floats& x, Storage* to) {
    alignas(64) float values[kLanes];
    store_lanes(x, values);
    for (u32 i = 0; i < kLanes; ++i) to[i] = T::from_float(values[i]);
  }
};

template <>
struct Elements<Float32> {
  QCCL_FN Floats load(const float* from) { return load_lanes<float>(from); }
  QCCL_FN void store(const Floats& x, float* to) { store_lanes(x, to); }
};

#if defined(QCCL_AVX512) || defined(QCCL_AVX2)
// The processor's own conversion equals the integer one but for the payload of NaNs.
template <>
struct Elements<Float16> {
  QCCL_FN Floats load(const u16* from) {
#if defined(QCCL_AVX512)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#else
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
#endif
  }

  QCCL_FN void store(const Floats& x, u16* to) {
#if defined(QCCL_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.part[0], _MM_FROUND_TO_NEAREST_INT));
#else
    auto* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.part[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.part[1], _MM_FROUND_TO_NEAREST_INT));
#endif
  }
};
#endif

#if defined(__SSE2__)
template <>
struct Elements<BFloat16> {
  QCCL_FN Floats load(const u16* from) {
#if defined(QCCL_AVX512)
    const Words wide{(Words::Part)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    return cast<float>(wide << 16u);
#else
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    const __m128i first = _mm_loadu_si128(halves), second = _mm_loadu_si128(halves + 1);
#if defined(QCCL_AVX2)
    const Words wide{{(Words::Part)_mm256_cvtepu16_epi32(first), (Words::Part)_mm256_cvtepu16_epi32(second)}};
    return cast<float>(wide << 16u);
#else
    const __m128i zero{};
    return {{(Floats::Part)_mm_unpacklo_epi16(zero, first), (Floats::Part)_mm_unpackhi_epi16(zero, first),
             (Floats::Part)_mm_unpacklo_epi16(zero, second), (Floats::Part)_mm_unpackhi_epi16(zero, second)}};
#endif
#endif
  }

  QCCL_FN void store(const Floats& x, u16* to) {
    const Words bits = cast<u32>(x);
    const Ints kept = cast<i32>(bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16;  // signed, as the packing takes them
#if defined(QCCL_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)kept.part[0]));
#elif defined(QCCL_AVX2)
    const __m256i mixed = _mm256_packs_epi32((__m256i)kept.part[0], (__m256i)kept.part[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
#else
    auto* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm_packs_epi32((__m128i)kept.part[0], (__m128i)kept.part[1]));
    _mm_storeu_si128(halves + 1, _mm_packs_epi32((__m128i)kept.part[2], (__m128i)kept.part[3]));
#endif
  }
};
#endif

// The first `lanes` elements; the other lanes are zero.
template <class T>
QCCL_FN Floats load_values(const typename T::Storage* from, u32 lanes) {
  if (lanes == kLanes) return Elements<T>::load(from);
  typename T::Storage some[kLanes] = {};
  __builtin_memcpy(some, from, lanes * sizeof some[0]);
  return Elements<T>::load(some);
}

// To the first `lanes` elements.
template <class T>
QCCL_FN void store_values(const Floats& x, typename T::Storage* to, u32 lanes) {
  if (lanes == kLanes) return Elements<T>::store(x, to);
  typename T::Storage some[kLanes];
  Elements<T>::store(x, some);
  __builtin_memcpy(to, some, lanes * sizeof some[0]);
}

}  // namespace QCCL_NAMESPACE
