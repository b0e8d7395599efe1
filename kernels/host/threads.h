// Shares the buckets of an operation among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernel_args.h"

namespace qccl {

// Elements that are worth a thread: waking it takes some microseconds.
constexpr std::uint64_t kElementsPerThread = 1 << 16;

// run(part) once for each part below `parts`, on this thread and on helpers. Returns when all calls have returned; what
// one of them throws is thrown here. Any number of threads may call it, also in the child of a fork.
void run_parts(std::uint64_t parts, const std::function<void(std::uint64_t)>& run);

// run(range) until all buckets of `count` elements are done, by up to `threads` threads.
template <class Run>
void share(std::uint64_t count, std::uint64_t bucket, std::uint32_t threads, const Run& run) {
  const std::uint64_t buckets = (count - 1) / bucket + 1;
  const std::uint64_t some = std::min<std::uint64_t>({threads, buckets, count / kElementsPerThread});
  if (some <= 1) return run(BucketRange{0, buckets});
  run_parts(some, [&](std::uint64_t part) { run(BucketRange{buckets * part / some, buckets * (part + 1) / some}); });
}

}  // namespace qccl
