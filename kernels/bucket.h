// The form of a codec whose buckets are coded one by one: what such a codec has, and where its bytes lie.
//
// A codec is a struct of static functions that a *team* runs on one bucket: on the host one thread (host/team.h), on the
// device a block of threads (cuda/team.h). The functions see memory only through the team and what they are given, so
// one text serves both, and both make the same bytes. See docs/adding-a-codec.md for a walk through one.
//
//   static constexpr bool sparse;            // decoding gives some elements only; the others are zero. T is the call's
//                                            // element type then, for values on the wire; others must not look at it
//   codes_nbytes<T>(options, n)              // bytes of a bucket of n elements in the first part of the wire
//   meta_nbytes<T>(options, n)               // and in the second; a multiple of four, or 0
//   encode<T>(team, options, stamp, x, n, codes, meta)      // x[i] is value i, in fp32
//   decode<T>(team, options, stamp, codes, meta, n, take)   // take(i, value), at most once for each element
#pragma once

#include "numeric.h"
#include "random.h"

namespace QCCL_NAMESPACE {

// A codec's parameters, the same struct for all; what `options` are is the codec's own affair.
struct BucketOptions {
  u64 bucket;  // elements
  u64 seed;
  u32 options[6];
};

// Who made a bucket's code, and from which element of the whole vector on: what random numbers are keyed by.
struct Stamp {
  u64 call, index;
  u32 round, rank;
};

// Random words for the elements of a bucket. Within it the upper half of the index changes at most once.
struct Draws {
  RandomKey key, next;
  u32 index;
  QCCL_MEMBER u32 word(u32 i) const {
    const u32 here = index + i;
    const RandomKey chosen = {here < index ? next.low : key.low, here < index ? next.high : key.high};
    return random_word(chosen, here);
  }
};

QCCL_FN Draws make_draws(u64 seed, const Stamp& stamp) {
  const u32 high = (u32)(stamp.index >> 32);
  return {random_key(seed, stamp.call, stamp.round, stamp.rank, high),
          random_key(seed, stamp.call, stamp.round, stamp.rank, high + 1), (u32)stamp.index};
}

// Sums over a bucket are made by this many lanes, whatever the team: lane j adds the terms j, j + 256, ... of a tile,
// beginning with +0, and then the sums of its tiles; the lanes are folded in halves.
constexpr u32 kSumLanes = 256;
constexpr u32 kSumTile = 2048;

// Two terms, or two sums that are made at once.
struct Two {
  float first, second;
};
QCCL_FN Two operator+(const Two& a, const Two& b) { return {a.first + b.first, a.second + b.second}; }

// The wire of one call: the first parts of all buckets, zeros to a multiple of four bytes, the second parts of all.
template <class Codec, class T>
struct BucketWire {
  BucketOptions options;
  u64 count, buckets, codes_stride, meta_stride, codes_end, meta_begin;

  QCCL_FN BucketWire make(const BucketOptions& options, u64 count) {
    const u64 bucket = options.bucket, buckets = (count + bucket - 1) / bucket, last = count - (buckets - 1) * bucket;
    const u64 codes = Codec::template codes_nbytes<T>(options, bucket);
    const u64 meta = Codec::template meta_nbytes<T>(options, bucket);
    const u64 end = (buckets - 1) * codes + Codec::template codes_nbytes<T>(options, last);
    return {options, count, buckets, codes, meta, end, meta ? (end + 3) / 4 * 4 : end};
  }

  QCCL_FN u64 first_of(const BucketWire& wire, u64 b) { return b * wire.options.bucket; }
  QCCL_FN u32 size_of(const BucketWire& wire, u64 b) {
    const u64 rest = wire.count - b * wire.options.bucket;
    return (u32)(rest < wire.options.bucket ? rest : wire.options.bucket);
  }
  QCCL_FN u64 codes_of(const BucketWire& wire, u64 b) { return b * wire.codes_stride; }
  QCCL_FN u64 meta_of(const BucketWire& wire, u64 b) { return wire.meta_begin + b * wire.meta_stride; }
  QCCL_FN u64 nbytes(const BucketWire& wire) {
    const u32 last = size_of(wire, wire.buckets - 1);
    return meta_of(wire, wire.buckets - 1) + Codec::template meta_nbytes<T>(wire.options, last);
  }
};

// Little-endian numbers at any address.
QCCL_FN u32 load_word(const u8* at) { return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24; }
QCCL_FN void store_word(u8* at, u32 word) {
  at[0] = (u8)word, at[1] = (u8)(word >> 8), at[2] = (u8)(word >> 16), at[3] = (u8)(word >> 24);
}
QCCL_FN float load_float(const u8* at) { return float_of(load_word(at)); }
QCCL_FN void store_float(u8* at, float x) { store_word(at, bits_of(x)); }

// The size of a value as an integer that orders as it does: infinity is kInfinite, NaNs are above.
QCCL_FN i32 magnitude(float x) { return (i32)(bits_of(x) & 0x7fffffffu); }
constexpr i32 kInfinite = 0x7f800000;

// The absolute value.
QCCL_FN float absolute(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

}  // namespace QCCL_NAMESPACE
