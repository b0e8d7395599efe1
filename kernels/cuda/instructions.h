// Faster instructions for functions of the shared headers, and reductions over the lanes of a warp.
#pragma once

#include "../shared/numeric.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define QCCL_SM80 1
#endif

namespace QCCL_NAMESPACE {

constexpr u32 kAllLanes = 0xffffffffu;

// The least and the greatest of some values, in the order of order_key().
#ifdef QCCL_SM80
struct Extent {
  float low, high;
};
QCCL_FN Extent no_values() { return {float_of(0x7f800000u), float_of(0xff800000u)}; }
#else
struct Extent {
  i32 low, high;
};
QCCL_FN Extent no_values() { return {0x7fffffff, -0x7fffffff - 1}; }
#endif

// The instruction orders -0 before +0, as the keys do. A NaN makes both ends NaN, which keys_of() passes on.
QCCL_FN void include(Extent& extent, float x) {
#ifdef QCCL_SM80
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(extent.low) : "f"(x));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(extent.high) : "f"(x));
#else
  const i32 key = order_key(bits_of(x));
  extent.low = key < extent.low ? key : extent.low;
  extent.high = key > extent.high ? key : extent.high;
#endif
}

// The lesser of two numbers.
QCCL_FN float lesser(float a, float b) {
#ifdef __CUDA_ARCH__
  float x;
  asm("min.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
#else
  return a < b ? a : b;
#endif
}

// Includes the magnitude of x in the upper end only.
QCCL_FN void include_magnitude(Extent& extent, float x) {
#ifdef QCCL_SM80
  asm("{ .reg .f32 size; abs.f32 size, %1; max.NaN.f32 %0, %0, size; }" : "+f"(extent.high) : "f"(x));
#else
  const i32 key = (i32)(bits_of(x) & 0x7fffffffu);
  extent.high = key > extent.high ? key : extent.high;
#endif
}

struct KeyPair {
  i32 lowest, highest;
};

QCCL_FN void widen(KeyPair& keys, KeyPair more) {
  keys.lowest = more.lowest < keys.lowest ? more.lowest : keys.lowest;
  keys.highest = more.highest > keys.highest ? more.highest : keys.highest;
}

QCCL_FN KeyPair keys_of(const Extent& extent) {
#ifdef QCCL_SM80
  return {order_key(bits_of(extent.low)), order_key(bits_of(extent.high))};
#else
  return {extent.low, extent.high};
#endif
}

// Reduces the keys of each group of `Lanes` neighbouring lanes; all of them get the result.
template <int Lanes>
QCCL_FN KeyPair gather_lanes(KeyPair keys) {
#ifdef QCCL_SM80
  constexpr bool done = Lanes == 32;
  if (done) keys = {__reduce_min_sync(kAllLanes, keys.lowest), __reduce_max_sync(kAllLanes, keys.highest)};
#else
  constexpr bool done = false;
#endif
#pragma unroll
  for (int distance = done ? 0 : Lanes / 2; distance > 0; distance /= 2) {
    const i32 lowest = __shfl_xor_sync(kAllLanes, keys.lowest, distance);
    widen(keys, {lowest, __shfl_xor_sync(kAllLanes, keys.highest, distance)});
  }
  return keys;
}

// The same address; tells the compiler that it is one of global memory, so that it needs no generic loads.
QCCL_FN const u8* global(const u8* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

// Prefetches up to 4 KiB into the L2 cache, a line of 128 bytes for each lane.
QCCL_FN void prefetch([[maybe_unused]] const u8* begin, [[maybe_unused]] u32 nbytes, [[maybe_unused]] u32 lane) {
#ifdef __CUDA_ARCH__
  if (lane * 128 < nbytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(begin + lane * 128)));
#endif
}

// Two values of 16 bits, the first in the lower half, rounded as by T::from_float; a NaN may become another NaN.
template <class T>
QCCL_FN u32 round_pair(float first, float second) {
#ifdef QCCL_SM80
  u32 pair;
  if constexpr (T::code == Float16::code) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return T::from_float(first) | (u32)T::from_float(second) << 16;
#endif
}

// Each byte all ones if its highest bit is set, otherwise zero.
QCCL_FN u32 spread_signs(u32 bytes) {
#ifdef __CUDA_ARCH__
  u32 spread;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(spread) : "r"(bytes));
  return spread;
#else
  return (bytes >> 7 & 0x01010101u) * 0xffu;
#endif
}

// a * b + c, rounded once.
QCCL_FN float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

template <class T>
QCCL_FN float widen_half(u16 bits) {
#ifdef __CUDA_ARCH__
  if constexpr (T::code == Float16::code) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
#endif
  return T::to_float(bits);
}

}  // namespace QCCL_NAMESPACE
