// What a launch is told: plain data, laid out the same by qccl/cuda/source.py.
//
// Jobs are constant for the life of a plan and lie in device memory; a launch does all jobs of one kind, the codec and
// the element type being the kernel's template arguments. Buffers are named by number, and their addresses come with
// the launch.
#pragma once

#include "../numeric.h"

namespace QCCL_NAMESPACE {

constexpr u32 kThreads = 256;  // of every block
constexpr u32 kWarps = kThreads / 32;
constexpr u32 kMaxBuffers = 30;
constexpr u32 kNowhere = 0xffffffffu;  // the buffer number of a place that a job does not have

// Values begin at a multiple of their size, a wire anywhere; from multiples of 16 on both are fastest.
struct Place {
  u64 offset;  // bytes
  u32 buffer;
  u32 rank;  // of the wire's maker, where it is a source
};

// `units` is how many units of work (see tile.h) the job's elements make. `index` is a multiple of eight.
struct EncodeJob {
  Place src, wire;
  u64 count, index;
  u32 round, rank, units, scratch;
};

// `index`, `round` and `rank` are those of the wire's maker.
struct DecodeJob {
  Place wire, dst;
  u64 count, index;
  u32 round, rank, units, unused;
};

// The wires are sources[first_source] and the next; `own` comes before number own_index of them (kNowhere: there is
// none). `own` and `out` may be the same place.
struct ReduceJob {
  Place own, wire, out;
  u64 count, index;
  u32 round, rank, units, scratch;
  u32 first_source, source_count, own_index;
  float scale;
  u32 source_round, unused;
};

// A Reduce that remembers, in fp32; a place may be none.
struct StateJob {
  ReduceJob reduce;
  Place residual, new_residual, momentum, new_momentum;
  float mu;
  u32 unused;
};

// What all jobs of a launch share. A bucket is `units_per_bucket` units; of a bucket that spans several, the kernels
// gather the range in `scratch`: two words for each bucket from the job's number `scratch` on, zero before. The kernels
// of bucket.h have a bucket of floats there for each.
struct Parameters {
  u64 seed;
  u64 bucket;  // elements; 0: all of a job
  u32* scratch;
  u32 units_per_bucket;
  u32 options[6];  // the codec's own
  u32 unused;
};

struct Memory {
  u8* base[kMaxBuffers];
  float lr;  // the learning rate that residuals count by
  u32 unused;
  const u64* call;  // the number of the call, on the device, so that the replays of a graph differ
};

static_assert(sizeof(Place) == 16 && sizeof(EncodeJob) == 64 && sizeof(DecodeJob) == 64 && sizeof(ReduceJob) == 104,
              "cuda_source.py has these sizes");
static_assert(sizeof(StateJob) == 176, "cuda_source.py has this size");
static_assert(sizeof(Parameters) == 56 && sizeof(Memory) == 256, "cuda_source.py has these sizes");

// The address of a place, null if there is none.
QCCL_FN u8* resolve(const Memory& memory, const Place& place) {
  return place.buffer == kNowhere ? nullptr : memory.base[place.buffer] + place.offset;
}

}  // namespace QCCL_NAMESPACE
