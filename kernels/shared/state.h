// Error feedback and momentum of one element. All arithmetic is fp32, each operation rounded.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// A value of new state, or 0 in place of infinity and NaN, which would spoil all later calls.
QCCL_FN float finite_or_zero(float value) { return is_finite(value) ? value : 0.0f; }

// Nesterov momentum: the momentum after a call with the own value x, and the value that replaces x.
QCCL_FN float next_momentum(float mu, float momentum, float x) { return mu * momentum + x; }
QCCL_FN float with_momentum(float mu, float next, float x) { return x + mu * next; }

// Error feedback: the total plus the residual of earlier calls times `factor`, and the residual that this call leaves.
// Residuals are stored times the learning rate of their call, so a later change of the rate does not rescale them; `beta`
// is the decay from one call to the next. R is the element type that residuals are stored in.
QCCL_FN float residual_factor(float beta, float lr) { return beta * (1.0f / lr); }

QCCL_FN float with_residual(float total, float residual, float factor) { return total + residual * factor; }

template <class R>
QCCL_FN float next_residual(float total, float decoded, float lr) {
  return finite_or_zero(R::to_float(R::from_float((total - decoded) * lr)));
}

}  // namespace QCCL_NAMESPACE
