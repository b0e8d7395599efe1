// The loops of the codec none over whole calls: the wire is the values themselves.
#pragma once

#include "../../host/bucket_loops.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// The elements of a call that a thread works on.
struct ElementRange {
  u64 begin, count;

  template <class Args>
  ElementRange(const BucketOptions& options, const Args& args)
      : begin(args.buckets.first * options.bucket),
        count(smaller(args.buckets.last * options.bucket, args.count) - begin) {}
};

template <class T>
void raw_encode(const BucketOptions& options, const EncodeArgs& args) {
  const ElementRange range(options, args);
  constexpr u64 size = sizeof(typename T::Storage);
  __builtin_memcpy(args.wire + range.begin * size, element<T>(args.src, range.begin), range.count * size);
}

// A wire has no alignment.
template <class T>
QCCL_FN f32xN load_wire(const u8* wire, u64 at, u32 lanes) {
  typename T::Storage values[kLanes] = {};
  __builtin_memcpy(values, wire + at * sizeof values[0], lanes * sizeof values[0]);
  return Elements<T>::load(values);
}

template <class T>
QCCL_FN void store_wire(const f32xN& x, u8* wire, u64 at, u32 lanes) {
  typename T::Storage values[kLanes];
  Elements<T>::store(x, values);
  __builtin_memcpy(wire + at * sizeof values[0], values, lanes * sizeof values[0]);
}

template <class T>
void raw_decode(const BucketOptions& options, const DecodeArgs& args) {
  const ElementRange range(options, args);
  constexpr u64 size = sizeof(typename T::Storage);
  auto* dst = element<T>(args.dst, range.begin);
  const u8* wire = args.wire + range.begin * size;
  if (!args.accumulate) {
    __builtin_memcpy(dst, wire, range.count * size);
    return;
  }
  for_lanes(range.count, [&](u64 i, u32 lanes) QCCL_INLINE {
    const f32xN sum = load_values<T>(dst + i, lanes) + load_wire<T>(wire, i, lanes);
    store_values<T>(quiet_nans(sum), dst + i, lanes);
  });
}

template <class T, Combine op>
void raw_reduce(const BucketOptions& options, const ReduceArgs& args) {
  const auto* own = element<T>(args.own, 0);
  auto* out = element<T>(args.out, 0);
  const Terms terms{args.source_count, args.own ? args.own_index : kNoOwn, false};
  const ElementRange range(options, args);
  for_lanes(range.count, [&](u64 at, u32 lanes) QCCL_INLINE {
    const u64 i = range.begin + at;
    const auto own_values = [&]() QCCL_INLINE { return load_values<T>(own + i, lanes); };
    const auto source = [&](u32 s) QCCL_INLINE { return load_wire<T>(args.sources[s], i, lanes); };
    f32xN sum = combine_terms<op>(terms, source, own_values, own_values);
    if (args.scale != 1.0f) sum = sum * args.scale;
    sum = quiet_nans(sum);
    if (args.wire) store_wire<T>(sum, args.wire, i, lanes);
    if (args.out) store_values<T>(sum, out + i, lanes);
  });
}

template <>
struct CallLoops<NoCodec> {
  static constexpr bool whole_call = true;

  template <class T>
  static void encode(const BucketOptions& options, const EncodeArgs& args) {
    raw_encode<T>(options, args);
  }
  template <class T>
  static void decode(const BucketOptions& options, const DecodeArgs& args) {
    raw_decode<T>(options, args);
  }
  template <class T>
  static void reduce(const BucketOptions& options, const ReduceArgs& args) {
    switch (args.op) {
      case Combine::min: return raw_reduce<T, Combine::min>(options, args);
      case Combine::max: return raw_reduce<T, Combine::max>(options, args);
      default: return raw_reduce<T, Combine::sum>(options, args);
    }
  }
};

}  // namespace QCCL_NAMESPACE
