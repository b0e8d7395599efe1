"""Calls of the set-up kind: barrier(), allgather() and split() among other calls, and who gave up or left."""

from __future__ import annotations

import time

import numpy as np
import pytest

import qccl
from qccl.errors import MismatchError, PeerLost

SET_UP = {"barrier": lambda c: c.barrier(), "allgather": lambda c: c.allgather(b"1"), "split": lambda c: c.split(0)}


@pytest.mark.parametrize("what", SET_UP)
def test_a_set_up_call_hears_who_gave_up(what):
    def run(comm):
        if comm.rank == 2:
            time.sleep(0.2)
            comm.abort("out of paper")
            return None
        with pytest.raises(PeerLost, match="out of paper"):  # not the timeout
            SET_UP[what](comm)
        with pytest.raises(PeerLost, match="failed earlier"):
            SET_UP[what](comm)
        return None

    qccl.run_ranks(3, run)


@pytest.mark.parametrize("what", SET_UP)
def test_a_set_up_call_misses_who_left(what):
    def run(comm):
        if comm.rank == 1:
            return comm.close()
        with pytest.raises(
            PeerLost, match=rf"rank 1 has closed its communicator, and rank \d called {what}\(\)|gave up"
        ):
            SET_UP[what](comm)
        return None

    qccl.run_ranks(3, run, timeout=20)


def test_set_up_calls_have_their_place_among_the_others():
    def run(comm):
        x = np.ones(100, np.float32)
        comm.barrier() if comm.rank else comm.quantized_allreduce(x)

    with pytest.raises(MismatchError, match=r"rank 1 called barrier\(\)|rank 0 called allreduce"):
        qccl.run_ranks(2, run, timeout=20)


def test_calls_under_way_progress_in_set_up_calls():
    def run(comm):
        x = np.ones(300_000, np.float32)
        plan = comm.plan("allreduce", x.size).bind(x)
        comm._session.engine._progress_thread = None  # nobody else drives it
        work = plan.start()
        if comm.rank:
            work.wait()
        comm.barrier()
        assert comm.allgather(bytes([comm.rank])) == [b"\0", b"\1"]
        work.wait()
        return (x == 2).all()

    assert qccl.run_ranks(2, run, timeout=20) == [True, True]


def test_set_up_calls_change_no_random_numbers():
    def run(comm, more):
        x = (np.arange(5000) % 256 + comm.rank).astype(np.float32)
        found = []
        for _ in range(2):
            found.append(comm.quantized_allreduce(x, np.empty_like(x), codec="minmax2:rounding=stochastic").tobytes())
            if more:
                comm.barrier()
        return found

    found = qccl.run_ranks(2, lambda c: run(c, True))
    assert found == qccl.run_ranks(2, lambda c: run(c, False))
    assert found[0][0] != found[0][1]
