#include "operations.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "choose_isa.h"
#include "float_environment.h"
#include "threads.h"

namespace qccl {

namespace {

constexpr std::uint32_t kDtypes = 3;
constexpr std::uint64_t kItemsize[kDtypes] = {4, 2, 2};

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void check_dtype(std::uint32_t dtype) {
  require(dtype < kDtypes,
          "dtype_code is " + std::to_string(dtype) + "; allowed: 0 (float32), 1 (float16), 2 (bfloat16)");
}

void check_buffer(const Memory& memory, const BufferRef& ref, const char* what) {
  require(ref.first < memory.addresses.size(), std::string(what) + " names buffer " + std::to_string(ref.first) +
                                                     ", but the memory has " +
                                                     std::to_string(memory.addresses.size()));
}

unsigned char* resolve(const Memory& memory, const BufferRef& ref) {
  const std::uintptr_t base = memory.addresses[ref.first];
  if (!base) throw std::runtime_error("buffer " + std::to_string(ref.first) + " has no address; store one first");
  return reinterpret_cast<unsigned char*>(base + ref.second);
}

unsigned char* resolve(const Memory& memory, const std::optional<BufferRef>& ref) {
  return ref ? resolve(memory, *ref) : nullptr;
}

// Memory from one address to another, not empty.
struct Extent {
  std::uintptr_t start, stop;
  bool is_written;
  int side;  // the run that owns it, 0 or 1
};

void add_extents(const Memory& memory, int side, std::vector<Extent>& extents) {
  for (const Memory::Caller& caller : memory.callers) {
    const std::uintptr_t start = memory.addresses[caller.buffer];
    if (caller.nbytes) extents.push_back({start, start + caller.nbytes, caller.is_written, side});
  }
}

// This thread's scratch, which grows to the largest call's.
float* scratch(std::uint64_t wanted) {
  thread_local std::vector<float> memory;
  if (memory.size() < wanted) memory.resize(wanted);
  return memory.data();
}

// run(args of some buckets) in each of the threads that share the buckets, with that thread's scratch.
template <class Args, class Run>
void share_buckets(const Args& args, std::uint64_t bucket, const Memory& memory, std::uint64_t floats, const Run& run) {
  share(args.count, bucket, memory.threads, [&](const BucketRange& buckets) {
    Args part = args;
    part.buckets = buckets;
    part.scratch = scratch(floats);
    const FloatEnvironment defaults;
    run(part);
  });
}

// Whether all values are finite: a value is not if all bits of its exponent are set.
template <class Bits>
bool all_finite(const unsigned char* values, std::uint64_t count, Bits exponent) {
  constexpr std::uint64_t block = 4096;
  for (std::uint64_t at = 0; at < count; at += block) {
    const std::uint64_t n = std::min(block, count - at);
    unsigned found = 0;
    for (std::uint64_t i = 0; i < n; ++i) {
      Bits bits;
      std::memcpy(&bits, values + (at + i) * sizeof bits, sizeof bits);
      found |= (bits & exponent) == exponent;
    }
    if (found) return false;
  }
  return true;
}

}  // namespace

// In ascending order of their starts, each extent is compared with the furthest ends before it. Coalesced calls
// have thousands of buffers, too many to compare all pairs.
bool Memory::conflicts(const Memory& other) const {
  thread_local std::vector<Extent> extents;
  extents.clear();
  add_extents(*this, 0, extents);
  add_extents(other, 1, extents);
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.start < b.start; });
  std::uintptr_t ends[2] = {0, 0}, written_ends[2] = {0, 0};
  for (const Extent& extent : extents) {
    const int side = extent.side;
    if (extent.start < (extent.is_written ? ends : written_ends)[1 - side]) return true;
    ends[side] = std::max(ends[side], extent.stop);
    if (extent.is_written) written_ends[side] = std::max(written_ends[side], extent.stop);
  }
  return false;
}

const Isa& loops() {
  static const Isa& chosen = choose_isa();
  return chosen;
}

CompiledCodec::CompiledCodec(const std::string& name, std::uint64_t bucket, std::uint64_t seed,
                             const std::vector<std::uint32_t>& options)
    : options_{bucket, seed, {}} {
  const Isa& isa = loops();
  std::string names;
  for (std::uint32_t i = 0; i < isa.codec_count; ++i) {
    if (name == isa.codecs[i].name) entry_ = &isa.codecs[i];
    names += (i ? ", " : "") + std::string(isa.codecs[i].name);
  }
  require(entry_ != nullptr, "there is no codec " + name + "; allowed: " + names);
  require(bucket % 8 == 0 && bucket <= 1u << 24,
          "bucket is " + std::to_string(bucket) + "; allowed: multiples of 8 to 2^24, or 0 for one bucket per call");
  constexpr std::size_t most = sizeof options_.options / sizeof options_.options[0];
  require(options.size() <= most, std::to_string(options.size()) + " options; allowed: up to " + std::to_string(most));
  std::copy(options.begin(), options.end(), options_.options);
}

std::uint64_t CompiledCodec::wire_nbytes(std::uint64_t count, std::uint32_t dtype) const {
  check_dtype(dtype);
  return entry_->wire_nbytes(options_, count, dtype);
}

Encode::Encode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, BufferRef src, BufferRef wire,
               std::uint64_t count, std::uint64_t index, std::uint32_t round, std::uint32_t rank)
    : memory_(std::move(memory)),
      codec_(std::move(codec)),
      src_(src),
      wire_(wire),
      args_{nullptr, nullptr, count, dtype, {0, index, round, rank}, nullptr, {}} {
  check_dtype(dtype);
  check_buffer(*memory_, src, "src");
  check_buffer(*memory_, wire, "wire");
}

void Encode::run() {
  if (!args_.count) return;
  EncodeArgs args = args_;
  args.src = resolve(*memory_, src_);
  args.wire = resolve(*memory_, wire_);
  args.counter.call = memory_->call;
  share_buckets(args, codec_->bucket(args.count), *memory_, codec_->scratch(args.count, false),
                [this](const EncodeArgs& part) { codec_->encode(part); });
}

Decode::Decode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, BufferRef wire, BufferRef dst,
               std::uint64_t count, bool accumulate, std::uint64_t index, std::uint32_t round, std::uint32_t rank)
    : memory_(std::move(memory)),
      codec_(std::move(codec)),
      wire_(wire),
      dst_(dst),
      args_{nullptr, nullptr, count, dtype, accumulate, {0, index, round, rank}, nullptr, {}} {
  check_dtype(dtype);
  check_buffer(*memory_, wire, "wire");
  check_buffer(*memory_, dst, "dst");
}

void Decode::run() {
  if (!args_.count) return;
  DecodeArgs args = args_;
  args.wire = resolve(*memory_, wire_);
  args.dst = resolve(*memory_, dst_);
  args.counter.call = memory_->call;
  share_buckets(args, codec_->bucket(args.count), *memory_, codec_->scratch(args.count, false),
                [this](const DecodeArgs& part) { codec_->decode(part); });
}

Reduce::Reduce(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, std::vector<BufferRef> sources,
               std::optional<BufferRef> own, std::uint32_t own_index, std::optional<BufferRef> wire,
               std::optional<BufferRef> out, std::uint64_t count, std::uint32_t op, float scale, std::uint64_t index,
               std::uint32_t round, std::uint32_t rank, std::vector<std::uint32_t> source_ranks,
               std::uint32_t source_round, StateBuffer residual, StateBuffer momentum, float mu, float beta,
               std::uint32_t residual_dtype)
    : memory_(std::move(memory)),
      codec_(std::move(codec)),
      sources_(std::move(sources)),
      addresses_(sources_.size()),
      source_ranks_(std::move(source_ranks)),
      own_(own),
      wire_(wire),
      out_(out),
      residual_(residual),
      momentum_(momentum),
      mu_(mu),
      beta_(beta),
      residual_dtype_(residual_dtype),
      args_{nullptr, nullptr, static_cast<std::uint32_t>(sources_.size()), source_round, own_index, nullptr, nullptr,
            nullptr, count, dtype, static_cast<Combine>(op), scale, {0, index, round, rank}, nullptr, nullptr, {}} {
  check_dtype(dtype);
  for (const StateBuffer& state : {residual_, momentum_}) {
    if (!state) continue;
    check_buffer(*memory_, state->first, "state");
    check_buffer(*memory_, state->second, "state");
    require(op == 0, "op is " + std::to_string(op) + "; a reduction with state allows 0 (sum) only");
  }
  require(residual_dtype == 0 || residual_dtype == 2,
          "residual_dtype is " + std::to_string(residual_dtype) + "; allowed: 0 (float32), 2 (bfloat16)");
  require(!residual_ || wire, "there is a residual, but no wire that could leave something out");
  require(!momentum_ || own, "there is a momentum, but no own values");
  for (const BufferRef& source : sources_) check_buffer(*memory_, source, "srcs");
  if (own) check_buffer(*memory_, *own, "own");
  if (wire) check_buffer(*memory_, *wire, "wire");
  if (out) check_buffer(*memory_, *out, "out");
  require(!sources_.empty() || own, "there is nothing to reduce: srcs is empty and own is None");
  require(wire || out, "there is nowhere to put the result: wire and out are both None");
  require(!own || own_index <= sources_.size(), "own_index is " + std::to_string(own_index) + "; allowed: 0 to " +
                                                    std::to_string(sources_.size()) + ", the number of srcs");
  require(op <= 2, "op is " + std::to_string(op) + "; allowed: 0 (sum), 1 (min), 2 (max)");
  require(op == 0 || !codec_->sparse(), "op is " + std::to_string(op) + "; a sparse codec allows 0 (sum) only");
  require(source_ranks_.empty() || source_ranks_.size() == sources_.size(),
          std::to_string(source_ranks_.size()) + " source_ranks for " + std::to_string(sources_.size()) + " srcs");
}

void Reduce::run() {
  if (!args_.count) return;
  ReduceArgs args = args_;
  for (std::size_t i = 0; i < sources_.size(); ++i) addresses_[i] = resolve(*memory_, sources_[i]);
  args.sources = addresses_.data();
  args.source_ranks = source_ranks_.empty() ? nullptr : source_ranks_.data();
  args.own = resolve(*memory_, own_);
  args.wire = resolve(*memory_, wire_);
  args.out = resolve(*memory_, out_);
  args.counter.call = memory_->call;
  const StateArgs state = resolve_state();
  if (residual_ || momentum_) args.state = &state;
  if (sources_.empty() && !wire_ && args.scale == 1.0f && !args.state) {  // one rank: its values stay, bit for bit
    std::memmove(args.out, args.own, args.count * kItemsize[args.dtype]);
    return;
  }
  share_buckets(args, codec_->bucket(args.count), *memory_, codec_->scratch(args.count, args.state != nullptr),
                [this](const ReduceArgs& part) { codec_->reduce(part); });
}

StateArgs Reduce::resolve_state() const {
  StateArgs state = {nullptr, nullptr, nullptr, nullptr, mu_, beta_, memory_->lr, residual_dtype_};
  if (residual_) {
    state.residual = resolve(*memory_, residual_->first);
    state.new_residual = resolve(*memory_, residual_->second);
  }
  if (momentum_) {
    state.momentum = reinterpret_cast<const float*>(resolve(*memory_, momentum_->first));
    state.new_momentum = reinterpret_cast<float*>(resolve(*memory_, momentum_->second));
  }
  return state;
}

Commit::Commit(MemoryPointer memory, std::vector<std::tuple<std::uint32_t, BufferRef, std::uint64_t>> guard,
               std::vector<std::tuple<BufferRef, BufferRef, std::uint64_t>> copies)
    : memory_(std::move(memory)), guard_(std::move(guard)), copies_(std::move(copies)) {
  for (const auto& [dtype, ref, count] : guard_) {
    check_dtype(dtype);
    check_buffer(*memory_, ref, "guard");
  }
  for (const auto& [from, to, nbytes] : copies_) {
    check_buffer(*memory_, from, "copies");
    check_buffer(*memory_, to, "copies");
  }
}

void Commit::run() {
  for (const auto& [dtype, ref, count] : guard_) {
    const unsigned char* values = resolve(*memory_, ref);
    const bool finite = dtype == 0   ? all_finite<std::uint32_t>(values, count, 0x7f800000u)
                        : dtype == 1 ? all_finite<std::uint16_t>(values, count, 0x7c00u)
                                     : all_finite<std::uint16_t>(values, count, 0x7f80u);
    if (!finite) return;
  }
  for (const auto& [from, to, nbytes] : copies_) std::memcpy(resolve(*memory_, to), resolve(*memory_, from), nbytes);
}

}  // namespace qccl
