// One instruction set's build of all loops. This file is compiled once per instruction set, each time with a
// QCCL_NAMESPACE of its own, so that the linker cannot merge a function of one with that of another.
#include "minmax_loops.h"
#include "raw_loops.h"

namespace QCCL_NAMESPACE {
namespace {

// Calls the instantiation for the element type that the call names.
#define QCCL_FOR_DTYPE(function, dtype, ...)                               \
  ((dtype) == Float16::code    ? function<Float16>(__VA_ARGS__)            \
   : (dtype) == BFloat16::code ? function<BFloat16>(__VA_ARGS__)           \
                               : function<Float32>(__VA_ARGS__))

const MinMaxParameters& minmax(const void* parameters) { return *static_cast<const MinMaxParameters*>(parameters); }

constexpr qccl::CodecLoops kMinMax = {
    [](const void* p, const EncodeCall& call) { QCCL_FOR_DTYPE(minmax_encode, call.dtype, minmax(p), call); },
    [](const void* p, const DecodeCall& call) { QCCL_FOR_DTYPE(minmax_decode, call.dtype, minmax(p), call); },
    [](const void* p, const ReduceCall& call) { QCCL_FOR_DTYPE(minmax_reduce, call.dtype, minmax(p), call); },
};

constexpr qccl::CodecLoops kRaw = {
    [](const void*, const EncodeCall& call) { QCCL_FOR_DTYPE(raw_encode, call.dtype, call); },
    [](const void*, const DecodeCall& call) { QCCL_FOR_DTYPE(raw_decode, call.dtype, call); },
    [](const void*, const ReduceCall& call) { QCCL_FOR_DTYPE(raw_reduce, call.dtype, call); },
};

}  // namespace

const qccl::Isa& isa() {
  static constexpr qccl::Isa all = {QCCL_ISA_NAME, kMinMax, kRaw};
  return all;
}

}  // namespace QCCL_NAMESPACE
