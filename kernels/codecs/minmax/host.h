// The min-max codec's loops on the host: over one bucket, and over whole calls.
#pragma once

#include "../../host/bucket_loops.h"
#include "../../host/extremes.h"
#include "host_blocks.h"

namespace QCCL_NAMESPACE {

using MinMaxFormat = WireFormat<MinMax, Float32>;

QCCL_FN bool is_stochastic(const BucketOptions& options) { return options.options[1] != 0; }

template <int Bits>
QCCL_FN MinMaxScale load_scale(const u8* meta) {
  return minmax_scale({load_float(meta), load_float(meta + 4)}, (1u << Bits) - 1);
}

QCCL_FN void store_range(u8* meta, Range range) {
  store_float(meta, range.low);
  store_float(meta + 4, range.high);
}

template <class T>
struct OneBucket<MinMax, T> {
  using Format = WireFormat<MinMax, T>;

  static void decode(const Format& format, const u8* wire, u64 b, const RngCounter&, bool, float* y) {
    const u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    with_bits(format.options.options[0], [&](auto bits) {
      Dequantizer<bits.value> dequantizer;
      dequantizer.set(load_scale<bits.value>(meta));
      for_blocks(Format::size_of(format, b), [&](u64 at, u32 n) {
        decode_block<Float32, bits.value>(codes + code_offset(at, bits.value), n, dequantizer, false, y + at);
      });
    });
  }

  static void encode(const Format& format, const float* x, u64 b, const RngCounter& counter, u8* wire, float*) {
    u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    const u64 size = Format::size_of(format, b);
    Extremes<Float32> extremes;
    for_blocks(size, [&](u64 at, u32 n) { extremes.extend(x + at, n); });
    store_range(meta, extremes.range());
    RandomBlock random(format.options.seed, counter);
    with_bits(format.options.options[0], [&](auto bits) {
      const MinMaxScale scale = minmax_scale(extremes.range(), (1u << bits.value) - 1);
      for_blocks(size, [&](u64 at, u32 n) {
        encode_values<Float32, bits.value>(x + at, n, scale, is_stochastic(format.options) ? &random : nullptr, at,
                                           codes + code_offset(at, bits.value));
      });
    });
  }
};

template <class T, int Bits>
void minmax_encode(const BucketOptions& options, const EncodeArgs& args) {
  const MinMaxFormat format = MinMaxFormat::make(options, args.count);
  const bool stochastic = is_stochastic(options);
  RandomBlock random(options.seed, args.counter);
  const auto range_of = [&](u64 b) {
    Extremes<T> extremes;
    const auto* x = element<T>(args.src, MinMaxFormat::first_of(format, b));
    for_blocks(MinMaxFormat::size_of(format, b), [&](u64 at, u32 n) { extremes.extend(x + at, n); });
    return extremes.range();
  };
  // Stochastic encoding is slow, and its first code waits for the range. If a bucket fits L1, find the next bucket's range
  // before encoding this one, so that the two overlap.
  const bool early = stochastic && format.bucket <= kBlock;
  const u64 end = args.buckets.last;
  Range next = {};
  for (u64 b = args.buckets.first; b < end; ++b) {
    const u64 first = MinMaxFormat::first_of(format, b);
    const Range range = early && b > args.buckets.first ? next : range_of(b);
    const MinMaxScale scale = minmax_scale(range, (1u << Bits) - 1);
    if (early && b + 1 < end) next = range_of(b + 1);
    store_range(args.wire + MinMaxFormat::meta_of(format, b), range);
    for_blocks(MinMaxFormat::size_of(format, b), [&](u64 at, u32 n) {
      const u64 begin = first + at;
      encode_values<T, Bits>(element<T>(args.src, begin), n, scale, stochastic ? &random : nullptr, begin,
                             args.wire + code_offset(begin, Bits));
    });
  }
  clear_padding(format, args.wire, args.buckets);
}

template <class T, int Bits>
void minmax_decode(const BucketOptions& options, const DecodeArgs& args) {
  const MinMaxFormat format = MinMaxFormat::make(options, args.count);
  Dequantizer<Bits> dequantizer;
  for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
    const u64 first = MinMaxFormat::first_of(format, b);
    dequantizer.set(load_scale<Bits>(args.wire + MinMaxFormat::meta_of(format, b)));
    for_blocks(MinMaxFormat::size_of(format, b), [&](u64 at, u32 n) {
      const u8* codes = args.wire + code_offset(first + at, Bits);
      decode_block<T, Bits>(codes, n, dequantizer, args.accumulate, element<T>(args.dst, first + at));
    });
  }
}

// The scaled total of n elements from `begin`, all in bucket b.
template <class T, int Bits>
void minmax_total(const MinMaxFormat& format, const ReduceArgs& args, u64 b, u64 begin, u32 n, float* total) {
  ManySources<Bits> sources;
  const auto* own = element<T>(args.own, begin);
  u32 done = 0;
  do {  // once, unless there are more than kMostSources
    const u32 count = (u32)smaller(kMostSources, args.source_count - done);
    for (u32 i = 0; i < count; ++i) {
      const u8* source = args.sources[done + i];
      sources.codes[i] = source + code_offset(begin, Bits);
      sources.dequantizers[i].set(load_scale<Bits>(source + MinMaxFormat::meta_of(format, b)));
    }
    const bool last = done + count == args.source_count;
    const bool has_own = args.own && args.own_index >= done && args.own_index < done + count + last;
    const Terms terms{count, has_own ? args.own_index - done : kNoOwn, done > 0};
    const float scale = last ? args.scale : 1.0f;
    total_block<T, Bits>(args.op, sources, own, terms, scale, n, total);
    done += count;
  } while (done < args.source_count);
}

// A reduction without a wire: only the values are stored.
template <class T, int Bits>
void minmax_reduce_to_values(const MinMaxFormat& format, const ReduceArgs& args, float* total) {
  for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
    const u64 first = MinMaxFormat::first_of(format, b);
    for_blocks(MinMaxFormat::size_of(format, b), [&](u64 at, u32 n) {
      minmax_total<T, Bits>(format, args, b, first + at, n, total);
      auto* out = element<T>(args.out, first + at);
      for_lanes(n, [&](u32 i, u32 lanes) QCCL_INLINE {
        store_values<T>(quiet_nans(load_lanes<float>(total + i)), out + i, lanes);
      });
    });
  }
}

// A bucket that fits a block takes one pass over memory. A larger bucket is summed twice: for its range, then for its codes.
template <class T, int Bits>
void minmax_reduce(const BucketOptions& options, const ReduceArgs& args) {
  const MinMaxFormat format = MinMaxFormat::make(options, args.count);
  alignas(64) float total[kBlock];
  if (!args.wire) return minmax_reduce_to_values<T, Bits>(format, args, total);
  RandomBlock random(options.seed, args.counter);
  Dequantizer<Bits> dequantizer;
  for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
    const u64 first = MinMaxFormat::first_of(format, b), size = MinMaxFormat::size_of(format, b);
    Extremes<Float32> extremes;
    for_blocks(size, [&](u64 at, u32 n) {
      minmax_total<T, Bits>(format, args, b, first + at, n, total);
      extremes.extend(total, n);
    });
    const Range range = extremes.range();
    const MinMaxScale scale = minmax_scale(range, (1u << Bits) - 1);
    store_range(args.wire + MinMaxFormat::meta_of(format, b), range);
    dequantizer.set(scale);
    for_blocks(size, [&](u64 at, u32 n) {
      const u64 begin = first + at;
      u8* to = args.wire + code_offset(begin, Bits);
      auto* out = args.out ? element<T>(args.out, begin) : nullptr;
      if (minmax_is_nan(scale)) {
        __builtin_memset(to, 0, packed_nbytes(n, Bits));
        if (out) decode_block<T, Bits>(to, n, dequantizer, false, out);
        return;
      }
      if (size > kBlock) minmax_total<T, Bits>(format, args, b, begin, n, total);
      if (is_stochastic(options)) {
        finish_block<T, Bits>(total, n, Stochastic(scale, random.of(begin, n)), dequantizer, to, out);
      } else {
        finish_block<T, Bits>(total, n, Nearest<false>(scale), dequantizer, to, out);
      }
    });
  }
  clear_padding(format, args.wire, args.buckets);
}

template <>
struct CallLoops<MinMax> {
  static constexpr bool whole_call = true;

  template <class T>
  static void encode(const BucketOptions& options, const EncodeArgs& args) {
    with_bits(options.options[0], [&](auto bits) { minmax_encode<T, bits.value>(options, args); });
  }
  template <class T>
  static void decode(const BucketOptions& options, const DecodeArgs& args) {
    with_bits(options.options[0], [&](auto bits) { minmax_decode<T, bits.value>(options, args); });
  }
  template <class T>
  static void reduce(const BucketOptions& options, const ReduceArgs& args) {
    with_bits(options.options[0], [&](auto bits) { minmax_reduce<T, bits.value>(options, args); });
  }
};

}  // namespace QCCL_NAMESPACE
