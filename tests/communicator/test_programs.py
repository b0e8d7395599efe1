"""The programs that a communicator keeps for its collectives: how many, and which it drops."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.communicator import programs


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def counts(comm) -> list[int]:
    """The numbers of elements of the collectives that have programs."""
    return [compiled.spec.count for compiled in comm._session.programs]


def any_is_busy(comm) -> bool:
    return any(compiled.is_busy for compiled in comm._session.programs)


def test_many_calls_in_flight_share_the_programs_of_their_collective():
    """No call compiles one of its own, whatever the order in which the ranks wait. Rank 1 begins late."""
    has_begun = threading.Event()

    def run(comm):
        arrays = [np.full(500, i + comm.rank, np.float32) for i in range(100)]
        works = []
        for i, x in enumerate(arrays):
            if i == 16 and comm.rank == 0:
                has_begun.set()
            elif i == 0 and comm.rank == 1:
                assert has_begun.wait(20)
            works.append(comm.quantized_allreduce(x, codec="none", async_op=True))
        for work in works if comm.rank else reversed(works):
            work.wait(timeout=20)
        assert all((x == 2 * i + 1).all() for i, x in enumerate(arrays))
        (compiled,) = comm._session.programs
        return len(compiled.programs), compiled.is_busy

    (first, first_busy), (second, second_busy) = qccl.run_ranks(2, run)
    assert first == 16 and 1 <= second <= 16 and not (first_busy or second_busy)


@on_ranks(1)
def test_refused_calls_leave_no_program_busy(comm):
    """Nor a number taken: refused by their arrays, their key or their rate, or by the engine."""
    x = ones(64)
    state = {"codec": "minmax4+ef", "key": "k"}
    comm.quantized_allreduce(x, **state)
    for _ in range(20):
        with pytest.raises(InvalidBufferError, match="overlap"):
            comm.quantized_allreduce(x[:-1], x[1:])
        with pytest.raises(ArgumentError, match="state under key='k' belongs to"):
            comm.quantized_allreduce(x[1:], **state)
        with pytest.raises(ArgumentError, match="without lr"):
            comm.quantized_allreduce(x, **state, lr=0.5)
        with pytest.raises(ArgumentError, match="lr must be"):
            comm.quantized_allreduce(x, **state, lr=-1.0)
    assert comm.calls == comm._session.numbers.sequence == 1 and not comm._session.unsettled
    comm.quantized_allreduce(x, **state)
    assert ([len(compiled.programs) for compiled in comm._session.programs], any_is_busy(comm)) == ([1, 1], False)


def test_programs_of_calls_under_way_are_kept(monkeypatch):
    """Whatever their number; of the others, those that were used longest ago are dropped."""
    monkeypatch.setattr(programs, "CACHE_COLLECTIVES", 3)
    looked = threading.Event()

    def run(comm):
        arrays = [ones(count) for count in range(1, 12)]
        if comm.rank:
            assert looked.wait(20)
        works = [comm.quantized_allreduce(x, async_op=True) for x in arrays]
        if not comm.rank:
            assert counts(comm) == list(range(1, 12))
            looked.set()
        for work in works:
            work.wait(timeout=20)
        assert all((x == 2).all() for x in arrays) and not any_is_busy(comm)
        comm.quantized_allreduce(arrays[9])
        comm.quantized_allreduce(ones(12))
        return sorted(counts(comm))

    assert qccl.run_ranks(2, run) == [[10, 11, 12]] * 2


def test_the_program_that_repeats_is_kept(monkeypatch):
    monkeypatch.setattr(programs, "CACHE_COLLECTIVES", 2)

    def run(comm):
        x = ones(300)
        comm.quantized_allreduce(x)
        kept = next(iter(comm._session.programs))
        for count in range(1, 6):
            comm.quantized_allreduce(ones(count))
            comm.quantized_allreduce(x)
            assert kept in comm._session.programs and len([*comm._session.programs]) == 2

    qccl.run_ranks(1, run)


def test_programs_that_are_dropped_and_made_again(monkeypatch):
    monkeypatch.setattr(programs, "CACHE_COLLECTIVES", 1)

    def run(comm):
        arrays = [ones(count) for count in (10, 20)]
        for i in range(4):
            for x in arrays:
                assert (comm.quantized_allreduce(x, codec="none") == 2 ** (i + 1)).all()
                comm.quantized_allreduce(np.zeros(30 + i, np.float32))

    qccl.run_ranks(2, run)


def test_too_much_workspace_is_given_back(monkeypatch):
    """But that of calls under way, and of the last call."""
    monkeypatch.setattr(programs, "CACHE_NBYTES", 1)
    looked = threading.Event()

    def run(comm):
        arrays = [ones(1), ones(2)]
        if comm.rank:
            assert looked.wait(20)
        works = [comm.quantized_allreduce(x, async_op=True) for x in arrays]
        if not comm.rank:
            assert counts(comm) == [1, 2]
            looked.set()
        for work in works:
            work.wait(timeout=20)
        comm.quantized_allreduce(ones(3))
        assert counts(comm) == [3]
        comm.quantized_allreduce(ones(4))
        nbytes = next(iter(comm._session.programs)).programs[0].workspace_nbytes
        return counts(comm), comm._session.programs.nbytes == nbytes

    assert qccl.run_ranks(2, run) == [([4], True)] * 2


@on_ranks(2)
def test_a_call_may_be_waited_for_after_its_programs_were_dropped(comm):
    x, y = ones(64), ones(64)
    first = comm.quantized_allreduce(x, async_op=True)
    comm.load_state_dict(comm.state_dict())  # drops all programs
    second = comm.quantized_allreduce(y, async_op=True)
    for work in (first, second):
        work.wait(timeout=20)
    (compiled,) = comm._session.programs
    assert (x[0], y[0], len(compiled.programs), compiled.is_busy) == (2, 2, 1, False)
