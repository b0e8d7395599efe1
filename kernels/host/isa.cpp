// The table of all codecs' loops, compiled once per instruction set. Each build has its own QCCL_NAMESPACE, so that the
// linker cannot merge functions of different instruction sets.
#define QCCL_HOST_LOOPS
#include "../codecs/all.h"
#include "bucket_loops.h"

namespace QCCL_NAMESPACE {

const qccl::FactorLoops& factor_loops();  // factor_loops.cpp

namespace {

// body(T{}) for the element type T with code `dtype`.
template <class Body>
void with_dtype(u32 dtype, const Body& body) {
  switch (dtype) {
    case Float16::code: return body(Float16{});
    case BFloat16::code: return body(BFloat16{});
    default: return body(Float32{});
  }
}

template <class Codec>
struct Entry {
  static void encode(const BucketOptions& options, const EncodeArgs& args) {
    with_dtype(args.dtype, [&](auto type) { CallLoops<Codec>::template encode<decltype(type)>(options, args); });
  }
  static void decode(const BucketOptions& options, const DecodeArgs& args) {
    with_dtype(args.dtype, [&](auto type) { CallLoops<Codec>::template decode<decltype(type)>(options, args); });
  }
  static void reduce(const BucketOptions& options, const ReduceArgs& args) {
    with_dtype(args.dtype, [&](auto type) { CallLoops<Codec>::template reduce<decltype(type)>(options, args); });
  }
  static void reduce_with_state(const BucketOptions& options, const ReduceArgs& args) {
    with_dtype(args.dtype, [&](auto type) { BucketLoops<Codec, decltype(type)>::reduce(options, args); });
  }
  static std::uint64_t wire_nbytes(const BucketOptions& options, std::uint64_t count, std::uint32_t dtype) {
    u64 nbytes = 0;
    with_dtype(dtype, [&](auto type) {
      using Format = WireFormat<Codec, decltype(type)>;
      if (count) nbytes = Format::nbytes(Format::make(options, count));
    });
    return nbytes;
  }
};

#define QCCL_ENTRY(Codec)                                                                                        \
  {#Codec, Codec::sparse, CallLoops<Codec>::whole_call,                                                          \
   {Entry<Codec>::encode, Entry<Codec>::decode, Entry<Codec>::reduce, Entry<Codec>::reduce_with_state},          \
   Entry<Codec>::wire_nbytes},
constexpr qccl::CodecEntry kCodecs[] = {QCCL_CODECS(QCCL_ENTRY)};

}  // namespace

const qccl::Isa& isa() {
  static const qccl::Isa all = {QCCL_ISA_NAME, &factor_loops(), kCodecs, sizeof kCodecs / sizeof kCodecs[0]};
  return all;
}

}  // namespace QCCL_NAMESPACE
