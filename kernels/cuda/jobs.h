// The arguments of a launch: plain data; qccl/engine/cuda/source.py has the same layouts.
//
// Jobs are constant for the life of a plan and lie in device memory. A launch does all jobs of one kind; the codec and the
// element type are template arguments of its kernel. Jobs name buffers by number (see Memory). The grid has one dimension:
// the blocks of the first job, then those of the second, and so on; a table says which is which.
#pragma once

#include "../shared/numeric.h"

namespace QCCL_NAMESPACE {

constexpr u32 kThreads = 256;  // threads of a block
constexpr u32 kWarps = kThreads / 32;
constexpr u32 kDirectBuffers = 28;
constexpr u32 kNoBuffer = 0xffffffffu;  // the buffer number of a buffer that a job does not have

// Part of a buffer. Values are aligned to their size, wires are not; both are fastest at multiples of 16.
struct BufferRef {
  u64 offset;  // in bytes
  u32 buffer;
  u32 rank;  // the rank that encoded it, if it is a source of a Reduce
};

// `units` is the job's number of units of work (see tile.h). `index` is a multiple of eight.
struct EncodeJob {
  BufferRef src, wire;
  u64 count, index;
  u32 round, rank, units, scratch;
};

// `index`, `round` and `rank` are those of the Encode or Reduce that made the wire. `itemsize` is that of the elements that
// commit() copies.
struct DecodeJob {
  BufferRef wire, dst;
  u64 count, index;
  u32 round, rank, units, itemsize;
};

// The wires are sources[first_source] and the next; `own` comes before wire number own_index (kNoBuffer: no own values).
// `own` and `out` may be the same memory.
struct ReduceJob {
  BufferRef own, wire, out;
  u64 count, index;
  u32 round, rank, units, scratch;
  u32 first_source, source_count, own_index;
  float scale;
  u32 source_round, unused;
};

// A Reduce with state; a buffer may be kNoBuffer. Momenta are fp32, residuals of the kernel's element type R.
struct StateJob {
  ReduceJob reduce;
  BufferRef residual, new_residual, momentum, new_momentum;
  float mu, beta;
};

// The work of a block: block number `number` of the blocks of job `job`.
struct BlockOfJob {
  u32 job, number;
};

// The arguments that all jobs of a launch share. A bucket is `units_per_bucket` units. If that is more than one, the kernels
// gather its range in `scratch`: two words per bucket, zero before, at the job's number `scratch` on. The kernels of
// bucket.h have there instead, for each bucket, `scratch_words` for its codec, and a Reduce a bucket of floats before them.
// `blocks` has an entry for each block of the grid.
struct Parameters {
  u64 seed;
  u64 bucket;  // elements of a bucket; 0: all elements of a job
  u32* scratch;
  u32 units_per_bucket;
  u32 options[6];  // the codec's options
  u32 scratch_words;
  const BlockOfJob* blocks;
};

// Addresses by value, for qccl_addresses().
constexpr u32 kAddresses = 480;
struct Addresses {
  u64 values[kAddresses];
};

// The addresses of the buffers: a launch passes those of the first ones, and the others are in device memory.
struct Memory {
  u8* base[kDirectBuffers];
  u8* const* more;
  const volatile u32* failed;  // not zero after a failure of the communicator (see run.h)
  float lr;                    // the learning rate, for residuals
  u32 unused;
  const u64* call;  // the number of the call, in device memory, so that the replays of a graph differ
};

static_assert(sizeof(BufferRef) == 16 && sizeof(EncodeJob) == 64 && sizeof(DecodeJob) == 64 && sizeof(ReduceJob) == 104,
              "qccl/engine/cuda/source.py has these sizes");
static_assert(sizeof(StateJob) == 176, "qccl/engine/cuda/source.py has this size");
static_assert(sizeof(Parameters) == 64 && sizeof(Memory) == 256, "qccl/engine/cuda/source.py has these sizes");

QCCL_FN BlockOfJob this_block(const Parameters& parameters) { return parameters.blocks[blockIdx.x]; }

QCCL_FN u8* base_of(const Memory& memory, u32 buffer) {
#ifdef QCCL_MANY_BUFFERS  // for programs that need `more`: the compiler then no longer knows that all memory is global
  const bool is_direct = buffer < kDirectBuffers;
  u8* const* table = is_direct ? memory.base : memory.more;  // one load: two, in branches, take more registers
  return table[is_direct ? buffer : buffer - kDirectBuffers];
#else
  return memory.base[buffer];
#endif
}

// The address, null for kNoBuffer.
QCCL_FN u8* resolve(const Memory& memory, const BufferRef& place) {
  return place.buffer == kNoBuffer ? nullptr : base_of(memory, place.buffer) + place.offset;
}

}  // namespace QCCL_NAMESPACE
