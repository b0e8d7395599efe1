"""A run that goes on from a state_dict() gives the bits that it would have given: random numbers go on, too."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl


def steps(comm: qccl.Communicator, codec: str, first: int, stop: int) -> list[bytes]:
    found = []
    for step in range(first, stop):
        x = np.random.default_rng([comm.rank, step]).standard_normal(3000).astype(np.float32)
        found.append(comm.quantized_allreduce(x, codec=codec, key="x", algorithm="two_round").tobytes())
    return found


@on_ranks(2)
def test_a_rank_that_does_not_load_is_noticed_where_it_matters(comm: qccl.Communicator) -> None:
    """The receivers of a sparse code derive its elements from the number of the call."""
    steps(comm, "minmax8", 0, 2)
    if comm.rank:
        comm.load_state_dict(comm.state_dict() | {"calls": 9})
    steps(comm, "minmax8", 2, 4)  # draws nothing
    with pytest.raises(qccl.MismatchError, match=r"randomk.*\+7 calls|\+7 calls.*randomk"):
        steps(comm, "randomk:k=0.1", 4, 5)


@on_ranks(2)
def test_plans_that_were_made_before_go_on_too(comm: qccl.Communicator) -> None:
    codec, x = "dithering:k=1,seed=3", np.random.default_rng(comm.rank).standard_normal(500).astype(np.float32)
    plan = comm.plan("allreduce", 500, codec=codec)
    saved = comm.state_dict()
    first = [plan(x, np.empty_like(x)).tobytes() for _ in range(3)]
    comm.load_state_dict(saved)
    assert [plan(x, np.empty_like(x)).tobytes() for _ in range(3)] == first
    assert len(set(first)) == 3


def test_plans_that_were_bound_before_compare_the_number_too() -> None:
    """Whether a rank binds its arrays before it loads a state or afterwards; and a rank that loads none is told."""

    def call(comm: qccl.Communicator, loads: bool) -> None:
        codec, x = "dithering:k=1,seed=3", np.ones(500, np.float32)
        early, late = (comm.plan("allreduce", 500, codec=codec) for _ in range(2))
        early.bind(x)
        if comm.rank:
            late.bind(x)
        comm.load_state_dict(comm.state_dict() | {"calls": 7})
        late.bind(x)
        for plan in (early, late):
            plan.run()
            plan.start().wait()
        if loads or comm.rank:
            comm.load_state_dict(comm.state_dict() | {"calls": 90})
        early.run()

    qccl.run_ranks(2, lambda comm: call(comm, True))
    with pytest.raises(qccl.MismatchError, match=r"\+7 calls.*\+86 calls|\+86 calls.*\+7 calls"):
        qccl.run_ranks(2, lambda comm: call(comm, False))


@on_ranks(2)
def test_state_moves_when_the_calls_that_use_it_have_ended(comm: qccl.Communicator) -> None:
    """The call that takes it over waits for them: here rank 0's, until rank 1 makes it."""
    x = np.random.default_rng(comm.rank).standard_normal(3000).astype(np.float32)

    def call(key: str, **options: bool) -> Any:
        return comm.quantized_allreduce(x, np.empty_like(x), codec="minmax2+ef", key=key, **options)

    def moved(late: bool) -> bytes:
        call("a")
        places = {"weight": [(name, 0, each.count) for name, each in comm.state.entries["a"].memory.items()]}
        time.sleep(0.2 * late * comm.rank)
        work = call("a", async_op=True)
        if not late:
            work.wait()
        comm.state.expect("b", places, {"a": places})
        found = call("b").tobytes()
        work.wait()
        comm.reset()
        return found

    assert moved(late=True) == moved(late=False)


def test_after_a_failure_calls_are_those_that_ended_well() -> None:
    """Whether a rank was in the call that failed or had not made it yet: all go on from the same number."""
    found: dict[int, int] = {}

    def call(comm: qccl.Communicator) -> None:
        steps(comm, "dithering:k=3", 0, 2)
        try:
            if comm.rank == 0:
                comm.quantized_allreduce(np.ones(100, np.float32), timeout=0.2)
            else:
                comm.barrier()
        finally:
            found[comm.rank] = comm.state_dict()["calls"]

    with pytest.raises(qccl.QcclError):
        qccl.run_ranks(2, call)
    assert found == {0: 2, 1: 2}
