// The kernels with which every run begins and ends. They tell the host, through words in pinned memory (qccl/cuda/flags.py),
// how far the runs are, so that the watchdog need not call CUDA; and a run that ends after a failure poisons its results.
#pragma once

#include "jobs.h"

namespace QCCL_NAMESPACE {

// The words: whether the communicator has failed, and the numbers of the runs that began and ended last.
struct Flags {
  u32 failed, begun, ended;
};

// The bytes of each buffer that holds results; 0 for the others.
struct ResultSizes {
  u64 nbytes[kMaxBuffers];
};

static_assert(sizeof(ResultSizes) == 240, "qccl/cuda/source.py has this size");

}  // namespace QCCL_NAMESPACE

// Stores the number of a call where Memory::call points, if `words` is not null: `value`, or in the replays of a graph
// `value` plus the number of replays before, which words[1] counts. The host does not watch replays.
extern "C" __global__ void qccl_begin(unsigned long long* words, unsigned long long value, unsigned replay,
                                      volatile qccl::Flags* flags, unsigned run) {
  if (words) words[0] = replay ? value + words[1]++ : value;
  if (!replay) flags->begun = run;
}

// After a failure, fills all results with ones: NaN in every floating type. One block of threads, so that one look at
// `failed` decides for all; it is set before the transfers are aborted.
extern "C" __global__ void qccl_end(qccl::Memory memory, qccl::ResultSizes results, unsigned replay,
                                    volatile qccl::Flags* flags, unsigned run) {
  __shared__ bool failed;
  if (threadIdx.x == 0) failed = flags->failed;
  __syncthreads();
  for (qccl::u32 b = 0; failed && b < qccl::kMaxBuffers; ++b) {
    for (qccl::u64 i = threadIdx.x; i < results.nbytes[b]; i += qccl::kThreads) memory.base[b][i] = 0xff;
  }
  __syncthreads();
  if (threadIdx.x == 0 && !replay) {
    __threadfence_system();
    flags->ended = run;  // after all writes to the results: the host may then give their memory to others
  }
}
