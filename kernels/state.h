// What a Reduce remembers from call to call, element by element. All arithmetic is fp32, each operation rounded.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// The momentum after a call with the own value x, and what takes the value's place (Nesterov's).
QCCL_FN float next_momentum(float mu, float momentum, float x) { return mu * momentum + x; }
QCCL_FN float with_momentum(float mu, float next, float x) { return x + mu * next; }

// The total with what earlier codes left out, and what this one, which stands for `decoded`, leaves out. Residuals are
// kept times the learning rate, so that they count for what they did when they arose.
QCCL_FN float with_residual(float total, float residual, float inverse_lr) { return total + residual * inverse_lr; }

// What is too large to be kept is forgotten: an infinite residual would spoil all calls to come.
QCCL_FN float next_residual(float total, float decoded, float lr) {
  const float left = (total - decoded) * lr;
  return (bits_of(left) & 0x7f800000u) == 0x7f800000u ? 0.0f : left;
}

}  // namespace QCCL_NAMESPACE
