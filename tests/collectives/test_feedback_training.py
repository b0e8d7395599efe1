"""The purpose of error feedback: training as good as without compression."""

from __future__ import annotations

import numpy as np
import pytest

import qccl

FEATURES, SAMPLES, WORKERS = 500, 250, 4


def problem() -> tuple[np.ndarray, np.ndarray]:
    """Noisy least squares: inputs and targets of all workers, whose samples have different centres."""
    rng = np.random.default_rng(5)
    centres = 0.5 * rng.standard_normal((WORKERS, 1, FEATURES))
    inputs = (rng.standard_normal((WORKERS, SAMPLES, FEATURES)) + centres) / np.sqrt(FEATURES)
    targets = inputs @ rng.standard_normal(FEATURES) + 0.1 * rng.standard_normal((WORKERS, SAMPLES))
    return inputs.astype(np.float32), targets.astype(np.float32)


def loss(w: np.ndarray) -> float:
    inputs, targets = problem()
    return float(np.mean((inputs.astype(np.float64) @ w - targets) ** 2)) + 1e-3 * float(w @ w)


def optimum() -> float:
    """The minimum of the loss."""
    inputs, targets = (a.reshape(-1, *a.shape[2:]).astype(np.float64) for a in problem())
    matrix = inputs.T @ inputs / len(targets) + 1e-3 * np.eye(FEATURES)
    return loss(np.linalg.solve(matrix, inputs.T @ targets / len(targets)))


def train(comm: qccl.Communicator, codec: str, rate: float, steps: int) -> np.ndarray:
    """Gradient descent with minibatches of half of the samples and a rate that decays to a hundredth."""
    inputs, targets = (a[comm.rank] for a in problem())
    rng = np.random.default_rng(comm.rank)
    w = np.zeros(FEATURES, np.float32)
    for step in range(steps):
        chosen = rng.integers(0, SAMPLES, SAMPLES // 2)
        x, lr = inputs[chosen], np.float32(rate * 0.01 ** (step / steps))
        gradient = 2 * (x.T @ (x @ w - targets[chosen])) / len(chosen) + np.float32(2e-3) * w
        w -= lr * comm.quantized_allreduce(gradient, codec=codec, key="w", op="avg", lr=float(lr))
    return w


@pytest.mark.parametrize(
    "codec, rate, steps",
    [
        ("none", 5.0, 600),
        ("onebit:bucket=128,reconstruct=scale+ef", 5.0, 600),
        pytest.param("onebit+ef", 5.0, 1500, marks=pytest.mark.slow),
        ("topk:k=0.01+ef+nesterov", 1.0, 600),
        ("dithering:k=3", 5.0, 600),
    ],
)
def test_training_reaches_the_optimum(codec, rate, steps):
    """The loss comes within 1% of the optimum, relative to the start, as without a codec."""
    weights = qccl.run_ranks(WORKERS, lambda comm: train(comm, codec, rate, steps))
    assert all(np.array_equal(w, weights[0]) for w in weights)
    least, start = optimum(), loss(np.zeros(FEATURES))
    assert (loss(weights[0].astype(np.float64)) - least) / (start - least) < 0.01


def test_top_k_alone_does_not() -> None:
    weights = qccl.run_ranks(WORKERS, lambda comm: train(comm, "topk:k=0.01+nesterov", 1.0, 300))
    least, start = optimum(), loss(np.zeros(FEATURES))
    assert (loss(weights[0].astype(np.float64)) - least) / (start - least) > 0.1
