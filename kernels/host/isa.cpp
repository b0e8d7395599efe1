// One instruction set's build of all loops. This file is compiled once per instruction set, each time with a
// QCCL_NAMESPACE of its own, so that the linker cannot merge a function of one with that of another.
#include "bucket_loops.h"
#include "minmax_bucket.h"
#include "minmax_loops.h"
#include "raw_loops.h"

namespace QCCL_NAMESPACE {
namespace {

// Calls the instantiation for the element type that the call names.
#define QCCL_FOR_DTYPE(function, dtype, ...)                               \
  ((dtype) == Float16::code    ? function<Float16>(__VA_ARGS__)            \
   : (dtype) == BFloat16::code ? function<BFloat16>(__VA_ARGS__)           \
                               : function<Float32>(__VA_ARGS__))

// The loops for the bits that the parameters name: Loops::run<T, Bits>.
template <class Loops, class T, class Call>
void for_bits(const MinMaxParameters& codec, const Call& call) {
  switch (codec.bits) {
    case 1: return Loops::template run<T, 1>(codec, call);
    case 2: return Loops::template run<T, 2>(codec, call);
    case 3: return Loops::template run<T, 3>(codec, call);
    case 4: return Loops::template run<T, 4>(codec, call);
    case 5: return Loops::template run<T, 5>(codec, call);
    case 6: return Loops::template run<T, 6>(codec, call);
    case 7: return Loops::template run<T, 7>(codec, call);
    default: return Loops::template run<T, 8>(codec, call);
  }
}

// And for the element type that the call names.
template <class Loops, class Call>
void run_minmax(const void* parameters, const Call& call) {
  const auto& codec = *static_cast<const MinMaxParameters*>(parameters);
  switch (call.dtype) {
    case Float16::code: return for_bits<Loops, Float16>(codec, call);
    case BFloat16::code: return for_bits<Loops, BFloat16>(codec, call);
    default: return for_bits<Loops, Float32>(codec, call);
  }
}

struct MinMaxEncode {
  template <class T, int Bits>
  static void run(const MinMaxParameters& codec, const EncodeCall& call) { minmax_encode<T, Bits>(codec, call); }
};
struct MinMaxDecode {
  template <class T, int Bits>
  static void run(const MinMaxParameters& codec, const DecodeCall& call) { minmax_decode<T, Bits>(codec, call); }
};
struct MinMaxReduce {
  template <class T, int Bits>
  static void run(const MinMaxParameters& codec, const ReduceCall& call) { minmax_reduce<T, Bits>(codec, call); }
};

constexpr qccl::CodecLoops kMinMax = {run_minmax<MinMaxEncode, EncodeCall>, run_minmax<MinMaxDecode, DecodeCall>,
                                      run_minmax<MinMaxReduce, ReduceCall>};

constexpr qccl::CodecLoops kRaw = {
    [](const void*, const EncodeCall& call) { QCCL_FOR_DTYPE(raw_encode, call.dtype, call); },
    [](const void*, const DecodeCall& call) { QCCL_FOR_DTYPE(raw_decode, call.dtype, call); },
    [](const void*, const ReduceCall& call) { QCCL_FOR_DTYPE(raw_reduce, call.dtype, call); },
};

#define QCCL_BUCKET_CODEC(Codec) {#Codec, Codec::sparse, bucket_loops<Codec>()},
constexpr qccl::BucketCodecLoops kBuckets[] = {QCCL_BUCKET_CODECS(QCCL_BUCKET_CODEC)};
constexpr std::uint32_t kBucketCodecs = sizeof kBuckets / sizeof kBuckets[0];

}  // namespace

const qccl::Isa& isa() {
  static constexpr qccl::Isa all = {QCCL_ISA_NAME,
                                      kMinMax,
                                      kRaw,
                                      bucket_reduce<MinMaxBuckets>,
                                      bucket_reduce<RawBuckets>,
                                      kBuckets,
                                      kBucketCodecs};
  return all;
}

}  // namespace QCCL_NAMESPACE
