// Every codec's decoder, in each instruction set's build, on bytes that no encoder wrote. They may not touch memory beside
// their buffers, and all builds make the same bytes.
//
// An input is a row of the table, an element type, flags, the other build, the count, a random counter, and the wire.
// Further wires of a reduction, and values, are the same bytes from other places on.
#include "target.h"

#include <vector>

#include "../../kernels/host/choose_isa.h"
#include "../../kernels/host/float_environment.h"

namespace fuzz {

namespace {

struct Row {
  const char* name;
  qccl::BucketOptions options;
};
const Row kRows[] = {
#include "codec_rows.inc"  // tests/fuzz/seeds.py writes it from qccl.codecs
};
constexpr unsigned kAccumulates = 1, kReduces = 2, kHasOwn = 4, kEncodes = 8, kHasOut = 16, kHasState = 32, kNarrow = 64;

struct Call {
  const Row* row;
  std::uint32_t dtype;
  unsigned flags, sources, op;
  std::uint64_t count;
  qccl::RngCounter counter;
  std::uint64_t bucket, buckets;
  const unsigned char* given;
  std::size_t given_nbytes;

  bool is(unsigned flag) const { return flags & flag; }
  // The input's bytes from `start` on, again and again.
  void fill(Bytes& to, std::size_t start) const {
    if (!given_nbytes) return to.fill(0);
    for (std::size_t i = 0, from = start % given_nbytes; i < to.size(); from = 0) {
      const std::size_t some = std::min(to.size() - i, given_nbytes - from);
      std::memcpy(to.data() + i, given + from, some);
      i += some;
    }
  }
};

const qccl::CodecEntry& entry(const qccl::Isa& isa, const char* name) {
  for (std::uint32_t i = 0; i < isa.codec_count; ++i)
    if (!std::strcmp(isa.codecs[i].name, name)) return isa.codecs[i];
  require(false, "the table has a codec that the library does not have");
  std::abort();
}

std::size_t itemsize(std::uint32_t dtype) { return dtype ? 2 : 4; }

using Results = std::vector<Bytes>;

Results decode(const Call& call, const qccl::CodecEntry& codec, float* scratch) {
  Bytes wire(codec.wire_nbytes(call.row->options, call.count, call.dtype));
  Results results;
  results.emplace_back(call.count * itemsize(call.dtype));
  call.fill(wire, 0);
  if (call.is(kAccumulates)) call.fill(results[0], wire.size());
  codec.loops.decode(call.row->options, {wire.data(), results[0].data(), call.count, call.dtype, call.is(kAccumulates),
                                         call.counter, scratch, {0, call.buckets}});
  return results;
}

Results reduce(const Call& call, const qccl::CodecEntry& codec, float* scratch) {
  const std::size_t wire_nbytes = codec.wire_nbytes(call.row->options, call.count, call.dtype);
  const std::size_t nbytes = call.count * itemsize(call.dtype);
  std::vector<Bytes> wires;
  std::vector<const unsigned char*> sources;
  std::vector<std::uint32_t> ranks;
  for (unsigned i = 0; i < call.sources; ++i) {
    wires.emplace_back(wire_nbytes);
    call.fill(wires.back(), i * wire_nbytes);
    sources.push_back(wires.back().data());
    ranks.push_back(i);
  }
  Bytes own(nbytes), residual(call.count * (call.is(kNarrow) ? 2 : 4)), momentum(call.count * 4);
  call.fill(own, 3);
  call.fill(residual, 5);
  call.fill(momentum, 7);
  Results results;
  results.emplace_back(nbytes);
  results.emplace_back(wire_nbytes);
  results.emplace_back(residual.size());
  results.emplace_back(momentum.size());
  const qccl::StateArgs state = {residual.data(), results[2].data(), reinterpret_cast<const float*>(momentum.data()),
                                 reinterpret_cast<float*>(results[3].data()), 0.9f, 0.95f, 1.0f, call.is(kNarrow) ? 2u : 0u};
  const bool encodes = call.is(kEncodes) || call.is(kHasState);
  const qccl::ReduceArgs args = {
      sources.data(), ranks.data(), call.sources, 0, call.is(kHasOwn) ? call.sources / 2 : 0,
      call.is(kHasOwn) ? own.data() : nullptr, encodes ? results[1].data() : nullptr,
      call.is(kHasOut) || !encodes ? results[0].data() : nullptr, call.count, call.dtype,
      static_cast<qccl::Combine>(codec.sparse || call.is(kHasState) ? 0 : call.op), 0.5f, call.counter, scratch,
      call.is(kHasState) ? &state : nullptr, {0, call.buckets}};
  (call.is(kHasState) ? codec.loops.reduce_with_state : codec.loops.reduce)(call.row->options, args);
  return results;
}

Results run(const Call& call, const qccl::Isa& isa) {
  const qccl::CodecEntry& codec = entry(isa, call.row->name);
  const bool needs_scratch = !codec.whole_call || (call.is(kReduces) && call.is(kHasState));
  Bytes scratch(needs_scratch ? sizeof(float) * qccl::bucket_scratch(std::min(call.bucket, call.count)) : 0);
  auto* const floats = needs_scratch ? reinterpret_cast<float*>(scratch.data()) : nullptr;
  const qccl::FloatEnvironment defaults;
  return call.is(kReduces) ? reduce(call, codec, floats) : decode(call, codec, floats);
}

// Most calls are short, which is fast; a few have several of the largest buckets.
std::uint64_t count_of(unsigned given) {
  const unsigned size = given >> 12;
  return given % (size == 0 ? 4096 : size < 4 ? 1024 : 128) + 1;
}

}  // namespace

void fuzz(Input input) {
  static const std::vector<const qccl::Isa*> isas = qccl::usable_isas();
  Call call{};
  call.row = &kRows[input.take<std::uint16_t>() % (sizeof kRows / sizeof kRows[0])];
  call.dtype = input.byte() % 3;
  call.flags = input.byte();
  const unsigned more = input.byte();
  call.sources = more % 4 + 1;
  call.op = more / 4 % 3;
  call.count = count_of(input.take<std::uint16_t>());
  call.counter.call = input.byte();
  call.counter.index = input.take<std::uint32_t>() * std::uint64_t{8};
  call.counter.rank = input.byte();
  call.bucket = call.row->options.bucket ? call.row->options.bucket : call.count;
  call.buckets = (call.count - 1) / call.bucket + 1;
  std::vector<unsigned char> given(input.left());
  input.take(given.data(), given.size());
  call.given = given.data();
  call.given_nbytes = given.size();
  const Results expected = run(call, *isas.back());
  if (isas.size() > 1)
    require(run(call, *isas[more / 12 % (isas.size() - 1)]) == expected, "two instruction sets' builds make different bytes");
}

}  // namespace fuzz
