// Shares the buckets of an operation among threads.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>

#include "kernel_args.h"

namespace qccl {

// Elements that are worth a thread: starting and joining it takes some microseconds.
constexpr std::uint64_t kElementsPerThread = 1 << 16;

// Threads that an operation may have, by OMP_NUM_THREADS and this process's processors.
inline int most_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// run(range) until all buckets of `count` elements are done, by up to `threads` threads.
template <class Run>
void share(std::uint64_t count, std::uint64_t bucket, std::uint32_t threads, const Run& run) {
  const std::uint64_t buckets = (count - 1) / bucket + 1;
  const std::uint64_t some = std::min<std::uint64_t>({threads, buckets, count / kElementsPerThread});
#ifdef _OPENMP
  if (some > 1) {
#pragma omp parallel num_threads(static_cast<int>(some))
    {
      const auto mine = static_cast<std::uint64_t>(omp_get_thread_num());
      const auto all = static_cast<std::uint64_t>(omp_get_num_threads());  // may be fewer than requested
      run(BucketRange{buckets * mine / all, buckets * (mine + 1) / all});
    }
    return;
  }
#endif
  static_cast<void>(some);
  run(BucketRange{0, buckets});
}

}  // namespace qccl
