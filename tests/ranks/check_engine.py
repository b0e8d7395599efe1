"""All-reduce over processes, below and through the communicator."""

from __future__ import annotations

import signal
import time

import numpy as np
import patience
import processes
import pytest
from processes import RANK, SIZE
from threads import Caller, near_sum, outcomes, ramp

import qccl
from qccl.base.errors import MismatchError, PeerLost


@pytest.fixture
def caller():
    made = Caller(processes.connect())
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 63, 65, 10_007, 300_000])
def test_the_same_bytes_as_on_loopback(caller, count):
    def on_loopback(t):
        other = Caller(t)
        y = other.allreduce(ramp(t.rank, count))
        other.close()
        return y

    y = caller.allreduce(ramp(RANK, count))
    assert near_sum(y, SIZE)
    assert y.tobytes() == outcomes(SIZE, on_loopback)[RANK].tobytes()


@pytest.mark.parametrize("counts", [(100, 105), (100, 3_000_000), (1 << 20, (1 << 20) + 70_000), (0, 1)])
def test_ranks_that_disagree(counts):
    caller = Caller(processes.connect())
    x = ramp(RANK, counts[RANK == SIZE - 1])
    y = np.full_like(x, 7)
    if SIZE == 1:
        caller.start(caller.program(len(x)), x, y).run()
        caller.close()
        return
    with pytest.raises(MismatchError, match="called allreduce") as info:
        caller.start(caller.program(len(x)), x, y).run()
    assert f"count={counts[0]}," in str(info.value) and f"count={counts[1]}," in str(info.value)
    assert (y == 7).all()
    caller.close()


def test_groups_of_a_split_work_at_the_same_time():
    with qccl.init(backend="host", timeout=20) as comm, comm.split(comm.rank % 2) as part:
        x = np.ones(5000, np.float32)
        part.quantized_allreduce(x)
        assert (x == part.size).all()
        comm.quantized_allreduce(x)
        sizes = [len(range(r % 2, comm.size, 2)) for r in range(comm.size)]
        assert np.abs(x - sum(sizes)).max() < 1e-3


def test_calls_end_while_nobody_calls_qccl():
    with qccl.init(backend="host", timeout=20) as comm:
        assert comm.transport.is_threaded
        arrays = [np.ones(n, np.float32) for n in (300_000, 10, 5000)]
        works = [comm.quantized_allreduce(x, async_op=True) for x in arrays]
        patience.wait_until(lambda: all(x[0] == x[-1] == SIZE for x in arrays), seconds=10)
        time.sleep(0.01)
        for work in reversed(works) if RANK else works:
            assert work.is_completed() or work.wait() is not None
        assert all((x == SIZE).all() for x in arrays)
        comm.quantized_allreduce(arrays[0])


def test_an_interrupt_ends_a_wait():
    """The loop is native code, which looks for signals from time to time; the others hear of it."""
    comm = qccl.init(backend="host", timeout=20)
    if SIZE == 1:
        return comm.close()
    x = np.ones(1000, np.float32)
    if RANK:
        processes.barrier()
        with pytest.raises(PeerLost, match="rank 0 gave up: KeyboardInterrupt"):
            comm.quantized_allreduce(x)
        return None
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        comm.quantized_allreduce(x)
    processes.barrier()
    signal.signal(signal.SIGALRM, usual)
    return None
