// Loads and stores sixteen elements as fp32. The results equal T::to_float and T::from_float, but a NaN must be the quiet
// one before it is stored.
#pragma once

#include "lanes.h"

namespace QCCL_NAMESPACE {

// Replaces every NaN by the quiet one without sign or payload.
QCCL_FN f32xN quiet_nans(const f32xN& x) { return select(is_nan(x), all_lanes(float_of(kQuietNan)), x); }

template <class T>
struct Elements {
  using Storage = typename T::Storage;

  QCCL_FN f32xN load(const Storage* from) {
    alignas(64) float x[kLanes];
    for (u32 i = 0; i < kLanes; ++i) x[i] = T::to_float(from[i]);
    return load_lanes<float>(x);
  }

  QCCL_FN void store(const f32xN& x, Storage* to) {
    alignas(64) float values[kLanes];
    store_lanes(x, values);
    for (u32 i = 0; i < kLanes; ++i) to[i] = T::from_float(values[i]);
  }
};

template <>
struct Elements<Float32> {
  QCCL_FN f32xN load(const float* from) { return load_lanes<float>(from); }
  QCCL_FN void store(const f32xN& x, float* to) { store_lanes(x, to); }
};

#if defined(QCCL_AVX512) || defined(QCCL_AVX2)
// The processor's conversion equals T::to_float and T::from_float except for the payload of NaNs.
template <>
struct Elements<Float16> {
  QCCL_FN f32xN load(const u16* from) {
#if defined(QCCL_AVX512)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#else
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
#endif
  }

  QCCL_FN void store(const f32xN& x, u16* to) {
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
  QCCL_FN f32xN load(const u16* from) {
#if defined(QCCL_AVX512)
    const u32xN wide{(u32xN::Part)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    return cast<float>(wide << 16u);
#else
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    const __m128i first = _mm_loadu_si128(halves), second = _mm_loadu_si128(halves + 1);
#if defined(QCCL_AVX2)
    const u32xN wide{{(u32xN::Part)_mm256_cvtepu16_epi32(first), (u32xN::Part)_mm256_cvtepu16_epi32(second)}};
    return cast<float>(wide << 16u);
#else
    const __m128i zero{};
    return {{(f32xN::Part)_mm_unpacklo_epi16(zero, first), (f32xN::Part)_mm_unpackhi_epi16(zero, first),
             (f32xN::Part)_mm_unpacklo_epi16(zero, second), (f32xN::Part)_mm_unpackhi_epi16(zero, second)}};
#endif
#endif
  }

  QCCL_FN void store(const f32xN& x, u16* to) {
    const u32xN bits = cast<u32>(x);
    // signed, because the packing instruction saturates signed numbers
    const i32xN kept = cast<i32>(bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16;
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
QCCL_FN f32xN load_values(const typename T::Storage* from, u32 lanes) {
  if (lanes == kLanes) return Elements<T>::load(from);
  typename T::Storage some[kLanes] = {};
  __builtin_memcpy(some, from, lanes * sizeof some[0]);
  return Elements<T>::load(some);
}

// Stores the first `lanes` elements.
template <class T>
QCCL_FN void store_values(const f32xN& x, typename T::Storage* to, u32 lanes) {
  if (lanes == kLanes) return Elements<T>::store(x, to);
  typename T::Storage some[kLanes];
  Elements<T>::store(x, some);
  __builtin_memcpy(to, some, lanes * sizeof some[0]);
}

// Replaces NaNs in memory, and stores nothing where there is none. It prefetches 4 KiB ahead, beyond n, too: memory then loads
// the next bucket while the processor decodes this one. (A prefetch of an address that does not exist does nothing.)
QCCL_LOOP static inline void make_nans_quiet(float* x, u32 n) {
  u32 i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    __builtin_prefetch(x + i + 1024, 1);
    const f32xN values = load_lanes<float>(x + i);
    if (bits_of(is_nan(values))) store_lanes(quiet_nans(values), x + i);
  }
  for (; i < n; ++i) x[i] = is_nan(x[i]) ? float_of(kQuietNan) : x[i];
}

// Copies n floats without bringing `to`, which is aligned to 16 bytes, into the caches, and leaves zeros in their place.
// stop_streaming() follows.
QCCL_LOOP static inline void move_floats(float* from, u32 n, float* to) {
  u32 i = 0;
#if defined(__SSE2__)
  for (; i + 16 <= n; i += 16) {
    for (u32 j = i; j < i + 16; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(from + j));
    store_lanes(all_lanes(0.0f), from + i);
  }
#endif
  for (; i < n; ++i) to[i] = from[i], from[i] = 0.0f;
}

// Orders streamed stores before later ones, as other threads see them.
static inline void stop_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace QCCL_NAMESPACE
