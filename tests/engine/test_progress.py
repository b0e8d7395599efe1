"""Calls that progress while their caller is elsewhere."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import numpy as np
import patience
import pytest
from patience import wait_until
from thread_ranks import on_ranks

import qccl
from qccl.engine import progress
from qccl.engine.host import engine as host
from qccl.engine.host.engine import HostEngine
from qccl.engine.host.execution import HostExecution

COUNT = 300_000


@pytest.fixture
def progress_threads():
    """The number of progress threads, without those that other tests have left."""
    before = set(threading.enumerate())
    return lambda: sum(each.name == "qccl progress" and each not in before for each in threading.enumerate())


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
            wait_until(works[i].is_completed)
    assert all((x == 2 * (i + 1)).all() for i, x in enumerate(arrays))


@on_ranks(2)
def test_blocking_calls_start_no_thread(comm, progress_threads):
    x = np.ones(1000, np.float32)
    comm.quantized_allreduce(x)
    comm.plan("allreduce", 1000)(x)
    assert progress_threads() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_threads_and_engines_end_with_their_group(fails, progress_threads):
    def run(comm):
        comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True).wait()
        assert progress_threads()
        if fails and comm.rank:
            raise ZeroDivisionError
        comm.barrier()

    before = set(host._live)  # of other tests
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            qccl.run_ranks(2, run)
        assert fails or not progress_threads()
    wait_until(lambda: not progress_threads())
    assert set(host._live) <= before


@on_ranks(2)
def test_the_thread_sleeps_when_nothing_is_under_way(comm):
    x = np.ones(1000, np.float32)
    comm.quantized_allreduce(x, async_op=True).wait()
    thread = comm._session.engine._progress_thread
    wait_until(lambda: thread._asleep)
    for again in (True, False):  # and it is woken
        x.fill(1)
        comm.barrier()
        plan = comm.plan("allreduce", 1000).bind(x)
        work = comm.quantized_allreduce(x, async_op=True) if again else plan.start()
        wait_until(lambda: x[-1] == 2)
        wait_until(work.is_completed)


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
def test_arrays_live_until_a_dropped_call_has_ended(comm, looked: threading.Event):
    x, y = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    gone = weakref.ref(x)
    if comm.rank:
        assert looked.wait(60)
    comm.quantized_allreduce(x, out=y, async_op=True)
    del x
    if not comm.rank:
        gc.collect()
        time.sleep(0.1)
        lives = gone() is not None
        looked.set()
        assert lives, "the other rank has not come yet"
    wait_until(lambda: y[-1] == 2)
    wait_until(lambda: gc.collect() >= 0 and gone() is None)


@on_ranks(2)
def test_a_transport_that_is_not_threaded_has_no_thread(comm):
    transport = comm.transport.split(0, comm.rank, 10)
    transport.is_threaded = False
    with qccl.Communicator._from_transport(transport) as other:
        x = np.ones(1000, np.float32)
        work = other.quantized_allreduce(x, async_op=True)
        assert other._session.engine._progress_thread is None
        wait_until(work.is_completed)
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
    ending, add_trace = threading.Event(), HostExecution.add_trace

    def slow(execution, trace):
        if threading.current_thread().name == "qccl progress":
            ending.set()
            time.sleep(0.2)
        add_trace(execution, trace)

    monkeypatch.setattr(HostExecution, "add_trace", slow)

    def run(comm):
        trace = []
        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True, trace=trace)
        assert ending.wait(60)
        work.wait()
        assert trace

    qccl.run_ranks(2, run)
