// Encode, decode and reduce for every codec: a block of threads for each bucket of each job.
//
// A block's number in its job is the bucket's. A Reduce computes its total in the scratch, as fp32.
#pragma once

#include "combine.h"
#include "team.h"
#include "tile.h"

namespace QCCL_NAMESPACE {

QCCL_FN BucketOptions bucket_options(const Parameters& p) {
  const u32* o = p.options;
  return {p.bucket, p.seed, {o[0], o[1], o[2], o[3], o[4], o[5]}};
}

// Elements in memory as fp32 values.
template <class T>
struct Elements {
  const typename T::Storage* at;
  QCCL_MEMBER float operator[](u32 i) const { return T::to_float(at[i]); }
};

template <class T>
QCCL_FN typename T::Storage* elements(u8* base, u64 first) {
  return reinterpret_cast<typename T::Storage*>(base) + first;
}

template <class Codec, class T, class Take>
QCCL_FN void decode_bucket(const WireFormat<Codec, T>& format, const u8* wire, u64 b, const RngCounter& counter,
                           const Take& take) {
  using Format = WireFormat<Codec, T>;
  Codec::template decode<T>(BlockTeam(), format.options, counter, wire + Format::codes_of(format, b),
                            wire + Format::meta_of(format, b), Format::size_of(format, b), take);
}

template <class Codec, class T, class Values>
QCCL_FN void encode_bucket(const WireFormat<Codec, T>& format, const Values& x, u64 b, const RngCounter& counter, u8* wire,
                           u32* scratch) {
  using Format = WireFormat<Codec, T>;
  Codec::template encode<T>(BlockTeam(scratch), format.options, counter, x, Format::size_of(format, b),
                            wire + Format::codes_of(format, b), wire + Format::meta_of(format, b));
  if (b == 0 && threadIdx.x < format.meta_begin - format.codes_end) wire[format.codes_end + threadIdx.x] = 0;
}

// Decodes a bucket to elements, with the zeros of a sparse codec.
template <class Codec, class T>
QCCL_FN void store_bucket(const WireFormat<Codec, T>& format, const u8* wire, u64 b, const RngCounter& counter,
                          typename T::Storage* to) {
  const BlockTeam team;
  if constexpr (Codec::sparse) {
    team.each(WireFormat<Codec, T>::size_of(format, b), [&](u32 i) { to[i] = T::from_float(0.0f); });
    team.sync();
  }
  decode_bucket(format, wire, b, counter,
                [&](u32 i, float value) { to[i] = T::from_float(Codec::sparse ? 0.0f + value : value); });
}

template <class Codec, class T>
__global__ void __launch_bounds__(kThreads, Codec::sparse ? 3 : 4)  // four blocks leave too few registers for a selection
bucket_encode(const EncodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
              const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const EncodeJob job = jobs[block.job];
  const u64 b = block.number;
  const auto format = WireFormat<Codec, T>::make(bucket_options(parameters), job.count);
  const u64 first = WireFormat<Codec, T>::first_of(format, b);
  const Elements<T> x = {elements<T>(resolve(memory, job.src), first)};
  u32* scratch = parameters.scratch + (job.scratch + b) * parameters.scratch_words;
  encode_bucket(format, x, b, RngCounter{*memory.call, job.index + first, job.round, job.rank}, resolve(memory, job.wire),
                scratch);
}

template <class Codec, class T, bool Accumulate>
__global__ void __launch_bounds__(kThreads, 4)
bucket_decode(const DecodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
              const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const DecodeJob job = jobs[block.job];
  const u64 b = block.number;
  const auto format = WireFormat<Codec, T>::make(bucket_options(parameters), job.count);
  const u64 first = WireFormat<Codec, T>::first_of(format, b);
  const u8* wire = resolve(memory, job.wire);
  auto* dst = elements<T>(resolve(memory, job.dst), first);
  const RngCounter counter = {*memory.call, job.index + first, job.round, job.rank};
  if constexpr (Accumulate) {
    if constexpr (Codec::sparse) {  // elements without a code: every NaN becomes the quiet one, as on the host
      const BlockTeam team;
      team.each(WireFormat<Codec, T>::size_of(format, b), [&](u32 i) { dst[i] = T::from_float(T::to_float(dst[i])); });
      team.sync();
    }
    decode_bucket(format, wire, b, counter, [&](u32 i, float value) { dst[i] = T::from_float(T::to_float(dst[i]) + value); });
  } else {
    store_bucket(format, wire, b, counter, dst);
  }
}

// The scratch of bucket b of a Reduce: the total, and behind it the codec's scratch.
QCCL_FN float* total_of(const ReduceJob& job, u64 b, const Parameters& parameters) {
  return reinterpret_cast<float*>(parameters.scratch) + (job.scratch + b) * (parameters.bucket + parameters.scratch_words);
}
QCCL_FN u32* scratch_behind(float* total, const Parameters& parameters) {
  return reinterpret_cast<u32*>(total) + parameters.bucket;
}

// Combines the sources and the own values of a bucket in order in `total`.
template <class Codec, class T, Combine Op, class Own>
QCCL_FN void combine_bucket(const WireFormat<Codec, T>& format, const ReduceJob& job, const BufferRef* sources, u64 b,
                            const Memory& memory, const Own& own, float* total) {
  const BlockTeam team;
  const u64 first = WireFormat<Codec, T>::first_of(format, b);
  const u32 n = WireFormat<Codec, T>::size_of(format, b);
  const bool begins_with_own = job.own_index == 0;
  team.each(n, [&](u32 i) { total[i] = begins_with_own ? own[i] : Codec::sparse ? 0.0f : neutral<Op>(); });
  team.sync();
  for (u32 k = 0;; ++k) {
    if (k > 0 && k == job.own_index) {
      team.each(n, [&](u32 i) { total[i] = combine<Op>(total[i], own[i]); });
      team.sync();
    }
    if (k == job.source_count) break;
    const BufferRef& source = sources[job.first_source + k];
    const RngCounter counter = {*memory.call, job.index + first, job.source_round, source.rank};
    decode_bucket(format, resolve(memory, source), b, counter,
                  [&](u32 i, float value) { total[i] = combine<Op>(total[i], value); });
    team.sync();
  }
}

template <class Codec, class T, Combine Op>
__global__ void __launch_bounds__(kThreads, 2)
bucket_reduce(const ReduceJob* jobs, const BufferRef* sources, const __grid_constant__ Parameters parameters,
              const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const ReduceJob& job = jobs[block.job];
  const u64 b = block.number;
  const auto format = WireFormat<Codec, T>::make(bucket_options(parameters), job.count);
  const u64 first = WireFormat<Codec, T>::first_of(format, b);
  const u32 n = WireFormat<Codec, T>::size_of(format, b);
  const BlockTeam team;
  float* total = total_of(job, b, parameters);
  const Elements<T> own = {elements<T>(resolve(memory, job.own), first)};
  combine_bucket<Codec, T, Op>(format, job, sources, b, memory, own, total);
  if (job.scale != 1.0f) {
    team.each(n, [&](u32 i) { total[i] *= job.scale; });
    team.sync();
  }
  u8* wire = resolve(memory, job.wire);
  u8* out = resolve(memory, job.out);
  if (!wire) {
    team.each(n, [&](u32 i) { elements<T>(out, first)[i] = T::from_float(total[i]); });
    return;
  }
  const RngCounter counter = {*memory.call, job.index + first, job.round, job.rank};
  encode_bucket(format, total, b, counter, wire, scratch_behind(total, parameters));
  if (!out) return;
  team.sync();
  store_bucket(format, wire, b, counter, elements<T>(out, first));
}

}  // namespace QCCL_NAMESPACE
