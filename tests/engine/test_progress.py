"""Calls that progress while their caller is elsewhere."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref

import numpy as np
import patience
import pytest
from thread_ranks import on_ranks
from threads import Caller, outcomes, ramp

import qccl
from qccl.engine import progress
from qccl.engine.base import Progress
from qccl.errors import CollectiveTimeout, MismatchError, PeerLost
from qccl.host import engine as host
from qccl.host.engine import HostEngine
from qccl.host.execution import Execution

COUNT = 300_000


def until(condition):
    limit = patience.Limit(30)
    while not condition():
        assert limit.left(), "this did not come true"
        time.sleep(0.002)


@pytest.fixture
def progress_threads():
    """The number of progress threads, without those that other tests have left."""
    before = set(threading.enumerate())
    return lambda: sum(each.name == "qccl progress" and each not in before for each in threading.enumerate())


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_call_ends_while_nobody_calls_qccl(is_planned):
    """What is looked at is the output array, not the Work."""

    def run(comm):
        x = np.ones(COUNT, np.float32)
        plan = comm.plan("allreduce", COUNT).bind(x) if is_planned else None
        for _ in range(3):
            x.fill(1)
            comm.barrier()
            work = comm.quantized_allreduce(x, async_op=True) if plan is None else plan.start()
            until(lambda: x[-1] == 3 and x[0] == 3)
            until(work.is_completed)
            assert work.wait() is x and work.exception() is None
        return x

    assert all((x == 3).all() for x in qccl.run_ranks(3, run))


@on_ranks(2)
def test_several_calls_in_flight_end_in_any_order(comm):
    arrays = [np.full(1000 * (i + 1), i + 1, np.float32) for i in range(24)]
    works = [comm.quantized_allreduce(x, async_op=True) for x in arrays]
    order = list(range(24))
    np.random.default_rng(comm.rank).shuffle(order)
    for i in order:
        if i % 3:
            works[i].wait(timeout=60)
        else:
            until(works[i].is_completed)
    assert all((x == 2 * (i + 1)).all() for i, x in enumerate(arrays))


@on_ranks(2)
def test_blocking_calls_beside_asynchronous_ones(comm):
    x, small = np.ones(COUNT, np.float32), np.ones(100, np.float32)
    for i in range(10):
        x.fill(1)
        small.fill(1)
        work = comm.quantized_allreduce(x, async_op=True)
        comm.quantized_allreduce(small)
        assert (small == 2).all()
        if i % 2:
            work.wait()
        else:
            until(work.is_completed)
        assert (x == 2).all()


@on_ranks(2)
def test_blocking_calls_start_no_thread(comm, progress_threads):
    x = np.ones(1000, np.float32)
    comm.quantized_allreduce(x)
    comm.plan("allreduce", 1000)(x)
    assert progress_threads() == 0


def test_the_thread_ends_with_its_communicator(progress_threads):
    def run(comm):
        comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True).wait()
        assert progress_threads()

    def fail(comm):
        run(comm)
        raise ZeroDivisionError

    qccl.run_ranks(2, run)
    assert not progress_threads()
    with pytest.raises(ZeroDivisionError):
        qccl.run_ranks(2, fail)
    until(lambda: not progress_threads())


def test_a_failed_group_leaves_neither_threads_nor_engines(progress_threads):
    def run(comm):
        comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True).wait()
        if comm.rank:
            raise ZeroDivisionError
        comm.barrier()

    before = set(host._live)  # of other tests
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            qccl.run_ranks(2, run)
    until(lambda: not progress_threads())
    assert set(host._live) <= before


@on_ranks(2)
def test_the_thread_sleeps_when_nothing_is_under_way(comm):
    x = np.ones(1000, np.float32)
    comm.quantized_allreduce(x, async_op=True).wait()
    thread = comm._session.engine._progress_thread
    until(lambda: thread._asleep)
    for again in (True, False):  # and it is woken
        x.fill(1)
        comm.barrier()
        plan = comm.plan("allreduce", 1000).bind(x)
        work = comm.quantized_allreduce(x, async_op=True) if again else plan.start()
        until(lambda: x[-1] == 2)
        until(work.is_completed)


@on_ranks(2)
def test_the_thread_gives_way_to_a_caller_who_starts_another_call(comm, started: threading.Event):
    """Although what it drives waits for a rank that waits for that."""
    x, y = np.ones(1000, np.float32), np.ones(1000, np.float32)
    if comm.rank:
        assert started.wait(60)
    first = comm.quantized_allreduce(x, async_op=True)
    if comm.rank == 0:
        time.sleep(0.1)
    second = comm.quantized_allreduce(y, async_op=True)
    started.set()
    first.wait()
    second.wait()
    assert (x == 2).all() and (y == 2).all()


@on_ranks(1)
def test_a_call_that_ends_at_once_needs_no_thread(comm, progress_threads):
    comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True).wait()
    assert (comm._session.engine.detached, progress_threads()) == (0, 0)


def test_beside_a_caller_that_computes_in_python():
    """Each poll needs the interpreter; with its usual switch interval this would take seconds."""
    usual = sys.getswitchinterval()

    def run(comm):
        x = np.ones(COUNT, np.float32)
        work = comm.quantized_allreduce(x, async_op=True, chunk=4096)
        limit = patience.Limit(30)
        rounds = 0
        while x[-1] != 2 or x[0] != 2:
            rounds += sum(range(100)) > 0
            assert limit.left()
        work.wait()
        return True

    assert qccl.run_ranks(2, run) == [True, True]
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_the_switch_interval_comes_back_unless_someone_else_has_set_it():
    usual = sys.getswitchinterval()
    try:
        with progress._quick_switches, progress._quick_switches:
            assert sys.getswitchinterval() < usual
        assert sys.getswitchinterval() == pytest.approx(usual)
        with progress._quick_switches:
            sys.setswitchinterval(0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(usual)


@on_ranks(2)
def test_a_failure_in_the_background_is_raised_by_whoever_waits(comm):
    x = np.full(100 + comm.rank, 7, np.float32)
    work = comm.quantized_allreduce(x, async_op=True)
    until(work.is_completed)
    assert isinstance(work.exception(), MismatchError)
    with pytest.raises(MismatchError):
        work.wait()
    with pytest.raises(MismatchError, match="failed earlier"):
        comm.quantized_allreduce(x)
    assert (x == 7).all()


def test_a_deadline_passes_in_the_background():
    failed = threading.Event()

    def run(comm):
        if comm.rank == 1:
            assert failed.wait(60)
            return
        work = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True, timeout=0.1)
        until(lambda: comm._session.engine._failure is not None)
        failed.set()
        assert isinstance(comm._session.engine._failure, CollectiveTimeout), "before anybody asks"
        until(work.is_completed)
        assert isinstance(work.exception(), CollectiveTimeout)
        raise work.exception()

    with pytest.raises(CollectiveTimeout):
        qccl.run_ranks(2, run)


def test_waiting_for_a_while():
    """The time of the wait ends it, not that of the call, which is a minute."""
    waited = threading.Event()

    def run(comm):
        if comm.rank == 1:
            assert waited.wait(60)
            comm.quantized_allreduce(np.ones(10, np.float32))
        work = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True)
        with pytest.raises(CollectiveTimeout, match=r"wait\(\) ended after 0.1 s: rank 1 did not make this call"):
            work.wait(timeout=0.1)
        waited.set()
        raise work.exception()

    with pytest.raises((CollectiveTimeout, PeerLost)):
        qccl.run_ranks(2, run)


@on_ranks(2)
def test_arrays_live_until_a_dropped_call_has_ended(comm, looked: threading.Event):
    x, y = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    gone = weakref.ref(x)
    if comm.rank == 0:
        comm.quantized_allreduce(x, out=y, async_op=True)
        del x
        gc.collect()
        time.sleep(0.1)
        lives = gone() is not None
        looked.set()
        assert lives, "the other rank has not come yet"
    else:
        assert looked.wait(60)
        comm.quantized_allreduce(x, out=y, async_op=True)
        del x
    until(lambda: y[-1] == 2)
    until(lambda: gc.collect() >= 0 and gone() is None)


@on_ranks(2)
def test_a_transport_that_is_not_threaded_has_no_thread(comm):
    transport = comm.transport.split(0, comm.rank, 10)
    transport.is_threaded = False
    with qccl.Communicator._from_transport(transport) as other:
        x = np.ones(1000, np.float32)
        work = other.quantized_allreduce(x, async_op=True)
        assert other._session.engine._progress_thread is None
        until(work.is_completed)
    assert (x == 2).all()


def test_waiting_until_idle_sees_a_run_that_the_thread_takes_from_the_queue(monkeypatch):
    taken, started, begin = threading.Event(), threading.Event(), HostEngine._begin

    def slow(engine, execution, waits):
        if threading.current_thread().name == "qccl progress":
            taken.set()
            time.sleep(0.2)
        return begin(engine, execution, waits)

    monkeypatch.setattr(HostEngine, "_begin", slow)

    def run(comm):
        x = np.ones(COUNT, np.float32)
        if comm.rank:
            assert started.wait(60)
            return [comm.quantized_allreduce(x) for _ in range(2)]
        works = [comm.quantized_allreduce(x, async_op=True) for _ in range(2)]  # the second writes what the first reads
        started.set()
        assert taken.wait(60)
        comm.state_dict()
        assert (x == 4).all()
        return works

    qccl.run_ranks(2, run)


def test_a_wait_returns_when_the_trace_is_complete(monkeypatch):
    ending, add_trace = threading.Event(), Execution.add_trace

    def slow(execution, trace):
        if threading.current_thread().name == "qccl progress":
            ending.set()
            time.sleep(0.2)
        add_trace(execution, trace)

    monkeypatch.setattr(Execution, "add_trace", slow)

    def run(comm):
        trace = []
        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True, trace=trace)
        assert ending.wait(60)
        work.wait()
        assert trace

    qccl.run_ranks(2, run)


def test_a_thread_that_sleeps_is_woken_by_a_run_that_nobody_waits_for():
    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 1000)
        for _ in range(2):
            execution = caller.start(caller.program(1000), x, np.empty_like(x), progress=Progress.SOON)
            until(lambda execution=execution: execution.done and caller.engine._progress_thread._asleep)
        caller.close()
        return True

    assert outcomes(2, run) == [True] * 2
