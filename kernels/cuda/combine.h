// How a reduction combines two terms.
#pragma once

#include "../shared/numeric.h"

namespace QCCL_NAMESPACE {

enum class Combine { sum, min, max };

// acc (op) x. The result is NaN if either is; of equal values acc stays.
template <Combine Op>
QCCL_FN float combine(float acc, float x) {
  if constexpr (Op == Combine::sum) return acc + x;
  if constexpr (Op == Combine::min) return (x < acc) | is_nan(x) ? x : acc;
  return (x > acc) | is_nan(x) ? x : acc;
}

// The neutral element: combining it with a term gives the term.
template <Combine Op>
QCCL_FN float neutral() {
  return Op == Combine::sum ? -0.0f : float_of(Op == Combine::min ? 0x7f800000u : 0xff800000u);
}

}  // namespace QCCL_NAMESPACE
