// The codec `none`: the wire is the values themselves.
#pragma once

#include "blocks.h"

namespace QCCL_NAMESPACE {

using qccl::DecodeCall;
using qccl::EncodeCall;
using qccl::ReduceCall;

template <class T>
void raw_encode(const EncodeCall& call) {
  __builtin_memcpy(call.wire, call.src, call.count * sizeof(typename T::Storage));
}

// One block of a wire, which has no alignment, as fp32.
template <class T>
void load_wire(const u8* wire, u64 begin, u32 n, float* to) {
  typename T::Storage values[kBlock];
  __builtin_memcpy(values, wire + begin * sizeof values[0], n * sizeof values[0]);
  load_block<T>(values, n, to);
}

template <class T>
void raw_decode(const DecodeCall& call) {
  if (!call.accumulate) {
    __builtin_memcpy(call.dst, call.wire, call.count * sizeof(typename T::Storage));
    return;
  }
  alignas(64) float acc[kBlock], more[kBlock];
  for (u64 begin = 0; begin < call.count; begin += kBlock) {
    const u32 n = (u32)smaller(kBlock, call.count - begin);
    auto* dst = element<T>(call.dst, begin);
    load_block<T>(dst, n, acc);
    load_wire<T>(call.wire, begin, n, more);
    combine_values<Combine::sum>(more, n, acc);
    store_block<T>(acc, n, dst);
  }
}

template <class T>
void raw_reduce(const ReduceCall& call) {
  using Storage = typename T::Storage;
  alignas(64) float acc[kBlock], more[kBlock];
  alignas(64) Storage rounded[kBlock];
  for (u64 begin = 0; begin < call.count; begin += kBlock) {
    const u32 n = (u32)smaller(kBlock, call.count - begin);
    bool started = false;
    const auto take = [&] {
      switch (started ? call.op : Combine::replace) {
        case Combine::replace: combine_values<Combine::replace>(more, n, acc); break;
        case Combine::min: combine_values<Combine::min>(more, n, acc); break;
        case Combine::max: combine_values<Combine::max>(more, n, acc); break;
        default: combine_values<Combine::sum>(more, n, acc);
      }
      started = true;
    };
    for (u32 i = 0; i <= call.source_count; ++i) {
      if (i == call.own_index && call.own) {
        load_block<T>(element<T>(call.own, begin), n, more);
        take();
      }
      if (i == call.source_count) break;
      load_wire<T>(call.sources[i], begin, n, more);
      take();
    }
    if (call.scale != 1.0f) scale_values(call.scale, n, acc);
    store_block<T>(acc, n, rounded);
    if (call.wire) __builtin_memcpy(call.wire + begin * sizeof(Storage), rounded, n * sizeof(Storage));
    if (call.out) __builtin_memcpy(element<T>(call.out, begin), rounded, n * sizeof(Storage));
  }
}

}  // namespace QCCL_NAMESPACE
