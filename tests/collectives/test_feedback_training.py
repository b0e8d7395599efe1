"""The purpose of error feedback: means that become exact, and training as good as without compression."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

import qccl

RANKS, COUNT = 3, 512

#: codec, and the steps that its residuals need to become as large as they get
CODECS = [
    ("onebit:bucket=64,reconstruct=scale+ef", 200),
    ("onebit:bucket=128,reconstruct=mean+ef", 200),
    ("minmax2:bucket=64+ef", 50),
    ("topk:k=0.1,block=128+ef", 200),
]


def constant(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)


def errors(codec: str, algorithm: str, times: Sequence[int], op: str = "sum") -> dict[int, float]:
    """The running mean's relative error after each number of steps with the same inputs."""
    inputs = [constant(rank) for rank in range(RANKS)]
    exact = sum(x.astype(np.float64) for x in inputs) / (RANKS if op == "avg" else 1)

    def calls(comm: qccl.Communicator) -> dict[int, float]:
        total, found = np.zeros(COUNT), {}
        for step in range(1, max(times) + 1):
            x = inputs[comm.rank].copy()
            total += comm.quantized_allreduce(x, codec=codec, key="x", algorithm=algorithm, op=op)
            if step in times:
                found[step] = float(np.linalg.norm(total / step - exact) / np.linalg.norm(exact))
        return found

    found = qccl.run_ranks(RANKS, calls)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("codec, settled", CODECS)
def test_the_running_mean_becomes_exact_like_one_over_steps(codec, settled, algorithm):
    """After T steps only the residuals, which do not grow, have not been sent, so the mean's error is 1/T of them."""
    early, late = errors(codec, algorithm, (settled, 6 * settled)).values()
    assert late < 1.5 * early / 6
    assert late < 12 / (6 * settled)


def test_codes_of_plus_and_minus_one_average_to_what_lies_between(monkeypatch):
    """If codes always decode to 1 or -1, residuals stay bounded for values between them."""
    monkeypatch.setattr(
        sys.modules[__name__], "constant", lambda rank: np.linspace(-1, 1, COUNT, dtype="f4") ** (rank + 1)
    )
    found = errors("onebit+ef", "two_round", (100, 600), op="avg")
    assert found[600] < 1.5 * found[100] / 6


# -- training ----------------------------------------------------------------------------------------------------------

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
