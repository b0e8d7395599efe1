#include "operations.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "choose.h"
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

void check_place(const Memory& memory, const Place& place, const char* what) {
  require(place.first < memory.addresses.size(), std::string(what) + " names buffer " + std::to_string(place.first) +
                                                     ", but the memory has " +
                                                     std::to_string(memory.addresses.size()));
}

unsigned char* resolve(const Memory& memory, const Place& place) {
  const std::uintptr_t base = memory.addresses[place.first];
  if (!base) throw std::runtime_error("buffer " + std::to_string(place.first) + " has no address; store one first");
  return reinterpret_cast<unsigned char*>(base + place.second);
}

unsigned char* resolve(const Memory& memory, const std::optional<Place>& place) {
  return place ? resolve(memory, *place) : nullptr;
}

// Of this thread; it grows to what the largest call needed.
float* scratch(std::uint64_t wanted) {
  thread_local std::vector<float> memory;
  if (memory.size() < wanted) memory.resize(wanted);
  return memory.data();
}

// run(part of the call) by as many threads as the memory's program may have, each with scratch of its own.
template <class Call, class Run>
void share_call(const Call& call, std::uint64_t bucket, const Memory& memory, std::uint64_t floats, const Run& run) {
  share(call.count, bucket, memory.threads, [&](const BucketRange& buckets) {
    Call part = call;
    part.buckets = buckets;
    part.scratch = scratch(floats);
    const FloatEnvironment defaults;
    run(part);
  });
}

// Whether in no value all bits of the exponent are set.
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

const Isa& loops() {
  static const Isa& chosen = choose_isa();
  return chosen;
}

MinMax::MinMax(std::int64_t bits, std::int64_t bucket, bool stochastic, std::uint64_t seed)
    : parameters{static_cast<std::uint32_t>(bits), static_cast<std::uint64_t>(bucket), stochastic, seed} {
  require(bits >= 1 && bits <= 8, "bits is " + std::to_string(bits) + "; allowed: 1 to 8");
  require(bucket == 0 || (bucket > 0 && bucket % 8 == 0),
          "bucket is " + std::to_string(bucket) + "; allowed: multiples of 8, or 0 for one bucket per call");
}

void MinMax::encode(const EncodeCall& call) const { loops().minmax.encode(&parameters, call); }
void MinMax::decode(const DecodeCall& call) const { loops().minmax.decode(&parameters, call); }
void MinMax::reduce(const ReduceCall& call) const {
  if (!call.state) return loops().minmax.reduce(&parameters, call);
  const BucketParameters in_buckets = buckets(call.count);
  loops().minmax_state(&in_buckets, call);
}

BucketParameters MinMax::buckets(std::uint64_t count) const {
  return {bucket(count), parameters.seed, {parameters.bits, parameters.stochastic}};
}

void Raw::encode(const EncodeCall& call) const { loops().raw.encode(nullptr, call); }
void Raw::decode(const DecodeCall& call) const { loops().raw.decode(nullptr, call); }
void Raw::reduce(const ReduceCall& call) const {
  call.state ? loops().raw_state(&kBuckets, call) : loops().raw.reduce(nullptr, call);
}

BucketCodec::BucketCodec(const std::string& name, std::uint64_t bucket, std::uint64_t seed,
                         const std::vector<std::uint32_t>& options)
    : parameters{bucket, seed, {}}, codec(nullptr) {
  const Isa& isa = loops();
  std::string names;
  for (std::uint32_t i = 0; i < isa.bucket_count; ++i) {
    if (name == isa.buckets[i].name) codec = &isa.buckets[i];
    names += (i ? ", " : "") + std::string(isa.buckets[i].name);
  }
  require(codec != nullptr, "there is no codec " + name + "; allowed: " + names);
  require(bucket >= 8 && bucket % 8 == 0 && bucket <= 1u << 24,
          "bucket is " + std::to_string(bucket) + "; allowed: multiples of 8 from 8 to 2^24");
  constexpr std::size_t most = sizeof parameters.options / sizeof parameters.options[0];
  require(options.size() <= most, std::to_string(options.size()) + " options; allowed: up to " + std::to_string(most));
  std::copy(options.begin(), options.end(), parameters.options);
}

Encode::Encode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, Place src, Place wire,
               std::uint64_t count, std::uint64_t index, std::uint32_t round, std::uint32_t rank)
    : memory_(std::move(memory)),
      codec_(std::move(codec)),
      src_(src),
      wire_(wire),
      call_{nullptr, nullptr, count, dtype, {0, index, round, rank}, nullptr, {}} {
  check_dtype(dtype);
  check_place(*memory_, src, "src");
  check_place(*memory_, wire, "wire");
}

void Encode::run() {
  if (!call_.count) return;
  EncodeCall call = call_;
  call.src = resolve(*memory_, src_);
  call.wire = resolve(*memory_, wire_);
  call.place.call = memory_->call;
  share_call(call, codec_->bucket(call.count), *memory_, codec_->scratch(call.count),
             [this](const EncodeCall& part) { codec_->encode(part); });
}

Decode::Decode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, Place wire, Place dst,
               std::uint64_t count, bool accumulate, std::uint64_t index, std::uint32_t round, std::uint32_t rank)
    : memory_(std::move(memory)),
      codec_(std::move(codec)),
      wire_(wire),
      dst_(dst),
      call_{nullptr, nullptr, count, dtype, accumulate, {0, index, round, rank}, nullptr, {}} {
  check_dtype(dtype);
  check_place(*memory_, wire, "wire");
  check_place(*memory_, dst, "dst");
}

void Decode::run() {
  if (!call_.count) return;
  DecodeCall call = call_;
  call.wire = resolve(*memory_, wire_);
  call.dst = resolve(*memory_, dst_);
  call.place.call = memory_->call;
  share_call(call, codec_->bucket(call.count), *memory_, codec_->scratch(call.count),
             [this](const DecodeCall& part) { codec_->decode(part); });
}

Reduce::Reduce(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, std::vector<Place> sources,
               std::optional<Place> own, std::uint32_t own_index, std::optional<Place> wire, std::optional<Place> out,
               std::uint64_t count, std::uint32_t op, float scale, std::uint64_t index, std::uint32_t round,
               std::uint32_t rank, std::vector<std::uint32_t> source_ranks, std::uint32_t source_round,
               StateBuffer residual, StateBuffer momentum, float mu)
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
      call_{nullptr,
            nullptr,
            static_cast<std::uint32_t>(sources_.size()),
            source_round,
            own_index,
            nullptr,
            nullptr,
            nullptr,
            count,
            dtype,
            static_cast<Combine>(op),
            scale,
            {0, index, round, rank},
            nullptr,
            nullptr,
            {}} {
  check_dtype(dtype);
  for (const StateBuffer& carried : {residual_, momentum_}) {
    if (!carried) continue;
    check_place(*memory_, carried->first, "state");
    check_place(*memory_, carried->second, "state");
    require(op == 0, "op is " + std::to_string(op) + "; a reduction with state allows 0 (sum) only");
  }
  require(!residual_ || wire, "there is a residual, but no wire that could leave something out");
  require(!momentum_ || own, "there is a momentum, but no own values");
  for (const Place& source : sources_) check_place(*memory_, source, "srcs");
  if (own) check_place(*memory_, *own, "own");
  if (wire) check_place(*memory_, *wire, "wire");
  if (out) check_place(*memory_, *out, "out");
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
  if (!call_.count) return;
  ReduceCall call = call_;
  for (std::size_t i = 0; i < sources_.size(); ++i) addresses_[i] = resolve(*memory_, sources_[i]);
  call.sources = addresses_.data();
  call.source_ranks = source_ranks_.empty() ? nullptr : source_ranks_.data();
  call.own = resolve(*memory_, own_);
  call.wire = resolve(*memory_, wire_);
  call.out = resolve(*memory_, out_);
  call.place.call = memory_->call;
  const StateCall state = resolve_state();
  if (residual_ || momentum_) call.state = &state;
  if (sources_.empty() && !wire_ && call.scale == 1.0f && !call.state) {  // one rank alone: its values stay as they are, bit for bit
    std::memmove(call.out, call.own, call.count * kItemsize[call.dtype]);
    return;
  }
  const std::uint64_t floats = call.state ? codec_->state_scratch(call.count) : codec_->scratch(call.count);
  share_call(call, codec_->bucket(call.count), *memory_, floats,
             [this](const ReduceCall& part) { codec_->reduce(part); });
}

StateCall Reduce::resolve_state() const {
  StateCall state = {nullptr, nullptr, nullptr, nullptr, mu_, memory_->lr};
  if (residual_) {
    state.residual = reinterpret_cast<const float*>(resolve(*memory_, residual_->first));
    state.new_residual = reinterpret_cast<float*>(resolve(*memory_, residual_->second));
  }
  if (momentum_) {
    state.momentum = reinterpret_cast<const float*>(resolve(*memory_, momentum_->first));
    state.new_momentum = reinterpret_cast<float*>(resolve(*memory_, momentum_->second));
  }
  return state;
}

Commit::Commit(MemoryPointer memory, std::vector<std::tuple<std::uint32_t, Place, std::uint64_t>> guard,
               std::vector<std::tuple<Place, Place, std::uint64_t>> copies)
    : memory_(std::move(memory)), guard_(std::move(guard)), copies_(std::move(copies)) {
  for (const auto& [dtype, place, count] : guard_) {
    check_dtype(dtype);
    check_place(*memory_, place, "guard");
  }
  for (const auto& [from, to, nbytes] : copies_) {
    check_place(*memory_, from, "copies");
    check_place(*memory_, to, "copies");
  }
}

void Commit::run() {
  for (const auto& [dtype, place, count] : guard_) {
    const unsigned char* values = resolve(*memory_, place);
    const bool finite = dtype == 0   ? all_finite<std::uint32_t>(values, count, 0x7f800000u)
                        : dtype == 1 ? all_finite<std::uint16_t>(values, count, 0x7c00u)
                                     : all_finite<std::uint16_t>(values, count, 0x7f80u);
    if (!finite) return;
  }
  for (const auto& [from, to, nbytes] : copies_) std::memcpy(resolve(*memory_, to), resolve(*memory_, from), nbytes);
}

}  // namespace qccl
