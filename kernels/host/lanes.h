// Sixteen values at a time, in one register of AVX-512, two of AVX2, or four of SSE2 or NEON. The code uses the compiler's
// vector extensions, and intrinsics where the compiler does not find the instruction.
#pragma once

#include "../shared/numeric.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// The x86-64 levels v4 and v3 (see CMakeLists.txt).
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QCCL_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#define QCCL_AVX2 1
#endif

// For a function that is a loop: keeps the compiler from copying it into each caller.
#define QCCL_LOOP __attribute__((noinline))

// Before a loop whose iterations may run in any order, although the compiler cannot see it: it then uses vectors.
#if defined(__clang__)
#define QCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define QCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace QCCL_NAMESPACE {

constexpr u32 kLanes = 16;

#if defined(QCCL_AVX512)
constexpr u32 kRegisterBytes = 64;
#elif defined(QCCL_AVX2)
constexpr u32 kRegisterBytes = 32;
#else
constexpr u32 kRegisterBytes = 16;
#endif

constexpr u32 kParts = kLanes * 4 / kRegisterBytes;

// 64 bytes: sixteen elements of four bytes, as in most code here, or 32 of two.
template <class E>
struct Lanes {
  typedef E Part __attribute__((vector_size(kRegisterBytes)));
  Part part[kParts];
};

using f32xN = Lanes<float>;
using i32xN = Lanes<i32>;
using u32xN = Lanes<u32>;

#define QCCL_EACH_PART for (u32 p = 0; p < kParts; ++p)

#define QCCL_LANES_OPERATOR(op)                               \
  template <class E>                                          \
  QCCL_FN Lanes<E> operator op(Lanes<E> a, const Lanes<E>& b) { \
    QCCL_EACH_PART a.part[p] = a.part[p] op b.part[p];        \
    return a;                                                 \
  }                                                           \
  template <class E>                                          \
  QCCL_FN Lanes<E> operator op(Lanes<E> a, E b) {             \
    QCCL_EACH_PART a.part[p] = a.part[p] op b;                \
    return a;                                                 \
  }
QCCL_LANES_OPERATOR(+)
QCCL_LANES_OPERATOR(-)
QCCL_LANES_OPERATOR(*)
QCCL_LANES_OPERATOR(/)
QCCL_LANES_OPERATOR(^)
QCCL_LANES_OPERATOR(&)
QCCL_LANES_OPERATOR(>>)
QCCL_LANES_OPERATOR(<<)
#undef QCCL_LANES_OPERATOR

template <class E>
QCCL_FN Lanes<E> all_lanes(E x) {
  Lanes<E> lanes;
  QCCL_EACH_PART lanes.part[p] = x - (typename Lanes<E>::Part){};
  return lanes;
}

// The same bits as another type of four bytes.
template <class To, class From>
QCCL_FN Lanes<To> cast(const Lanes<From>& x) {
  Lanes<To> y;
  QCCL_EACH_PART y.part[p] = (typename Lanes<To>::Part)x.part[p];
  return y;
}

// Loads and stores at any address, one register at a time: the compiler would copy the whole struct through memory.
template <class Part>
QCCL_FN Part load_part(const void* from) {
  Part part;
  __builtin_memcpy(&part, from, sizeof part);
  return part;
}

template <class E>
QCCL_FN Lanes<E> load_lanes(const void* from) {
  Lanes<E> lanes;
  QCCL_EACH_PART lanes.part[p] = load_part<typename Lanes<E>::Part>(static_cast<const u8*>(from) + p * kRegisterBytes);
  return lanes;
}

template <class E>
QCCL_FN void store_lanes(const Lanes<E>& lanes, void* to) {
  QCCL_EACH_PART {
    const typename Lanes<E>::Part part = lanes.part[p];
    __builtin_memcpy(static_cast<u8*>(to) + p * kRegisterBytes, &part, kRegisterBytes);
  }
}

QCCL_FN u32xN lane_numbers() {
  alignas(64) static constexpr u32 numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_lanes<u32>(numbers);
}

QCCL_FN f32xN to_floats(const i32xN& x) {
  f32xN y;
  QCCL_EACH_PART y.part[p] = __builtin_convertvector(x.part[p], f32xN::Part);
  return y;
}

QCCL_FN f32xN absolute(const f32xN& x) { return cast<float>(cast<i32>(x) & 0x7fffffff); }

// Rounds towards zero.
QCCL_FN i32xN truncate(const f32xN& x) {
  i32xN y;
  QCCL_EACH_PART y.part[p] = __builtin_convertvector(x.part[p], i32xN::Part);
  return y;
}

// Rounds to nearest even; for 0 <= x < 2^23. The unit in the last place of 2^23 is 1, so the addition rounds.
QCCL_FN i32xN to_nearest(const f32xN& x) {
#if defined(QCCL_AVX512)
  return {(i32xN::Part)_mm512_cvtps_epi32(x.part[0])};
#else
  return cast<i32>(x + 0x1p23f) - 0x4b000000;
#endif
}

#if defined(QCCL_AVX512)
// Rounds up; for 0 <= x < 2^32.
QCCL_FN u32xN ceil_to_u32(const f32xN& x) {
  return {(u32xN::Part)_mm512_cvt_roundps_epu32(x.part[0], _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)};
}
#endif

// A set of lanes: one bit or one whole lane each.
#if defined(QCCL_AVX512)
using Mask = __mmask16;
QCCL_FN Mask is_less(const f32xN& a, const f32xN& b) { return _mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_LT_OQ); }
QCCL_FN Mask is_less(const i32xN& a, const i32xN& b) {
  return _mm512_cmplt_epi32_mask((__m512i)a.part[0], (__m512i)b.part[0]);
}
QCCL_FN Mask is_nan(const f32xN& x) { return _mm512_cmp_ps_mask(x.part[0], x.part[0], _CMP_UNORD_Q); }
QCCL_FN Mask either(Mask a, Mask b) { return a | b; }
QCCL_FN f32xN select(Mask which, const f32xN& yes, const f32xN& no) {
  return {_mm512_mask_blend_ps(which, no.part[0], yes.part[0])};
}
QCCL_FN i32xN select(Mask which, const i32xN& yes, const i32xN& no) {
  return {(i32xN::Part)_mm512_mask_blend_epi32(which, (__m512i)no.part[0], (__m512i)yes.part[0])};
}
QCCL_FN i32xN subtract_where(Mask which, const i32xN& a, const i32xN& b) {
  return {(i32xN::Part)_mm512_mask_sub_epi32((__m512i)a.part[0], which, (__m512i)a.part[0], (__m512i)b.part[0])};
}
#else
using Mask = i32xN;
template <class E>
QCCL_FN Mask is_less(const Lanes<E>& a, const Lanes<E>& b) {
  Mask m;
  QCCL_EACH_PART m.part[p] = a.part[p] < b.part[p];
  return m;
}
QCCL_FN Mask is_nan(const f32xN& x) {
  Mask m;
  QCCL_EACH_PART m.part[p] = x.part[p] != x.part[p];
  return m;
}
QCCL_FN Mask either(Mask a, const Mask& b) {
  QCCL_EACH_PART a.part[p] |= b.part[p];
  return a;
}
template <class E>
QCCL_FN Lanes<E> select(const Mask& which, const Lanes<E>& yes, Lanes<E> no) {
  QCCL_EACH_PART no.part[p] = which.part[p] ? yes.part[p] : no.part[p];
  return no;
}
QCCL_FN i32xN subtract_where(const Mask& which, const i32xN& a, const i32xN& b) { return a - (which & b); }
#endif

// One bit for each lane.
QCCL_FN u32 bits_of(const Mask& mask) {
#if defined(QCCL_AVX512)
  return mask;
#else
  u32 bits = 0;
#if defined(QCCL_AVX2)
  QCCL_EACH_PART bits |= (u32)_mm256_movemask_ps((__m256)mask.part[p]) << 8 * p;
#elif defined(__SSE2__)
  QCCL_EACH_PART bits |= (u32)_mm_movemask_ps((__m128)mask.part[p]) << 4 * p;
#else
  for (u32 i = 0; i < kLanes; ++i) bits |= (u32)(mask.part[i / 4][i % 4] & 1) << i;
#endif
  return bits;
#endif
}

template <class E>
QCCL_FN Lanes<E> least(Lanes<E> a, const Lanes<E>& b) {
  QCCL_EACH_PART a.part[p] = a.part[p] < b.part[p] ? a.part[p] : b.part[p];
  return a;
}

template <class E>
QCCL_FN Lanes<E> greatest(Lanes<E> a, const Lanes<E>& b) {
  QCCL_EACH_PART a.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
  return a;
}

// The sum of the lanes, and the greatest of them.
QCCL_FN i32 sum_of_lanes(const i32xN& x) {
#if defined(QCCL_AVX512)
  return _mm512_reduce_add_epi32((__m512i)x.part[0]);
#else
  i32xN::Part sums = x.part[0];
  for (u32 p = 1; p < kParts; ++p) sums += x.part[p];
  i32 sum = 0;
  for (u32 i = 0; i < kRegisterBytes / 4; ++i) sum += sums[i];
  return sum;
#endif
}
QCCL_FN i32 greatest_lane(const i32xN& x) {
#if defined(QCCL_AVX512)
  return _mm512_reduce_max_epi32((__m512i)x.part[0]);
#else
  alignas(64) i32 lanes[kLanes];
  store_lanes(x, lanes);
  for (u32 i = 1; i < kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
#endif
}

template <u32... I>
struct Indices {};
template <u32 N, u32... I>
struct CountedIndices : CountedIndices<N - 1, N - 1, I...> {};
template <u32... I>
struct CountedIndices<0, I...> {
  using Type = Indices<I...>;
};

// Combines each lane i of `a` that lacks bit `Bit` with lane i + Bit, and each lane of `b` that has it with lane i - Bit.
template <u32 Bit, class Part, class Op, u32... I>
QCCL_FN Part combine_lanes(const Part& a, const Part& b, const Op& op, Indices<I...>) {
  constexpr i32 n = sizeof...(I);
  return op(__builtin_shufflevector(a, b, (i32)(I & Bit ? n + I - Bit : I)...),
            __builtin_shufflevector(a, b, (i32)(I & Bit ? n + I : I + Bit)...));
}

// Replaces x[0] of as many registers as they have lanes: lane i becomes the combination of all lanes of x[i].
template <u32 Bit, class Part, class Op>
QCCL_FN void combine_registers(Part* x, const Op& op) {
  using Lane = typename CountedIndices<kRegisterBytes / 4>::Type;
  for (u32 i = 0; i < Bit; ++i) x[i] = combine_lanes<Bit>(x[i], x[i + Bit], op, Lane());
  if constexpr (Bit > 1) combine_registers<Bit / 2>(x, op);
}

// Lane i of the result is op() of all lanes of x[i].
template <class E, class Op>
QCCL_FN Lanes<E> across_lanes(const Lanes<E> (&x)[kLanes], const Op& op) {
  Lanes<E> found;
  constexpr u32 lanes = kRegisterBytes / 4;
  QCCL_EACH_PART {
    typename Lanes<E>::Part of[lanes];
    for (u32 i = 0; i < lanes; ++i) {
      of[i] = x[p * lanes + i].part[0];
      for (u32 q = 1; q < kParts; ++q) of[i] = op(of[i], x[p * lanes + i].part[q]);
    }
    combine_registers<lanes / 2>(of, op);
    found.part[p] = of[0];
  }
  return found;
}

#if defined(QCCL_AVX2)
// For each mask of eight lanes, the numbers of its lanes as bytes, lowest first. (The instruction pext would make them, but
// takes hundreds of cycles on AMD's Zen 2.)
struct LanesOfMask {
  u64 lanes[256] = {};

  constexpr LanesOfMask() {
    for (u32 mask = 0; mask < 256; ++mask) {
      u32 at = 0;
      for (u64 i = 0; i < 8; ++i) {
        if (mask >> i & 1) lanes[mask] |= i << 8 * at++;
      }
    }
  }
};
#endif

// Stores `first` + i for each lane i of the mask, one after the other, and may write to all sixteen places; returns how many.
QCCL_FN u32 store_numbers(const Mask& mask, u32 first, u32* to) {
#if defined(QCCL_AVX512)
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, (__m512i)(lane_numbers() + first).part[0]));
  return (u32)__builtin_popcount(mask);
#elif defined(QCCL_AVX2)
  static constexpr LanesOfMask table;
  u32 count = 0;
  for (u32 p = 0; p < kParts; ++p) {
    const u32 bits = (u32)_mm256_movemask_ps((__m256)mask.part[p]);
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table.lanes + bits)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + count), _mm256_add_epi32(lanes, _mm256_set1_epi32((i32)(first + 8 * p))));
    count += (u32)__builtin_popcount(bits);
  }
  return count;
#else
  u32 count = 0;
  for (u32 bits = bits_of(mask); bits; bits &= bits - 1) to[count++] = first + (u32)__builtin_ctz(bits);
  return count;
#endif
}

}  // namespace QCCL_NAMESPACE
