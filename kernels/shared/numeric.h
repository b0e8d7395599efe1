// Element types and bit tricks. Compiled by g++ for the host and by NVRTC for the device, with equal results:
// only integer operations and fp32 + - * / that round to nearest even; no libm, no standard headers.
#pragma once

#ifndef QCCL_NAMESPACE
#define QCCL_NAMESPACE qccl
#endif

#ifdef __CUDACC__
#define QCCL_MEMBER __device__ __forceinline__
#else
#define QCCL_MEMBER inline __attribute__((always_inline))
#endif
#define QCCL_FN static QCCL_MEMBER

// For a lambda; device code is inlined without it.
#ifdef __CUDACC__
#define QCCL_INLINE
#else
#define QCCL_INLINE __attribute__((always_inline))
#endif

namespace QCCL_NAMESPACE {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

// A if `first`, otherwise B.
template <bool first, class A, class B>
struct ChosenType {
  using Type = A;
};
template <class A, class B>
struct ChosenType<false, A, B> {
  using Type = B;
};
template <bool first, class A, class B>
using Choose = typename ChosenType<first, A, B>::Type;

// The unsigned integer of 1, 2, 4 or 8 bytes.
template <u32 Nbytes>
using UnsignedOf = Choose<Nbytes == 1, u8, Choose<Nbytes == 2, u16, Choose<Nbytes == 4, u32, u64>>>;

constexpr u32 kQuietNan = 0x7fc00000u;  // the only NaN that arithmetic here ever stores

#ifdef __CUDACC__
QCCL_FN float float_of(u32 bits) { return __uint_as_float(bits); }
QCCL_FN u32 bits_of(float x) { return __float_as_uint(x); }
#else
QCCL_FN float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
QCCL_FN u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
#endif

// Rounded to nearest even, as IEEE 754 requires.
QCCL_FN float square_root(float x) {
#ifdef __CUDACC__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

QCCL_FN bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }
QCCL_FN bool is_finite(float x) { return (bits_of(x) & 0x7fffffffu) < 0x7f800000u; }

// A signed integer that orders as the float does, with -0 < +0 and the NaNs outside of the infinities.
// The function is its own inverse.
QCCL_FN i32 order_key(u32 bits) { return (i32)(bits ^ ((u32)((i32)bits >> 31) & 0x7fffffffu)); }
constexpr i32 kKeyPlusInfinity = 0x7f800000;
constexpr i32 kKeyMinusInfinity = -0x7f800001;

struct Range {
  float low, high;
};

// The range whose ends have the given order keys; NaN if an end is not finite.
QCCL_FN Range finite_range(i32 lowest, i32 highest) {
  if (lowest <= kKeyMinusInfinity || highest >= kKeyPlusInfinity) return {float_of(kQuietNan), float_of(kQuietNan)};
  return {float_of((u32)order_key((u32)lowest)), float_of((u32)order_key((u32)highest))};
}

// The element types, numbered as in qccl/base/dtypes.py. `to_float` is exact; `from_float` rounds to nearest even, overflows
// to infinity, and turns every NaN into the quiet one without sign or payload.
struct Float32 {
  using Storage = float;
  static constexpr u32 code = 0;
  QCCL_FN float to_float(float x) { return x; }
  QCCL_FN float from_float(float x) { return is_nan(x) ? float_of(kQuietNan) : x; }
};

struct Float16 {
  using Storage = u16;
  static constexpr u32 code = 1;

  QCCL_FN float to_float(u16 h) {
    const u32 magnitude = (u32)(h & 0x7fffu) << 13;
    const u32 sign = (u32)(h & 0x8000u) << 16;
    const u32 normal = magnitude + (112u << 23);                                          // exponent bias 15 -> 127
    const u32 special = magnitude + (224u << 23);                                         // infinity, NaN
    const u32 small = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));  // zero, subnormal
    const u32 bits = magnitude >= (31u << 23) ? special : (magnitude < (1u << 23) ? small : normal);
    return float_of(bits | sign);
  }

  QCCL_FN u16 from_float(float x) {
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 sign = (bits >> 16) & 0x8000u;
    const u32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // The unit in the last place of 0.5 is 2^-24, the step of the subnormals, so the addition rounds to that step. Larger
    // values do not use the result; 0 replaces them so that the addition sees no infinity or NaN.
    const float bounded = magnitude < 0x38800000u ? float_of(magnitude) : 0.0f;
    const u32 small = bits_of(bounded + 0.5f) - 0x3f000000u;
    u32 half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and more
    return (u16)(magnitude > 0x7f800000u ? 0x7e00u : (half | sign));
  }
};

struct BFloat16 {
  using Storage = u16;
  static constexpr u32 code = 2;
  QCCL_FN float to_float(u16 b) { return float_of((u32)b << 16); }
  QCCL_FN u16 from_float(float x) {
    const u32 bits = bits_of(x);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? (kQuietNan >> 16) : rounded);
  }
};

}  // namespace QCCL_NAMESPACE
