// The interface of a codec, and the format of its wire.
//
// A codec is a struct of static functions that a *team* runs on one bucket: on the host one thread (host/team.h), on the
// device a block of threads (cuda/team.h). The functions access memory only through the team and their arguments, so
// host and device run the same source and make the same bytes. docs/adding-a-codec.md adds one step by step.
//
//   sparse, typed                            // see CodecDefaults
//   codes_nbytes<T>(options, n)              // size of a bucket of n elements in the codes section
//   meta_nbytes<T>(options, n)               // size in the meta section; a multiple of four, or 0
//   encode<T>(team, options, counter, x, n, codes, meta)      // x[i] is value i, in fp32
//   decode<T>(team, options, counter, codes, meta, n, take)   // take(i, value), at most once for each element; NaN at any time
#pragma once

#include "numeric.h"
#include "parameters.h"
#include "random.h"

namespace QCCL_NAMESPACE {

#ifndef __CUDACC__  // the device's namespace is qccl itself
using qccl::BucketOptions;
using qccl::RngCounter;
#endif

// A codec inherits these and overrides what differs.
struct CodecDefaults {
  static constexpr bool sparse = false;  // decoding gives some elements only; the others are zero
  static constexpr bool typed = false;   // the wire has values in the call's element type T; other codecs ignore T
};

// Random words for the elements of a bucket. The upper half of the index changes at most once within a bucket.
struct Draws {
  RandomKey key, next;
  u32 index;
  QCCL_MEMBER u32 word(u32 i) const {
    const u32 here = index + i;
    const RandomKey chosen = {here < index ? next.low : key.low, here < index ? next.high : key.high};
    return random_word(chosen, here);
  }
};

QCCL_FN Draws make_draws(u64 seed, const RngCounter& counter) {
  const u32 high = (u32)(counter.index >> 32);
  return {random_key(seed, counter.call, counter.round, counter.rank, high),
          random_key(seed, counter.call, counter.round, counter.rank, high + 1), (u32)counter.index};
}

// Every team adds the terms of a bucket in the same order, so sums do not depend on the team. Lane j of 256 starts at +0
// and adds the terms j, j + 256, ... of a tile; then each lane adds the sums of its tiles; then the upper half of the lanes
// is added to the lower half until one lane remains.
constexpr u32 kSumLanes = 256;
constexpr u32 kSumTile = 2048;

// Two terms, or two sums that one pass computes.
struct FloatPair {
  float first, second;
};
QCCL_FN FloatPair operator+(const FloatPair& a, const FloatPair& b) { return {a.first + b.first, a.second + b.second}; }

// Where the meta section begins if the codes section has `codes_nbytes` bytes.
QCCL_FN u64 meta_offset(u64 codes_nbytes) { return (codes_nbytes + 3) / 4 * 4; }

// Where the parts of a wire lie, which is the encoded bytes of one chunk: the codes section of all buckets, zeros up to a
// multiple of four bytes, the meta section.
template <class Codec, class T>
struct WireFormat {
  BucketOptions options;
  u64 count, bucket, buckets, codes_stride, meta_stride, codes_end, meta_begin;

  QCCL_FN WireFormat make(const BucketOptions& options, u64 count) {
    const u64 bucket = options.bucket ? options.bucket : count;
    const u64 buckets = (count + bucket - 1) / bucket, last = count - (buckets - 1) * bucket;
    const u64 codes = Codec::template codes_nbytes<T>(options, bucket);
    const u64 meta = Codec::template meta_nbytes<T>(options, bucket);
    const u64 end = (buckets - 1) * codes + Codec::template codes_nbytes<T>(options, last);
    return {options, count, bucket, buckets, codes, meta, end, meta ? meta_offset(end) : end};
  }

  QCCL_FN u64 first_of(const WireFormat& format, u64 b) { return b * format.bucket; }
  QCCL_FN u64 size_of(const WireFormat& format, u64 b) {
    const u64 rest = format.count - b * format.bucket;
    return rest < format.bucket ? rest : format.bucket;
  }
  QCCL_FN u64 codes_of(const WireFormat& format, u64 b) { return b * format.codes_stride; }
  QCCL_FN u64 meta_of(const WireFormat& format, u64 b) { return format.meta_begin + b * format.meta_stride; }
  QCCL_FN u64 nbytes(const WireFormat& format) {
    const u64 last = format.buckets - 1;
    return meta_of(format, last) + Codec::template meta_nbytes<T>(format.options, size_of(format, last));
  }
};

// Little-endian numbers at any address.
QCCL_FN u32 load_word(const u8* at) { return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24; }
QCCL_FN void store_word(u8* at, u32 word) {
  at[0] = (u8)word, at[1] = (u8)(word >> 8), at[2] = (u8)(word >> 16), at[3] = (u8)(word >> 24);
}
QCCL_FN float load_float(const u8* at) { return float_of(load_word(at)); }
QCCL_FN void store_float(u8* at, float x) { store_word(at, bits_of(x)); }

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

// Value j of a wire whose values are in the element type T.
template <class T>
QCCL_FN void store_element(u8* codes, u64 j, float x) {
  constexpr u32 size = sizeof(typename T::Storage);
  store_number<size>(codes + j * size, storage_bits(T::from_float(x)));
}
template <class T>
QCCL_FN float load_element(const u8* codes, u64 j) {
  constexpr u32 size = sizeof(typename T::Storage);
  const u32 bits = load_number<size>(codes + j * size);
  if constexpr (size == 4) {
    return float_of(bits);
  } else {
    return T::to_float((u16)bits);
  }
}

// abs(x) as an integer of the same order: infinity is kInfinite, NaNs are greater.
QCCL_FN i32 magnitude(float x) { return (i32)(bits_of(x) & 0x7fffffffu); }
constexpr i32 kInfinite = 0x7f800000;

QCCL_FN float absolute(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

}  // namespace QCCL_NAMESPACE
