"""Calls that repeat earlier ones fail, and are interrupted, as first calls are."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from thread_ranks import on_ranks
from threads import hear

import qccl
from qccl.engine.base import Numbers
from qccl.engine.host.engine import HostEngine

COUNT = 300
#: equal calls that precede the one that fails
WARM = 3


def warm(comm: qccl.Communicator, **options: object) -> np.ndarray:
    """All-reduce an array of zeros WARM times, and return it."""
    x = np.zeros(COUNT, np.float32)
    for _ in range(WARM):
        comm.quantized_allreduce(x, **options)
    return x


@on_ranks(2)
def test_a_rank_that_repeats_another_call_raises_a_mismatch(comm):
    x = np.ones(COUNT, np.float32)
    for _ in range(3):
        comm.quantized_allreduce(x)
    before = x.copy()
    with pytest.raises(qccl.MismatchError, match="call 3 of the group"):
        comm.quantized_allreduce(x, op="max" if comm.rank else "sum")
    assert (x == before).all()


@pytest.mark.parametrize("option", [False, True])
@on_ranks(2)
def test_a_rank_that_does_not_call(comm, missed: threading.Event, option):
    options = {"timeout": 0.5} if option and comm.rank == 0 else {}
    x = np.zeros(COUNT, np.float32)
    for _ in range(WARM):
        if comm.rank == 0:
            hear(comm._session.engine, 1)  # so that it waits for rank 1 in none of these calls
        comm.quantized_allreduce(x, **options)
    if comm.rank:
        assert missed.wait(60)
        with pytest.raises(qccl.PeerLost):
            comm.quantized_allreduce(x, **options)
    else:
        comm.timeout = 60.0 if option else 0.5
        with pytest.raises(qccl.CollectiveTimeout, match=r"call 3 of the group\): rank 1 did not make this call"):
            comm.quantized_allreduce(x, **options)
        missed.set()
    with pytest.raises(qccl.QcclError, match="failed earlier and is unusable"):
        comm.quantized_allreduce(x, **options)
    assert comm.calls == WARM


TEXTS = {
    "rank 1 gives up": "rank 1 gave up: no more data",
    "rank 1 leaves": r"rank 1 has closed its communicator, and rank 0 called .*call 3",
    "another thread gives up": "stopped by hand",
}


@pytest.mark.parametrize("end", TEXTS)
@on_ranks(2)
def test_the_group_ends_while_a_call_waits(comm, warmed: threading.Barrier, heard: threading.Event, end):
    """At once, and not by the deadline."""
    x = warm(comm)
    warmed.wait(60)  # not barrier(): its last message might meet the end of the group
    if comm.rank:
        if end == "rank 1 gives up":
            comm.abort("no more data")
        elif end == "rank 1 leaves":
            comm._session.engine.close(0.1)
        assert heard.wait(60)
        return
    if end == "another thread gives up":
        threading.Timer(0.3, comm.abort, ["stopped by hand"]).start()
    with pytest.raises(qccl.PeerLost, match=TEXTS[end]):
        comm.quantized_allreduce(x)
    heard.set()
    assert comm.calls == WARM and (x == 0).all()


@pytest.mark.parametrize("place", [(HostEngine, "start"), (Numbers, "take")])
def test_an_interrupt_before_the_run_begins(monkeypatch, place):
    """Nothing was sent: the call can be made again, and has the number that it would have had."""
    warmed, interrupted = threading.Barrier(2), threading.Barrier(2)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    def call(comm, x):
        return comm.quantized_allreduce(x, np.empty_like(x), codec="dithering:k=4").tobytes()

    def run(comm):
        x = np.linspace(-1, 1, COUNT, dtype=np.float32)
        found = [call(comm, x) for _ in range(WARM)]
        if comm.rank == 0:
            warmed.wait(60)
            monkeypatch.setattr(*place, interrupt)
            interrupted.wait(60)
        else:
            warmed.wait(60)
            interrupted.wait(60)
        with pytest.raises(KeyboardInterrupt):
            call(comm, x)
        assert comm.calls == WARM
        warmed.wait(60)
        if comm.rank == 0:
            monkeypatch.undo()
        interrupted.wait(60)
        return [*found, call(comm, x)]

    def undisturbed(comm):
        x = np.linspace(-1, 1, COUNT, dtype=np.float32)
        return [call(comm, x) for _ in range(WARM + 1)]

    assert qccl.run_ranks(2, run) == qccl.run_ranks(2, undisturbed)


@on_ranks(1)
def test_a_call_while_another_thread_drives(comm):
    """It waits until the thread gives the engine up."""
    x, engine = warm(comm), comm._session.engine
    held, release = threading.Event(), threading.Event()

    def drive():
        with engine._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=drive)
    thread.start()
    held.wait(60)
    threading.Timer(0.2, release.set).start()
    x[:] = 7
    assert (comm.quantized_allreduce(x) == 7).all() and release.is_set()
    thread.join()


@on_ranks(2)
def test_a_call_in_the_middle_of_another(comm, warmed: threading.Barrier, monkeypatch):
    """A call that a signal handler starts while a repeated call waits gets a number of its own."""
    x, y = warm(comm, codec="none"), np.ones(COUNT, np.float32)
    warmed.wait(60)
    works, usual = [], comm.transport.poll

    def poll(idle=0):
        if not works:
            works.append(None)
            works[0] = comm.quantized_allreduce(x, codec="none", async_op=True)
            assert comm.calls == WARM + 2
        return usual(idle=idle)

    monkeypatch.setattr(comm.transport, "poll", poll)
    x[:] = 1
    comm.quantized_allreduce(x, codec="none")  # the other one waits for it, because it uses the same memory
    comm.quantized_allreduce(y, codec="none")
    assert (works[0].wait(timeout=20) == 4).all()
    assert (y == 2).all()
    assert comm.calls == WARM + 3
