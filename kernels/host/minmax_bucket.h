// One bucket of the min-max codec in per-bucket form, by the codec's own loops.
#pragma once

#include "bucket_loops.h"
#include "minmax_loops.h"

namespace QCCL_NAMESPACE {

template <class T>
struct OneBucket<MinMaxBuckets, T> {
  using Wire = BucketWire<MinMaxBuckets, T>;

  static void decode(const Wire& layout, const u8* wire, u64 b, const Stamp&, bool, float* y) {
    const u8 *codes = wire + Wire::codes_of(layout, b), *meta = wire + Wire::meta_of(layout, b);
    const u32 n = Wire::size_of(layout, b);
    switch (layout.options.options[0]) {
      case 1: return decode_bits<1>(codes, meta, n, y);
      case 2: return decode_bits<2>(codes, meta, n, y);
      case 3: return decode_bits<3>(codes, meta, n, y);
      case 4: return decode_bits<4>(codes, meta, n, y);
      case 5: return decode_bits<5>(codes, meta, n, y);
      case 6: return decode_bits<6>(codes, meta, n, y);
      case 7: return decode_bits<7>(codes, meta, n, y);
      default: return decode_bits<8>(codes, meta, n, y);
    }
  }

  static void encode(const Wire& layout, const float* x, u64 b, const Stamp& stamp, u8* wire, float*) {
    u8 *codes = wire + Wire::codes_of(layout, b), *meta = wire + Wire::meta_of(layout, b);
    const u32 n = Wire::size_of(layout, b);
    const BucketOptions& options = layout.options;
    switch (options.options[0]) {
      case 1: return encode_bits<1>(options, stamp, x, n, codes, meta);
      case 2: return encode_bits<2>(options, stamp, x, n, codes, meta);
      case 3: return encode_bits<3>(options, stamp, x, n, codes, meta);
      case 4: return encode_bits<4>(options, stamp, x, n, codes, meta);
      case 5: return encode_bits<5>(options, stamp, x, n, codes, meta);
      case 6: return encode_bits<6>(options, stamp, x, n, codes, meta);
      case 7: return encode_bits<7>(options, stamp, x, n, codes, meta);
      default: return encode_bits<8>(options, stamp, x, n, codes, meta);
    }
  }

  template <int Bits>
  static void decode_bits(const u8* codes, const u8* meta, u32 n, float* y) {
    Line<Bits> line;
    line.set(minmax_scale({load_float(meta), load_float(meta + 4)}, (1u << Bits) - 1));
    for_blocks(n, [&](u64 at, u32 size) {
      decode_block<Float32, Bits>(codes + minmax_code_offset(at, Bits), size, line, false, y + at);
    });
  }

  template <int Bits>
  static void encode_bits(const BucketOptions& options, const Stamp& stamp, const float* x, u32 n, u8* codes, u8* meta) {
    Extremes<Float32> extremes;
    for_blocks(n, [&](u64 at, u32 size) { extremes.extend(x + at, size); });
    const MinMaxRange range = extremes.range();
    const MinMaxScale scale = minmax_scale(range, (1u << Bits) - 1);
    store_float(meta, range.low);
    store_float(meta + 4, range.high);
    const MinMaxParameters codec = {Bits, options.bucket, options.options[1] != 0, options.seed};
    const RandomPlace place = {stamp.call, stamp.index, stamp.round, stamp.rank};
    Chances chances(codec, place);
    for_blocks(n, [&](u64 at, u32 size) {
      encode_values<Float32, Bits>(x + at, size, scale, codec.stochastic ? &chances : nullptr, at,
                                   codes + minmax_code_offset(at, Bits));
    });
  }
};

}  // namespace QCCL_NAMESPACE
