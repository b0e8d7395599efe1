// Reductions with state (../shared/state.h), bucket by bucket for every codec, and the commit of new state at the end of a run.
#pragma once

#include "../shared/state.h"
#include "bucket.h"

namespace QCCL_NAMESPACE {

// The own values of a bucket with momentum. Reading value i stores its new momentum, so it is read once.
template <class T>
struct OwnValues {
  const typename T::Storage* at;
  const float* momentum;  // null: no momentum
  float* new_momentum;
  float mu;

  QCCL_MEMBER float operator[](u32 i) const {
    const float x = T::to_float(at[i]);
    if (!momentum) return x;
    const float next = next_momentum(mu, momentum[i], x);
    new_momentum[i] = finite_or_zero(next);
    return with_momentum(mu, next, x);
  }
};

// The elements of a buffer from number `first` on; null for kNoBuffer.
template <class R>
QCCL_FN typename R::Storage* elements_of(const Memory& memory, const BufferRef& place, u64 first) {
  u8* base = resolve(memory, place);
  return base ? elements<R>(base, first) : nullptr;
}

// R is the element type of residuals.
template <class Codec, class T, class R>
__global__ void __launch_bounds__(kThreads, 2)
bucket_reduce_with_state(const StateJob* jobs, const BufferRef* sources, const __grid_constant__ Parameters parameters,
                const __grid_constant__ Memory memory) {
  using Format = WireFormat<Codec, T>;
  const BlockOfJob block = this_block(parameters);
  const StateJob& job = jobs[block.job];
  const ReduceJob& reduce = job.reduce;
  const u64 b = block.number;
  const auto format = Format::make(bucket_options(parameters), reduce.count);
  const u64 first = Format::first_of(format, b);
  const u32 n = Format::size_of(format, b);
  const BlockTeam team;
  float* total = total_of(reduce, b, parameters);
  const OwnValues<T> own = {elements<T>(resolve(memory, reduce.own), first), elements_of<Float32>(memory, job.momentum, first),
                            elements_of<Float32>(memory, job.new_momentum, first), job.mu};
  combine_bucket<Codec, T, Combine::sum>(format, reduce, sources, b, memory, own, total);
  const auto* residual = elements_of<R>(memory, job.residual, first);
  auto* new_residual = elements_of<R>(memory, job.new_residual, first);
  const float lr = memory.lr, factor = residual_factor(job.beta, lr);
  const auto keep = [&](u32 i, float decoded) { new_residual[i] = R::from_float(next_residual<R>(total[i], decoded, lr)); };
  team.each(n, [&](u32 i) {
    if (reduce.scale != 1.0f) total[i] *= reduce.scale;
    if (residual) total[i] = with_residual(total[i], R::to_float(residual[i]), factor);
  });
  team.sync();
  u8* wire = resolve(memory, reduce.wire);
  u8* base = resolve(memory, reduce.out);
  auto* out = base ? elements<T>(base, first) : nullptr;
  if (!wire) {
    team.each(n, [&](u32 i) { out[i] = T::from_float(total[i]); });
    return;
  }
  const RngCounter counter = {*memory.call, reduce.index + first, reduce.round, reduce.rank};
  encode_bucket(format, total, b, counter, wire, scratch_behind(total, parameters));
  team.sync();
  if (out) {
    store_bucket(format, wire, b, counter, out);
    team.sync();
    if (residual) team.each(n, [&](u32 i) { keep(i, T::to_float(out[i])); });
  } else if (residual) {
    if constexpr (Codec::sparse) {
      team.each(n, [&](u32 i) { keep(i, 0.0f); });
      team.sync();
    }
    decode_bucket(format, wire, b, counter, [&](u32 i, float value) { keep(i, Codec::sparse ? 0.0f + value : value); });
  }
}

// Elements that a block handles in commit().
constexpr u32 kCommitted = 4096;

template <class R>
QCCL_FN void copy_elements(const Memory& memory, const DecodeJob& job, u64 first, u32 n) {
  const auto* from = elements_of<R>(memory, job.wire, first);
  auto* to = elements_of<R>(memory, job.dst, first);
  for (u32 i = threadIdx.x; i < n; i += kThreads) to[i] = from[i];
}

// First pass: set the first word of the scratch, zero before, if a job without a destination has a value that is not
// finite, or after a failure, when received values may be garbage. Second pass: if the word is still zero, copy elements of
// job.itemsize bytes, 2 or 4, from "wire" to "dst" for the other jobs.
template <class T, Pass P>
__global__ void __launch_bounds__(kThreads)
commit(const DecodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
       const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const DecodeJob job = jobs[block.job];
  const bool guards = job.dst.buffer == kNoBuffer;
  const u64 first = (u64)block.number * kCommitted;
  if (guards != (P == Pass::range)) return;
  const u64 rest = job.count - first;
  const u32 n = (u32)(rest < kCommitted ? rest : kCommitted);
  if constexpr (P == Pass::range) {
    if (threadIdx.x == 0 && *memory.failed) *parameters.scratch = 1;
    const auto* values = elements<T>(resolve(memory, job.wire), first);
    for (u32 i = threadIdx.x; i < n; i += kThreads) {
      if (!is_finite(T::to_float(values[i]))) *parameters.scratch = 1;
    }
  } else {
    if (*parameters.scratch) return;
    if (job.itemsize == 2) {
      copy_elements<BFloat16>(memory, job, first, n);
    } else {
      copy_elements<Float32>(memory, job, first, n);
    }
  }
}

}  // namespace QCCL_NAMESPACE
