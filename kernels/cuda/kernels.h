// The device's kernels: encode, decode and reduce, each for all jobs of a launch.
//
// Template arguments: the codec's tile (codecs/minmax/device.h is one), the element type, the shape of a unit of work, and
// the variant. The kernels of bucket.h serve codecs without a tile. A launch has blocks of kThreads, for each job as many as
// its units need; this_block() tells a block its job. All bytes equal the host's: compile without fused multiplication
// (--fmad=false) and with subnormals.
#pragma once

#include "../codecs.h"
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
__global__ void __launch_bounds__(kThreads, S::lanes == kThreads ? 3 : 4)
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
  Tile::template encode<false, P, T, S>(x, wire, unit, tile_job, parameters, memory);
}

template <class Tile, class T, class S, bool Accumulate>
__global__ void __launch_bounds__(kThreads, Accumulate ? 2 : 4)
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
    nan = has_nan<T, S>(x);
  } else {
    nan = Tile::template is_nan_wire<T, S>(codes);
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

template <class Tile, class T, class S, Pass P, Combine Op>
__global__ void __launch_bounds__(kThreads, 2)
reduce(const ReduceJob* jobs, const BufferRef* sources, const __grid_constant__ Parameters parameters,
       const __grid_constant__ Memory memory) {
  const BlockOfJob block = this_block(parameters);
  const ReduceJob& job = jobs[block.job];
  u8* own = resolve(memory, job.own);
  Unit unit;
  if (!find_unit<T, S>(block.number, job.units, job.count, parameters, unit)) return;
  if (own) prefetch_raw<T>(own, unit);
  for (u32 k = 0; k < job.source_count; ++k) {
    Tile::template prefetch_wire<T>(resolve(memory, sources[job.first_source + k]), unit);
  }
  Values<T, S> total;
  for_each_element<T, S>([&](u32 j, u32 i) { total[j][i] = neutral<Op>(); });
  for (u32 k = 0;; ++k) {
    if (k == job.own_index) {
      load_values<T, S>(own, unit, [&](u32 j, u32 i, float value) { total[j][i] = combine<Op>(total[j][i], value); });
    }
    if (k == job.source_count) break;
    typename Tile::template Wire<T, S> codes;
    Tile::template load_wire<T, S>(resolve(memory, sources[job.first_source + k]), job.count, unit, codes);
    Tile::template for_each_value<T, S>(
        codes, unit, [&](u32 j, u32 i, float value) { total[j][i] = combine<Op>(total[j][i], value); });
  }
  asm volatile("" ::: "memory");  // recompute everything but the total, because registers are scarce
  find_unit<T, S>(block.number, job.units, job.count, parameters, unit);
  u8* wire = resolve(memory, job.wire);
  u8* out = resolve(memory, job.out);
  const TileJob tile_job = {job.count, job.index, job.round, job.rank, job.scratch};
  if (job.scale != 1.0f) for_each_element<T, S>([&](u32 j, u32 i) { total[j][i] *= job.scale; });
  bool nan;
  if (wire) {
    repeat_first<T, S>(total, unit);
    nan = Tile::template encode<true, P, T, S>(total, wire, unit, tile_job, parameters, memory);
  } else {
    nan = has_nan<T, S>(total);
  }
  if (out && P != Pass::range) store_values<T, S>(out, unit, total, nan);
}

}  // namespace QCCL_NAMESPACE
