// Where the codes and the ranges of one call of the min-max codec lie on the wire: the codes of all buckets, zeros to a
// multiple of four bytes, then (low, high) of each bucket.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// Bytes of n packed codes.
QCCL_FN u64 packed_nbytes(u64 n, u32 bits) { return n / 8 * bits + (n % 8 * bits + 7) / 8; }

// Where the codes from `element` on begin; it is a multiple of eight, as the first of a bucket always is.
QCCL_FN u64 minmax_code_offset(u64 element, u32 bits) { return element / 8 * bits; }

QCCL_FN u64 minmax_range_offset(u64 count, u32 bits) { return (packed_nbytes(count, bits) + 3) / 4 * 4; }

}  // namespace QCCL_NAMESPACE
