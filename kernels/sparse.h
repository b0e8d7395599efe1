// What the sparse codecs share: how many elements of a block they keep, and the kept values on the wire.
#pragma once

#include "bucket.h"

namespace QCCL_NAMESPACE {

// The first two options: elements of a whole block, and whether a shorter one has its share of them (1) or as many (0).
QCCL_FN u64 kept(const BucketOptions& options, u64 n) {
  const u64 most = options.options[0];
  if (options.options[1]) return (most * n + options.bucket - 1) / options.bucket;
  return most < n ? most : n;
}

template <u32 Bytes>
QCCL_FN u32 load_number(const u8* at) {
  u32 number = 0;
  for (u32 i = 0; i < Bytes; ++i) number |= (u32)at[i] << 8 * i;
  return number;
}
template <u32 Bytes>
QCCL_FN void store_number(u8* at, u32 number) {
  for (u32 i = 0; i < Bytes; ++i) at[i] = (u8)(number >> 8 * i);
}

QCCL_FN u32 storage_bits(float x) { return bits_of(x); }
QCCL_FN u32 storage_bits(u16 x) { return x; }

// Value j on the wire, in the call's element type.
template <class T>
QCCL_FN void store_kept(u8* codes, u64 j, float x) {
  constexpr u32 size = sizeof(typename T::Storage);
  store_number<size>(codes + j * size, storage_bits(T::from_float(x)));
}
template <class T>
QCCL_FN float load_kept(const u8* codes, u64 j) {
  constexpr u32 size = sizeof(typename T::Storage);
  const u32 bits = load_number<size>(codes + j * size);
  if constexpr (size == 4) {
    return float_of(bits);
  } else {
    return T::to_float((u16)bits);
  }
}

// Of a block with a NaN or an infinity all values on the wire are NaN; the first tells the decoder.
template <class T, class Team, class Values>
QCCL_FN bool encode_spoiled(const Team& team, const Values& x, u32 n, u32 keep, u8* codes) {
  if (team.greatest(n, [&](i32 i) { return magnitude(x[i]); }) < kInfinite) return false;
  team.each(keep, [&](i32 j) { store_kept<T>(codes, j, float_of(kQuietNan)); });
  return true;
}
template <class T, class Team, class Take>
QCCL_FN bool decode_spoiled(const Team& team, const u8* codes, u32 n, const Take& take) {
  if (!is_nan(load_kept<T>(codes, 0))) return false;
  team.each(n, [&](i32 i) { take(i, float_of(kQuietNan)); });
  return true;
}

}  // namespace QCCL_NAMESPACE
