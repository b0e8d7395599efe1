// Loops over one block of at most kBlock elements, in and out of a scratch in L1. Plain loops over plain arrays, so that
// the compiler vectorises them for whichever instruction set this build is for.
#pragma once

#include "../minmax.h"
#include "../pack.h"
#include "../random.h"
#include "calls.h"

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

QCCL_FN u64 load_bytes(const u8* from, u32 n) {
  u64 x = 0;
  __builtin_memcpy(&x, from, n);
  return x;
}

// Bytes of n packed codes.
QCCL_FN u64 packed_nbytes(u64 n, u32 bits) { return n / 8 * bits + (n % 8 * bits + 7) / 8; }

// n codes (the array is padded to a multiple of eight) to exactly packed_nbytes(n) bytes.
template <int Bits>
void pack_block(u8* __restrict codes, u32 n, u8* __restrict wire) {
  const u32 whole = n / 8, rest = n % 8;
  if constexpr (Bits == 8) {
    __builtin_memcpy(wire, codes, n);
    return;
  }
  u64 packed[kBlock / 8];
  for (u32 i = n; i < (n + 7) / 8 * 8; ++i) codes[i] = 0;
  for (u32 g = 0; g < (n + 7) / 8; ++g) {
    u64 x;
    __builtin_memcpy(&x, codes + 8 * g, 8);
    packed[g] = pack8<Bits>(x);
  }
  for (u32 g = 0; g < whole; ++g) __builtin_memcpy(wire + Bits * g, &packed[g], Bits);
  if (rest) __builtin_memcpy(wire + Bits * whole, &packed[whole], (rest * Bits + 7) / 8);
}

// The inverse; writes whole groups of eight codes.
template <int Bits>
void unpack_block(const u8* __restrict wire, u32 n, u8* __restrict codes) {
  const u32 whole = n / 8, rest = n % 8;
  if constexpr (Bits == 8) {
    __builtin_memcpy(codes, wire, n);
    return;
  }
  u64 packed[kBlock / 8];
  for (u32 g = 0; g < whole; ++g) packed[g] = load_bytes(wire + Bits * g, Bits);
  if (rest) packed[whole] = load_bytes(wire + Bits * whole, (rest * Bits + 7) / 8);
  for (u32 g = 0; g < (n + 7) / 8; ++g) {
    const u64 x = unpack8<Bits>(packed[g]);
    __builtin_memcpy(codes + 8 * g, &x, 8);
  }
}

}  // namespace QCCL_NAMESPACE
