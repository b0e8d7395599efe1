// Means of magnitudes or of values, from sums that neither overflow nor vanish.
#pragma once

#include "../bucket.h"

namespace QCCL_NAMESPACE {

// The power of two by which values are multiplied before they are added; `greatest` is their greatest magnitude().
QCCL_FN float sum_scale(i32 greatest) {
  return greatest >= 0x5f800000 ? 0x1p-64f : greatest < 0x1f800000 ? 0x1p64f : 1.0f;
}

// The mean of n values, 0 if there are none. The sum is that of the values times `pre`, their sum_scale(). The mean is clamped,
// because rounding must not exceed the greatest value.
QCCL_FN float mean_of(float sum, float n, float pre, i32 greatest) {
  const float mean = n > 0.0f ? sum / n : 0.0f, most = float_of((u32)greatest) * pre;
  return (mean > most ? most : mean < -most ? -most : mean) * (1.0f / pre);
}

}  // namespace QCCL_NAMESPACE
