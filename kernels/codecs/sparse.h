// The number of elements that the sparse codecs keep.
#pragma once

#include "../shared/bucket.h"

namespace QCCL_NAMESPACE {

// Elements that are kept of n. The options: how many of a whole block, and whether a shorter block keeps the same fraction
// (1) or as many (0).
QCCL_FN u64 kept(const BucketOptions& options, u64 n) {
  const u64 most = options.options[0];
  if (options.options[1]) return (most * n + options.bucket - 1) / options.bucket;
  return most < n ? most : n;
}

}  // namespace QCCL_NAMESPACE
