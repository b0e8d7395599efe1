"""The communicator: what it takes, what it returns, plans, calls under way, groups."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

COUNT = 5000


@on_ranks(2, timeout=20)
def test_the_timeout_of_calls(comm, missed: threading.Event):
    """It is that of run_ranks() or init(), until the program sets another one."""
    assert comm.timeout == 20
    comm.barrier()
    with pytest.raises(qccl.ArgumentError, match="timeout must be a positive number"):
        comm.timeout = 0
    comm.timeout = 0.2
    if comm.rank == 0:
        with pytest.raises(qccl.CollectiveTimeout):
            comm.quantized_allreduce(np.ones(10, np.float32))
        missed.set()
    else:
        assert missed.wait(60)


def test_split_sums_over_each_group():
    def run(comm):
        group = comm.split(comm.rank % 2, key=-comm.rank)
        x = np.full(100, 10.0**comm.rank, np.float32)
        group.quantized_allreduce(x)
        assert group.size == (3 if comm.rank % 2 == 0 else 2)
        assert group.rank == {0: 2, 2: 1, 4: 0, 1: 1, 3: 0}[comm.rank]
        none = comm.split(None if comm.rank else 0)
        assert (none is None) == bool(comm.rank)
        comm.quantized_allreduce(np.zeros(5, np.float32))  # the parent goes on
        return x[0]

    assert qccl.run_ranks(5, run) == [10101.0, 1010.0, 10101.0, 1010.0, 10101.0]


def test_one_rank_alone_gets_its_own_values():
    with qccl.init(backend="host") as comm:
        assert (comm.rank, comm.size, comm.backend) == (0, 1, "host")
        x = np.arange(COUNT, dtype=np.float32)
        out = np.empty_like(x)
        comm.quantized_allreduce(x, out=out)
        np.testing.assert_array_equal(out, x)
        assert comm.quantized_allreduce(x, op="avg") is x
        np.testing.assert_array_equal(out, x)


@on_ranks(3)
def test_a_failed_with_block_tells_the_others(comm):
    if comm.rank == 0:
        with pytest.raises(OSError), comm:
            raise OSError("disk full")
    else:
        with pytest.raises(qccl.PeerLost, match="disk full"):
            comm.quantized_allreduce(np.ones(10, np.float32), timeout=20.0)


def test_public_names_exist():
    for name in qccl.__all__:
        assert getattr(qccl, name) is not None
    with pytest.raises(AttributeError, match="allreduces"):
        _ = qccl.allreduces


@on_ranks(2)
def test_closed(comm):
    plan = comm.plan("allreduce", 3).bind(np.ones(3, np.float32))
    comm.close()
    comm.close()
    for call in (
        lambda: comm.quantized_allreduce(np.ones(3, np.float32)),
        lambda: comm.plan("allreduce", 3),
        lambda: comm.split(0),
        plan.start,
        comm.barrier,
    ):
        with pytest.raises(qccl.ArgumentError, match="closed"):
            call()
