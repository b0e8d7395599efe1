// The loops of low-rank compression: plain data and functions, the same in every instruction set's build.
#pragma once

#include <cstdint>

#include "kernel_args.h"

namespace qccl {

// Doubles from one row of a working matrix to the next: whole vectors, and not a power of two, whose rows would share the
// places of a cache.
inline std::uint64_t row_stride(std::uint64_t columns) { return (columns + 7) / 8 * 8 + 8; }

// `out` (rows x columns) becomes the product of p (rows x rank) and q (rank x columns); rank is 1 or more.
struct OuterSumArgs {
  const float *p, *q;
  float* out;
  std::uint64_t rank, rows, columns;
};

struct FactorLoops {
  // `scratch` has doubles for `rows` factors and `rows` rows.
  void (*orthonormal_rows)(const float* given, float* out, std::uint64_t rows, std::uint64_t columns, std::uint64_t seed,
                           double* scratch);
  // Some rows of `out`; `scratch` has floats for q with a multiple of sixteen columns.
  void (*outer_sum)(const OuterSumArgs&, const BucketRange& rows, float* scratch);
};

}  // namespace qccl
