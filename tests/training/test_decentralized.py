"""Decentralised SGD in low precision: as good as in full precision, what its formulas say, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from sent_bytes import count_sent
from thread_ranks import on_ranks

import qccl
from qccl.codecs import get
from qccl.training.weights import matrix

RANKS, STEPS, LR, COUNT = 8, 300, 0.1, 650


class Quadratic:
    """A loss whose minimum is another one on each rank: ``slopes`` times the squared distance from ``targets``."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.slopes = draw.uniform(0.2, 1, (RANKS, COUNT)).astype(np.float32)
        self.targets = draw.standard_normal((RANKS, COUNT), np.float32)
        self.best = (self.slopes * self.targets).sum(axis=0) / self.slopes.sum(axis=0)

    def gradient(self, model: np.ndarray, rank: int) -> np.ndarray:
        return self.slopes[rank] * (model - self.targets[rank])


def decentralised(task: Quadratic, codec: str) -> tuple[np.ndarray, int]:
    """The models of all ranks, and the bytes that one sent."""

    def run(comm: qccl.Communicator) -> tuple[np.ndarray, int, dict[int, np.ndarray]]:
        sent = count_sent(comm)
        sgd = qccl.LowPrecisionDecentralized(comm, np.zeros(COUNT, np.float32), codec=codec)
        for _ in range(STEPS):
            sgd.step(task.gradient(sgd.model, comm.rank), LR)
        return sgd.model, sum(sent), sgd.replicas

    found = qccl.run_ranks(RANKS, run)
    for _, _, replicas in found:
        assert len(replicas) == 2
        for peer, replica in replicas.items():
            assert replica.tobytes() == found[peer][0].tobytes()
    return np.stack([model for model, _, _ in found]), found[0][1]


def naive(task: Quadratic, codec: str) -> np.ndarray:
    """Decentralised SGD whose ranks send each other the codes of their models."""
    code, weights = get(codec), matrix("ring", RANKS)
    models = np.zeros((RANKS, COUNT), np.float32)
    for _ in range(STEPS):
        seen = np.stack([code.decode(code.encode(model), model.size, "float32") for model in models])
        gradients = np.stack([task.gradient(model, rank) for rank, model in enumerate(models)])
        models = (weights @ seen).astype(np.float32) - LR * gradients
    return models


def test_low_precision_is_as_good_and_the_naive_way_is_not() -> None:
    task = Quadratic()
    full, full_bytes = decentralised(task, "none")
    low, low_bytes = decentralised(task, "minmax8")

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(task.best))

    assert distance(full.mean(axis=0), task.best) < 0.1  # of 1 at the start: it has learned
    assert max(map(distance, low, full)) < 1e-3
    assert low_bytes <= 0.27 * full_bytes
    assert distance(naive(task, "minmax8").mean(axis=0), full.mean(axis=0)) > 2e-2


def test_a_step_is_what_the_formulas_say() -> None:
    """Models that start apart; full precision, against the formulas in double precision."""
    n, weights = 4, [[0.5, 0.3, 0.2, 0], [0.3, 0.4, 0, 0.3], [0.2, 0, 0.8, 0], [0, 0.3, 0, 0.7]]
    rng = np.random.default_rng(0)
    models, gradients = rng.standard_normal((2, n, 50)).astype(np.float32)

    def run(comm: qccl.Communicator) -> np.ndarray:
        sgd = qccl.LowPrecisionDecentralized(comm, models[comm.rank].copy(), weights=weights, codec="none")
        assert sgd.peers == tuple(p for p in range(n) if weights[comm.rank][p] and p != comm.rank)
        assert sgd.spectral_gap == pytest.approx(1 - np.sort(np.abs(np.linalg.eigvalsh(np.array(weights))))[-2])
        for peer, replica in sgd.replicas.items():
            assert replica.tobytes() == models[peer].tobytes()
        return sgd.step(gradients[comm.rank], 0.25)

    wanted = np.array(weights) @ models.astype(np.float64) - 0.25 * gradients
    np.testing.assert_allclose(np.stack(qccl.run_ranks(n, run)), wanted, atol=1e-5)


@on_ranks(3)
def test_states_that_do_not_fit(comm: qccl.Communicator) -> None:
    other = qccl.LowPrecisionDecentralized(comm, np.ones((5, 7), np.float32))
    state = other.state_dict()
    with pytest.raises(qccl.ArgumentError, match=r"replicas of ranks \[7\]"):
        other.load_state_dict(state | {"replicas": {7: state["model"]}})
    for array in (state["model"][:, :1], state["model"].astype(np.complex64), [1.0]):
        with pytest.raises(qccl.ArgumentError, match=r"the model has \(\(5, 7\), dtype\('float32'\)\)"):
            other.load_state_dict(state | {"model": array})
    for wrong in ({"replicas": [7]}, {"steps": -1}, {"steps": None}):
        with pytest.raises(qccl.ArgumentError, match="the state"):
            other.load_state_dict(state | {"model": state["model"] + 1} | wrong)
    assert (other.model == 1).all() and other.steps == 0


def test_weights_within_the_tolerance_and_a_rate_of_numpys() -> None:
    """An entry that is 0 in one half of the matrix alone is an edge for both; a float64 makes no arrays float64."""

    def run(comm: qccl.Communicator) -> tuple[int, ...]:
        weights = [[1.0, 1e-7], [0.0, 1.0]]
        sgd = qccl.LowPrecisionDecentralized(comm, np.ones(5, np.float32), weights=weights, codec="none")
        np.testing.assert_allclose(sgd.step(np.ones(5, np.float32), np.float64(0.5)), 0.5, rtol=1e-6)
        return sgd.peers

    assert qccl.run_ranks(2, run) == [(1,), (0,)]


@on_ranks(2)
def test_refused(comm: qccl.Communicator) -> None:
    model = np.ones(5, np.float32)
    with pytest.raises(qccl.ArgumentError, match=r"row 1 of the weights sums to 0\.9"):
        qccl.LowPrecisionDecentralized(comm, model, weights=[[0.5, 0.5], [0.5, 0.4]])
    with pytest.raises(qccl.MismatchError, match=r"ranks \[1\] have other weights"):
        qccl.LowPrecisionDecentralized(comm, model, codec="minmax8" if comm.rank else "minmax4")
    sgd = qccl.LowPrecisionDecentralized(comm, model)
    for gradient in (np.ones(4, np.float32), np.ones(5), [1.0] * 5, None):
        with pytest.raises(
            qccl.ArgumentError, match=r"gradient has the shape and type \(.*, and the model has \(\(5,\), dtype"
        ):
            sgd.step(gradient, 0.1)
    for lr in (float("nan"), np.float32("inf"), "0.1", None):
        with pytest.raises(qccl.ArgumentError, match="lr must be a finite number"):
            sgd.step(np.ones(5, np.float32), lr)
    for wrong, message in (
        ([1.0], "the model must be an array .* not list"),
        (np.ones(5), "the model has element type float64"),
        (np.broadcast_to(np.float32(1), (5,)), "the model is not contiguous"),
        (np.frombuffer(bytes(20), np.float32), "the model is read-only"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            qccl.LowPrecisionDecentralized(comm, wrong)
    with pytest.raises(qccl.ArgumentError, match=r"without \+ef and \+nesterov, not onebit\+ef.*use onebit"):
        qccl.LowPrecisionDecentralized(comm, model, codec="onebit+ef")
    with pytest.raises(qccl.ArgumentError, match="a state is the dict that"):
        sgd.load_state_dict({})
    assert (model == 1).all() and sgd.steps == 0
