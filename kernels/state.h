// Error feedback and momentum of one element. All arithmetic is fp32, each operation rounded.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// Nesterov momentum: the momentum after a call with the own value x, and the value that replaces x.
QCCL_FN float next_momentum(float mu, float momentum, float x) { return mu * momentum + x; }
QCCL_FN float with_momentum(float mu, float next, float x) { return x + mu * next; }

// Error feedback: the total plus the residual of earlier calls, and the residual that this call leaves. Residuals are
// stored times the learning rate of their call, so a later change of the rate does not rescale them.
QCCL_FN float with_residual(float total, float residual, float inverse_lr) { return total + residual * inverse_lr; }

// A residual that is not finite becomes 0, because it would make all later calls infinite or NaN.
QCCL_FN float next_residual(float total, float decoded, float lr) {
  const float left = (total - decoded) * lr;
  return (bits_of(left) & 0x7f800000u) == 0x7f800000u ? 0.0f : left;
}

}  // namespace QCCL_NAMESPACE
