"""State belongs to the object that made it: objects with state, and calls with keys, on one communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

LOSSY = "minmax2+ef"


def values(rank: int, step: int, scale: float) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(500, np.float32) * np.float32(scale)


def error_of_sums(comm: qccl.Communicator, reduce: Callable[[np.ndarray], Any], scale: float, steps: int = 12):
    """A generator that takes a step each time; at the end it returns |sum of results - sum of means| / |sum of means|.

    With error feedback that is below 1, whatever the codec; residuals of other arrays of other scales make it large.
    """
    total = wanted = np.zeros(500)
    for step in range(steps):
        total = total + reduce(values(comm.rank, step, scale))
        wanted = wanted + sum(values(rank, step, scale) for rank in range(comm.size)) / comm.size
        yield None
    yield np.linalg.norm(total - wanted) / np.linalg.norm(wanted)


def in_turns(*runs: Any) -> list[float]:
    return [found[-1] for found in zip(*zip(*runs, strict=True), strict=True)]


def test_two_objects_that_were_given_no_key() -> None:
    def run(comm: qccl.Communicator) -> list[str]:
        def made() -> Callable[[np.ndarray], Any]:
            params = np.zeros(500, np.float32)
            outer = qccl.DiLoCo(comm, params, codec=LOSSY, outer_lr=1, momentum=0)

            def reduce(change: np.ndarray) -> np.ndarray:
                before = outer.common[0].copy()
                params[...] = before - change
                return before - np.asarray(outer.step())

            return reduce

        errors = in_turns(error_of_sums(comm, made(), 100), error_of_sums(comm, made(), 0.01))
        assert max(errors) < 1, errors
        return [*comm.state_dict()["keys"]]

    assert qccl.run_ranks(2, run) == 2 * [["diloco 0 float32", "diloco#2 0 float32"]]


def test_state_of_an_earlier_run_waits_for_its_owner() -> None:
    """Objects that are made in the same order have their state again."""

    def train(comm: qccl.Communicator, saved: Any) -> tuple[bytes, Any]:
        if saved is not None:
            comm.load_state_dict(saved[comm.rank])
        found = []
        for scale in (100, 0.01):
            params = np.zeros(500, np.float32)
            outer = qccl.DiLoCo(comm, params, codec=LOSSY)
            params -= values(comm.rank, 0, scale)
            found.append(np.asarray(outer.step()).tobytes())
        return b"".join(found), comm.state_dict()

    first = qccl.run_ranks(2, lambda comm: train(comm, None))
    second = qccl.run_ranks(2, lambda comm: train(comm, [state for _, state in first]))
    fresh = qccl.run_ranks(2, lambda comm: train(comm, None))
    assert first[0][0] == fresh[0][0] != second[0][0] == second[1][0]


@on_ranks(2)
def test_a_key_has_one_owner_until_close(comm: qccl.Communicator) -> None:
    params, x = np.ones(500, np.float32), np.ones(500, np.float32)
    first = qccl.DiLoCo(comm, params, codec=LOSSY, key="a")
    with pytest.raises(qccl.ArgumentError, match=r"key='a' cannot name .* a DiLoCo with key='a' exists"):
        qccl.DiLoCo(comm, params.copy(), codec=LOSSY, key="a")
    with pytest.raises(qccl.ArgumentError, match="key='a 0'"):  # it begins keys of the first one
        qccl.DiLoCo(comm, params.copy(), codec=LOSSY, key="a 0")
    qccl.DiLoCo(comm, params.copy(), codec=LOSSY, key="a0")
    qccl.DiLoCo(comm, params.copy(), codec="none", key="a")  # has no state
    first.step()
    with pytest.raises(qccl.ArgumentError, match="belongs to a DiLoCo with key='a'; give this call another key"):
        comm.quantized_allreduce_coalesced([x], op="avg", codec=LOSSY, key="a 0 float32")
    first.close()
    with pytest.raises(qccl.ArgumentError, match="this DiLoCo is closed"):
        first.step()
    assert not comm.state_dict()["keys"]
    comm.quantized_allreduce(x, codec=LOSSY, key="a")
    with pytest.raises(qccl.ArgumentError, match=r"calls have used key='a' before; .* reset\('a'\)"):
        qccl.DiLoCo(comm, params, codec=LOSSY, key="a")
    comm.reset("a")
    qccl.DiLoCo(comm, params, codec=LOSSY, key="a").step()


@on_ranks(2)
def test_a_refused_object_leaves_its_key(comm: qccl.Communicator) -> None:
    params = np.ones(5, np.float32)
    with pytest.raises(qccl.MismatchError, match="here its key is 'a'"):
        qccl.DiLoCo(comm, params, codec=LOSSY, key="a", outer_lr=1 + comm.rank)
    qccl.DiLoCo(comm, params, codec=LOSSY, key="a").step()


@on_ranks(2)
def test_an_object_keeps_its_key_on_another_communicator(comm: qccl.Communicator) -> None:
    params = [np.ones(500, np.float32) for _ in range(2)]
    both = [qccl.DiLoCo(comm, each, codec=LOSSY) for each in params]
    sub = comm.split(0)
    for outer in both:
        outer.step()
        outer.continue_on(sub)
        outer.step()
        outer.continue_on(sub)  # does nothing: it has the keys already
    assert [*sub.state_dict()["keys"]] == ["diloco 0 float32", "diloco#2 0 float32"]
    assert not comm.state_dict()["keys"]
    qccl.DiLoCo(comm, params[0], codec=LOSSY, key="diloco")
    sub.close()
