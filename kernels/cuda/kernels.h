// The device's kernels: encode, decode and reduce, each for all jobs of a launch.
//
// Template arguments: the codec's tile (codecs/minmax/device.h is one), the element type, the shape of a unit of work, and
// the variant. The kernels of bucket.h serve codecs without a tile. A launch has blocks of kThreads, for each job as many as
// its units need; this_block() tells a block its job. All bytes equal the host's: compile without fused multiplication
// (--fmad=false) and with subnormals.
#pragma once

#include "../codecs/all.h"
#include "bucket.h"
#include "combine.h"
#include "run.h"
#include "state.h"
#include "tile.h"

#if defined(__CUDACC__) && (__CUDA_FTZ || !__CUDA_PREC_DIV)
#error "compile without -ftz=true (which CuPy's RawModule adds) and without fast-math: the bytes must be the host's"
#endif

namespace QCCL_NAMESPACE {

// A bucket that takes a block needs more registers than a multiprocessor has for four blocks.
template <class Tile, class T, class S, Pass P>
__global__ void __launch_bounds__(kThreads, S::lanes == kThreads ? 3 : Tile::encode_blocks)
encode(const EncodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
       const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const EncodeJob& job = jobs[block.job];
  Unit unit;
  if (!find_unit<T, S>(block.number, job.units, job.count, parameters, unit)) return;
  Values<T, S> x;
  load_values<T, S>(resolve(memory, job.src), unit, [&](u32 j, u32 i, float value) { x[j][i] = value; });
  asm volatile("" ::: "memory");  // recompute everything but the values, because registers are scarce
  find_unit<T, S>(this_block(parameters).number, job.units, job.count, parameters, unit);
  u8* wire = resolve(memory, job.wire);
  const TileJob tile_job = {job.count, job.index, job.round, job.rank, job.scratch};
  typename Tile::template Wire<T, S> made;
  Tile::template encode<P, T, S>(x, wire, unit, tile_job, parameters, memory, made);
}

template <class Tile, class T, class S, bool Accumulate>
__global__ void __launch_bounds__(kThreads, Accumulate ? 2 : Tile::decode_blocks)
decode(const DecodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
       const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const DecodeJob job = jobs[block.job];
  const u8* wire = resolve(memory, job.wire);
  u8* dst = resolve(memory, job.dst);
  Unit unit;
  if (!find_unit<T, S>(block.number, job.units, job.count, parameters, unit)) return;
  typename Tile::template Wire<T, S> codes;
  Tile::template load_wire<T, S>(wire, job.count, unit, codes);
  Values<T, S> x;
  if constexpr (Accumulate) {
    load_values<T, S>(dst, unit, [&](u32 j, u32 i, float value) { x[j][i] = value; });
  }
  Tile::template for_each_value<T, S>(
      codes, unit, [&](u32 j, u32 i, float value) {
        if constexpr (Accumulate) {
          x[j][i] += value;
        } else {
          x[j][i] = value;
        }
      });
  bool nan;
  if constexpr (Accumulate) {
    nan = any_nan<T, S>(x);
  } else {
    nan = Tile::template has_nan<T, S>(codes, x);
  }
  store_values<T, S>(dst, unit, x, nan);
}

// The element type of copy().
struct Byte {
  using Storage = u8;
};

// Copies `count` bytes from `wire` to `dst`: encoding and decoding for codecs whose wire is the values.
template <class S>
__global__ void __launch_bounds__(kThreads)
copy(const DecodeJob* jobs, const BufferRef*, const __grid_constant__ Parameters parameters,
     const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const DecodeJob job = jobs[block.job];
  const u8* from = resolve(memory, job.wire);
  u8* to = resolve(memory, job.dst);
  Unit unit;
  if (!find_unit<Byte, S>(block.number, job.units, job.count, parameters, unit)) return;
#pragma unroll
  for (u32 row = 0; row < S::vectors; row += kRows<S>) {
    uint4 vectors[kRows<S>];
    load_rows<Byte, S>(from, unit, row, vectors);
    store_rows<Byte, S>(to, unit, row, vectors);
  }
}

struct NoState {};
template <class R>
constexpr bool kStateful = true;
template <>
constexpr bool kStateful<NoState> = false;

// Adds the own values to the total, with momentum if the job has it (../shared/state.h).
template <class T, class S, Pass P, Combine Op, bool Stateful>
QCCL_FN void combine_own(const u8* own, const StateJob* state, const Memory& memory, const Unit& unit, Values<T, S>& total) {
  const float* old = Stateful ? elements_of<Float32>(memory, state->momentum, 0) : nullptr;
  if (Stateful && old) {
    Values<T, S> next;
    load_state<Float32, T, S>(old, unit, [&](u32 j, u32 i, float value) { next[j][i] = value; });
    load_values<T, S>(own, unit, [&](u32 j, u32 i, float value) {
      const float momentum = next_momentum(state->mu, next[j][i], value);
      next[j][i] = finite_or_zero(momentum);
      total[j][i] = combine<Op>(total[j][i], with_momentum(state->mu, momentum, value));
    });
    if (P != Pass::range) store_state<Float32, T, S>(elements_of<Float32>(memory, state->new_momentum, 0), unit, next);
  } else {
    load_values<T, S>(own, unit, [&](u32 j, u32 i, float value) { total[j][i] = combine<Op>(total[j][i], value); });
  }
}

// Encodes the total, and stores the decoded values and the residual that they leave. Both replace the total in turn, because
// registers are scarce. R is the element type of residuals, NoState in a call without state.
template <class Tile, class T, class S, Pass P, class R>
QCCL_FN void encode_total(Values<T, S>& total, u8* wire, u8* out, const StateJob* state, const Unit& unit, const TileJob& job,
                          const Parameters& parameters, const Memory& memory) {
  typename Tile::template Wire<T, S> made;
  const bool nan = Tile::template encode<P, T, S>(total, wire, unit, job, parameters, memory, made);
  if constexpr (P == Pass::range) return;
  if constexpr (kStateful<R>) {
    if (auto* residual = elements_of<R>(memory, state->new_residual, 0)) {
      Tile::template for_each_value<T, S>(made, unit, [&](u32 j, u32 i, float value) {
        total[j][i] = next_residual<R>(total[j][i], out ? rounded<T>(value) : value, memory.lr);
      });
      store_state<R, T, S>(residual, unit, total);
    }
  }
  if (!out) return;
  Tile::template for_each_value<T, S>(made, unit, [&](u32 j, u32 i, float value) { total[j][i] = value; });
  store_values<T, S>(out, unit, total, nan);
}

// A copy of a job in the warp's shared memory, because loads from global memory, one after the other, take longer.
template <class Job>
QCCL_FN const Job& share_job(const Job& job) {
  __shared__ Job copies[kWarps];
  u32* copy = reinterpret_cast<u32*>(&copies[threadIdx.x / 32]);
#pragma unroll
  for (u32 i = 0; i < sizeof(Job) / 4; i += 32) {
    if (i + lane_number() < sizeof(Job) / 4) copy[i + lane_number()] = reinterpret_cast<const u32*>(&job)[i + lane_number()];
  }
  __syncwarp(kAllLanes);
  return copies[threadIdx.x / 32];
}

// The address of this lane's source among 32 from number `first` on; null behind the last. A warp's lanes load them at once,
// because loads of one after the other take longer.
QCCL_FN const u8* source_of_lane(const ReduceJob& job, const BufferRef* sources, u32 first, const Memory& memory) {
  const u32 number = first + lane_number();
  if (number >= job.source_count) return nullptr;
  const BufferRef& source = sources[job.first_source + number];
  return memory.base[source.buffer] + source.offset;
}

QCCL_FN const u8* of_lane(const u8* mine, u32 lane) {
  const u64 address = reinterpret_cast<u64>(mine);
  const u32 low = __shfl_sync(kAllLanes, (u32)address, (int)lane);
  const u32 high = __shfl_sync(kAllLanes, (u32)(address >> 32), (int)lane);
  return global(reinterpret_cast<const u8*>(low | (u64)high << 32));
}

template <class Tile, class T, class S, Pass P, Combine Op, class R>
QCCL_FN void reduce_unit(u32 number, const ReduceJob& job, const StateJob* state, const BufferRef* sources,
                         const Parameters& parameters, const Memory& memory) {
  u8* own = resolve(memory, job.own);
  const u64 count = job.count;  // in registers: the compiler does not keep what it reads from shared memory
  const u32 source_count = job.source_count, own_index = job.own_index;
  Unit unit;
  if (!find_unit<T, S>(number, job.units, count, parameters, unit)) return;
  if (own) prefetch_raw<T>(own, unit);
  if constexpr (kStateful<R>) {
    if (const u8* residual = resolve(memory, state->residual)) prefetch_raw<R>(residual, unit);
  }
  const u8* source = source_of_lane(job, sources, 0, memory);
#pragma unroll 1
  for (u32 k = 0; k < smaller(source_count, 32u); ++k) Tile::template prefetch_wire<T>(of_lane(source, k), unit);
  Values<T, S> total;
  for_each_element<T, S>([&](u32 j, u32 i) { total[j][i] = neutral<Op>(); });
  for (u32 k = 0;; ++k) {
    if (k == own_index) combine_own<T, S, P, Op, kStateful<R>>(own, state, memory, unit, total);
    if (k == source_count) break;
    if (k > 0 && k % 32 == 0) source = source_of_lane(job, sources, k, memory);
    typename Tile::template Wire<T, S> codes;
    Tile::template load_wire<T, S>(of_lane(source, k % 32), count, unit, codes);
    Tile::template for_each_value<T, S>(
        codes, unit, [&](u32 j, u32 i, float value) { total[j][i] = combine<Op>(total[j][i], value); });
  }
  asm volatile("" ::: "memory");  // recompute everything but the total, because registers are scarce
  find_unit<T, S>(number, job.units, job.count, parameters, unit);
  u8* wire = resolve(memory, job.wire);
  u8* out = resolve(memory, job.out);
  if (job.scale != 1.0f) for_each_element<T, S>([&](u32 j, u32 i) { total[j][i] *= job.scale; });
  if constexpr (kStateful<R>) {
    const float factor = residual_factor(state->beta, memory.lr);
    if (const auto* residual = elements_of<R>(memory, state->residual, 0)) {
      load_state<R, T, S>(residual, unit, [&](u32 j, u32 i, float value) {
        total[j][i] = with_residual(total[j][i], value, factor);
      });
    }
  }
  if (wire) {
    repeat_first<T, S>(total, unit);
    const TileJob tile_job = {job.count, job.index, job.round, job.rank, job.scratch};
    encode_total<Tile, T, S, P, R>(total, wire, out, state, unit, tile_job, parameters, memory);
  } else if (out && P != Pass::range) {
    store_values<T, S>(out, unit, total, any_nan<T, S>(total));
  }
}

// The blocks of a Reduce that must fit a multiprocessor. For sm_100 and newer the compiler needs a few more registers than two
// blocks leave for 16-bit values, or for a tile with few registers to spare, and would spill them.
template <class Tile, class T>
constexpr int fitting_blocks(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return sizeof(typename T::Storage) == 2 || Tile::encode_blocks < 4 ? 1 : blocks;
#else
  return blocks;
#endif
}

template <class Tile, class T, class S, Pass P, Combine Op>
__global__ void __launch_bounds__(kThreads, fitting_blocks<Tile, T>(Tile::reduce_blocks))
reduce(const ReduceJob* jobs, const BufferRef* sources, const __grid_constant__ Parameters parameters,
       const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  reduce_unit<Tile, T, S, P, Op, NoState>(block.number, share_job(jobs[block.job]), nullptr, sources, parameters, memory);
}

// A sum with state; R is the element type of residuals.
template <class Tile, class T, class S, Pass P, class R>
__global__ void __launch_bounds__(kThreads, fitting_blocks<Tile, T>(Tile::state_blocks))
reduce_with_state(const StateJob* jobs, const BufferRef* sources, const __grid_constant__ Parameters parameters,
                  const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const StateJob& job = share_job(jobs[block.job]);
  reduce_unit<Tile, T, S, P, Combine::sum, R>(block.number, job.reduce, &job, sources, parameters, memory);
}

}  // namespace QCCL_NAMESPACE
