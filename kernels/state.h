// Error feedback and momentum of one element. All arithmetic is fp32, each operation rounded.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// What a call stores of its new state: 0 in place of infinity and NaN, which would spoil all later calls.
QCCL_FN float finite_or_zero(float value) { return is_finite(value) ? value : 0.0f; }

// Nesterov momentum: the momentum after a call with the own value x, and the value that replaces x.
QCCL_FN float next_momentum(float mu, float momentum, float x) { return mu * momentum + x; }
QCCL_FN float with_momentum(float mu, float next, float x) { return x + mu * next; }

// Error feedback: the total plus the residual of earlier calls, and the residual that this call leaves. Residuals are
// stored times the learning rate of their call, so a later change of the rate does not rescale them.
QCCL_FN float with_residual(float total, float residual, float inverse_lr) { return total + residual * inverse_lr; }

QCCL_FN float next_residual(float total, float decoded, float lr) { return finite_or_zero((total - decoded) * lr); }

}  // namespace QCCL_NAMESPACE
