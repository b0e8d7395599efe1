// The kernels with which every run begins and ends. They tell the host, through words in pinned memory (qccl/engine/cuda/flags.py),
// how far the runs are, so that the watchdog need not call CUDA; and a run that ends after a failure poisons its results.
#pragma once

#include "jobs.h"

namespace QCCL_NAMESPACE {

// The words: whether the communicator has failed, and the numbers of the runs that began and ended last.
struct Flags {
  u32 failed, begun, ended;
};

}  // namespace QCCL_NAMESPACE

// Stores the number of a call where Memory::call points, if `words` is not null: `value`, or in the replays of a graph
// `value` plus the number of replays before, which words[1] counts. The host does not watch replays.
extern "C" __global__ void qccl_begin(unsigned long long* words, unsigned long long value, unsigned replay,
                                      volatile qccl::Flags* flags, unsigned run) {
  if (words) words[0] = replay ? value + words[1]++ : value;
  if (!replay) flags->begun = run;
}

// Lowers `first` to the index of the first element that is NaN or infinite: all bits of `exponent` are set in it. Elements
// have 4 bytes, or 2. The grid has `blocks` blocks.
extern "C" __global__ void qccl_nonfinite(const void* values, unsigned long long count, unsigned itemsize,
                                          unsigned exponent, unsigned long long* first, unsigned blocks) {
  const unsigned long long step = (unsigned long long)blocks * qccl::kThreads;
  for (unsigned long long i = (unsigned long long)blockIdx.x * qccl::kThreads + threadIdx.x; i < count; i += step) {
    const unsigned bits = itemsize == 4 ? ((const qccl::u32*)values)[i] : ((const qccl::u16*)values)[i];
    if ((bits & exponent) != exponent) continue;
    atomicMin(first, i);
    return;
  }
}

// Stores addresses in the table Memory::more; a launch for every kAddresses of them.
extern "C" __global__ void qccl_addresses(unsigned long long* table, const __grid_constant__ qccl::Addresses addresses,
                                          unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += qccl::kThreads) table[i] = addresses.values[i];
}

// After a failure, fills all results with ones: NaN in every floating type. `nbytes` has the size
// of each of the buffers, 0 if it holds no result. One block of threads, so that one look at
// `failed` decides for all; it is set before the transfers are aborted.
extern "C" __global__ void qccl_end(qccl::Memory memory, const qccl::u64* nbytes, unsigned replay,
                                    volatile qccl::Flags* flags, unsigned run, unsigned buffers) {
  __shared__ bool failed;
  if (threadIdx.x == 0) failed = flags->failed;
  __syncthreads();
  for (qccl::u32 b = 0; failed && b < buffers; ++b) {
    for (qccl::u64 i = threadIdx.x; i < nbytes[b]; i += qccl::kThreads) base_of(memory, b)[i] = 0xff;
  }
  __syncthreads();
  if (threadIdx.x == 0 && !replay) {
    __threadfence_system();
    flags->ended = run;  // after all writes to the results: the host may then give their memory to others
  }
}
