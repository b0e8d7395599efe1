// The min-max codec over a whole call: buckets, blocks of a bucket, and where everything lies on the wire.
#pragma once

#include "blocks.h"

namespace QCCL_NAMESPACE {

using qccl::DecodeCall;
using qccl::EncodeCall;
using qccl::MinMaxParameters;
using qccl::RandomPlace;
using qccl::ReduceCall;

// The wire of one call: codes of all buckets, zeros to a multiple of four bytes, then (low, high) of each bucket.
struct MinMaxWire {
  u64 count, bucket, buckets, code_nbytes, range_offset;
  u32 bits;

  MinMaxWire(const MinMaxParameters& codec, u64 elements)
      : count(elements), bucket(codec.bucket ? codec.bucket : elements), bits(codec.bits) {
    buckets = (count + bucket - 1) / bucket;
    code_nbytes = packed_nbytes(count, bits);  // whole buckets are multiples of eight elements
    range_offset = (code_nbytes + 3) / 4 * 4;
  }

  u64 size_of(u64 b) const { return smaller(bucket, count - b * bucket); }
  u64 code_offset(u64 element) const { return element / 8 * bits; }

  MinMaxRange range(const u8* wire, u64 b) const {
    MinMaxRange r;
    __builtin_memcpy(&r, wire + range_offset + 8 * b, sizeof r);
    return r;
  }

  void set_range(u8* wire, u64 b, MinMaxRange r) const { __builtin_memcpy(wire + range_offset + 8 * b, &r, sizeof r); }

  void clear_padding(u8* wire) const {
    for (u64 i = code_nbytes; i < range_offset; ++i) wire[i] = 0;
  }
};

// Scratch of one call; on the stack.
struct alignas(64) Scratch {
  float values[kBlock];
  float more[kBlock];
  u8 codes[kBlock];
};

static void pack(u32 bits, u8* codes, u32 n, u8* wire) {
  switch (bits) {
    case 1: return pack_block<1>(codes, n, wire);
    case 2: return pack_block<2>(codes, n, wire);
    case 3: return pack_block<3>(codes, n, wire);
    case 4: return pack_block<4>(codes, n, wire);
    case 5: return pack_block<5>(codes, n, wire);
    case 6: return pack_block<6>(codes, n, wire);
    case 7: return pack_block<7>(codes, n, wire);
    default: __builtin_memcpy(wire, codes, n);
  }
}

// The n codes at `wire`, one per byte: in `codes`, or where they are if they are bytes already.
static const u8* unpack(u32 bits, const u8* wire, u32 n, u8* codes) {
  switch (bits) {
    case 1: unpack_block<1>(wire, n, codes); break;
    case 2: unpack_block<2>(wire, n, codes); break;
    case 3: unpack_block<3>(wire, n, codes); break;
    case 4: unpack_block<4>(wire, n, codes); break;
    case 5: unpack_block<5>(wire, n, codes); break;
    case 6: unpack_block<6>(wire, n, codes); break;
    case 7: unpack_block<7>(wire, n, codes); break;
    default: return wire;
  }
  return codes;
}

struct Quantiser {
  const MinMaxParameters& codec;
  RandomPlace place;

  // Codes of the n values that begin at element `begin` of the call.
  void operator()(const float* x, u32 n, const MinMaxScale& scale, u64 begin, u8* codes) const {
    if (minmax_is_nan(scale)) {
      __builtin_memset(codes, 0, n);
    } else if (!codec.stochastic) {
      quantise_nearest(x, n, scale, codes);
    } else {
      for (u32 done = 0; done < n;) {  // a second turn only where the index passes a multiple of 2^32
        const u64 index = place.index + begin + done;
        const u32 size = (u32)smaller(n - done, (1ull << 32) - (u32)index);
        const RandomKey key = random_key(codec.seed, place.call, place.round, place.rank, (u32)(index >> 32));
        quantise_stochastic(x + done, size, scale, key, (u32)index, codes + done);
        done += size;
      }
    }
  }
};

// Writes what a decoder of these codes gets.
template <class T>
void write_values(const u8* codes, u32 n, const MinMaxScale& scale, Scratch& scratch, typename T::Storage* dst) {
  if constexpr (T::code == Float32::code) {
    if (!minmax_is_nan(scale)) return combine_codes<Combine::replace>(codes, n, scale, dst);
  }
  combine_codes<Combine::replace>(codes, n, scale, scratch.values);
  store_block<T>(scratch.values, n, dst);
}

template <class T>
void minmax_encode(const MinMaxParameters& codec, const EncodeCall& call) {
  const MinMaxWire wire(codec, call.count);
  const Quantiser quantise{codec, call.place};
  const u32 levels = (1u << codec.bits) - 1;
  Scratch scratch;
  for (u64 b = 0; b < wire.buckets; ++b) {
    const u64 first = b * wire.bucket, size = wire.size_of(b);
    const bool single = size <= kBlock;
    const float* x = nullptr;
    KeyRange keys;
    for (u64 at = 0; at < size; at += kBlock) {
      const u32 n = (u32)smaller(kBlock, size - at);
      x = as_float<T>(element<T>(call.src, first + at), n, scratch.values);
      extend_range(x, n, keys);
    }
    const MinMaxRange range = minmax_range(keys.lowest, keys.highest);
    const MinMaxScale scale = minmax_scale(range, levels);
    wire.set_range(call.wire, b, range);
    for (u64 at = 0; at < size; at += kBlock) {
      const u32 n = (u32)smaller(kBlock, size - at);
      if (!single) x = as_float<T>(element<T>(call.src, first + at), n, scratch.values);
      u8* to = call.wire + wire.code_offset(first + at);
      u8* codes = codec.bits == 8 ? to : scratch.codes;
      quantise(x, n, scale, first + at, codes);
      if (codec.bits != 8) pack(codec.bits, codes, n, to);
    }
  }
  wire.clear_padding(call.wire);
}

template <class T>
void minmax_decode(const MinMaxParameters& codec, const DecodeCall& call) {
  const MinMaxWire wire(codec, call.count);
  const u32 levels = (1u << codec.bits) - 1;
  Scratch scratch;
  for (u64 b = 0; b < wire.buckets; ++b) {
    const u64 first = b * wire.bucket, size = wire.size_of(b);
    const MinMaxScale scale = minmax_scale(wire.range(call.wire, b), levels);
    for (u64 at = 0; at < size; at += kBlock) {
      const u32 n = (u32)smaller(kBlock, size - at);
      const u8* codes = unpack(codec.bits, call.wire + wire.code_offset(first + at), n, scratch.codes);
      auto* dst = element<T>(call.dst, first + at);
      if (call.accumulate) {
        load_block<T>(dst, n, scratch.values);
        combine_codes<Combine::sum>(codes, n, scale, scratch.values);
        store_block<T>(scratch.values, n, dst);
      } else {
        write_values<T>(codes, n, scale, scratch, dst);
      }
    }
  }
}

// The scaled total of n elements from `begin`, all in bucket b, into scratch.values.
template <class T>
void minmax_total(const MinMaxWire& wire, const ReduceCall& call, u64 b, u64 begin, u32 n, Scratch& scratch) {
  const u32 levels = (1u << wire.bits) - 1;
  bool started = false;
  for (u32 i = 0; i <= call.source_count; ++i) {
    if (i == call.own_index && call.own) {
      const auto* own = element<T>(call.own, begin);
      if (!started) {
        load_block<T>(own, n, scratch.values);
      } else {
        const float* x = as_float<T>(own, n, scratch.more);
        switch (call.op) {
          case Combine::min: combine_values<Combine::min>(x, n, scratch.values); break;
          case Combine::max: combine_values<Combine::max>(x, n, scratch.values); break;
          default: combine_values<Combine::sum>(x, n, scratch.values);
        }
      }
      started = true;
    }
    if (i == call.source_count) break;
    const u8* source = call.sources[i];
    const MinMaxScale scale = minmax_scale(wire.range(source, b), levels);
    const u8* codes = unpack(wire.bits, source + wire.code_offset(begin), n, scratch.codes);
    switch (started ? call.op : Combine::replace) {
      case Combine::replace: combine_codes<Combine::replace>(codes, n, scale, scratch.values); break;
      case Combine::min: combine_codes<Combine::min>(codes, n, scale, scratch.values); break;
      case Combine::max: combine_codes<Combine::max>(codes, n, scale, scratch.values); break;
      default: combine_codes<Combine::sum>(codes, n, scale, scratch.values);
    }
    started = true;
  }
  if (call.scale != 1.0f) scale_values(call.scale, n, scratch.values);
}

// A bucket that fits a block is one pass over memory. A larger one is summed twice: for its range, then for its codes.
template <class T>
void minmax_reduce(const MinMaxParameters& codec, const ReduceCall& call) {
  const MinMaxWire wire(codec, call.count);
  const Quantiser quantise{codec, call.place};
  const u32 levels = (1u << codec.bits) - 1;
  Scratch scratch;
  for (u64 b = 0; b < wire.buckets; ++b) {
    const u64 first = b * wire.bucket, size = wire.size_of(b);
    const bool single = size <= kBlock;
    MinMaxScale scale{};
    if (call.wire) {
      KeyRange keys;
      for (u64 at = 0; at < size; at += kBlock) {
        const u32 n = (u32)smaller(kBlock, size - at);
        minmax_total<T>(wire, call, b, first + at, n, scratch);
        extend_range(scratch.values, n, keys);
      }
      const MinMaxRange range = minmax_range(keys.lowest, keys.highest);
      scale = minmax_scale(range, levels);
      wire.set_range(call.wire, b, range);
    }
    for (u64 at = 0; at < size; at += kBlock) {
      const u32 n = (u32)smaller(kBlock, size - at);
      const u64 begin = first + at;
      if (!(single && call.wire)) minmax_total<T>(wire, call, b, begin, n, scratch);
      if (call.wire) {
        quantise(scratch.values, n, scale, begin, scratch.codes);
        if (call.out) write_values<T>(scratch.codes, n, scale, scratch, element<T>(call.out, begin));
        pack(codec.bits, scratch.codes, n, call.wire + wire.code_offset(begin));
      } else {
        store_block<T>(scratch.values, n, element<T>(call.out, begin));
      }
    }
  }
  if (call.wire) wire.clear_padding(call.wire);
}

}  // namespace QCCL_NAMESPACE
