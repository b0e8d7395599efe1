"""What is called when a call has ended: Work.add_done_callback() and get_future()."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import patience
import pytest
from thread_ranks import on_ranks

import qccl
import qccl.communicator.calls
from qccl.base.errors import ArgumentError, CollectiveTimeout, PeerLost

COUNT = 100_000
SECONDS = 60.0


class Called:
    """A callback that remembers its calls."""

    def __init__(self):
        self.works, self.threads, self.event = [], [], threading.Event()

    def __call__(self, work):
        self.works.append(work)
        self.threads.append(threading.current_thread().name)
        self.event.set()

    def wait(self):
        assert self.event.wait(SECONDS), "no call within the limit"
        return self.works


def test_nobody_needs_to_wait():
    def run(comm):
        x, first, late = np.ones(COUNT, np.float32), Called(), Called()
        work = comm.quantized_allreduce(x, async_op=True)
        work.add_done_callback(first)
        assert first.wait() == [work] and (x == 3).all()
        assert work.wait() is x and work.is_completed() and work.exception() is None
        work.add_done_callback(late)
        assert late.works == [work] and late.threads == [threading.current_thread().name]
        return first.threads

    for threads in qccl.run_ranks(3, run):
        assert len(threads) == 1


@on_ranks(2)
def test_it_is_called_at_the_end_of_its_own_call(comm, go: threading.Event):
    """And not when all calls under way have ended: the last one here ends only after the first one's callback."""
    first = Called()
    works = [comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)]
    if comm.rank:
        works[0].wait()
        assert go.wait(SECONDS)
    works.append(comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True))
    if comm.rank == 0:
        works[0].add_done_callback(first)
        first.wait()
        assert not works[1].is_completed()
        go.set()
    works[1].wait()


def test_an_exception_goes_to_the_hook(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def fail(work):
        raise ZeroDivisionError("in a callback")

    def run(comm):
        for _ in range(2):  # the engine goes on
            called = Called()
            work = comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True)
            work.add_done_callback(fail)
            work.add_done_callback(called)
            called.wait()
            assert work.exception() is None
        return True

    assert qccl.run_ranks(2, run) == [True, True]
    assert [str(each.exc_value) for each in reported] == ["in a callback"] * 4


@pytest.mark.parametrize(
    "use",
    [
        lambda comm: comm.close(),
        lambda comm: comm.quantized_allreduce(np.ones(10, np.float32)),
        lambda comm: comm.quantized_allreduce(np.ones(10, np.float32), async_op=True),
    ],
    ids=["close", "call", "async"],
)
@on_ranks(2)
def test_it_cannot_use_the_communicator(comm, use):
    errors, called = [], Called()

    def refused(work):
        with pytest.raises(ArgumentError) as caught:
            use(comm)
        errors.append(str(caught.value))

    work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)
    work.add_done_callback(refused)
    work.add_done_callback(called)
    called.wait()
    (error,) = errors
    assert "add_done_callback" in error and "cannot make calls on the communicator or close it" in error
    assert comm.quantized_allreduce(np.ones(10, np.float32))[0] == 2


@on_ranks(2)
def test_something_else_than_a_function(comm):
    work = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True)
    with pytest.raises(ArgumentError, match="takes a function"):
        work.add_done_callback(3)
    work.wait()


ENDS = {
    "a lost rank": [PeerLost] * 3,
    "a deadline": [CollectiveTimeout] * 3,
    "a wait": [CollectiveTimeout] * 3,
    "abort": [PeerLost] * 3,
    "close": [PeerLost] * 3,
}


@pytest.mark.parametrize("end", ENDS)
def test_calls_that_no_other_rank_makes(end):
    """The last of them is queued behind the others."""
    begun, done = threading.Event(), threading.Event()

    def run(comm):
        if comm.rank:
            assert begun.wait(SECONDS)
            if end == "a lost rank":
                comm.abort("a reason")
            assert done.wait(SECONDS)
            return None
        x, first = np.ones(1000, np.float32), 1.0 if end == "a deadline" else None
        works = [comm.quantized_allreduce(x, async_op=True, timeout=each) for each in (first, None, None)]
        called = [Called() for _ in works]
        for work, each in zip(works, called, strict=True):
            work.add_done_callback(each)
        begun.set()
        if end == "a wait":
            with pytest.raises(CollectiveTimeout, match="wait"):
                works[0].wait(0.05)
        elif end in ("abort", "close"):
            getattr(comm, end)()
        found = [type(work.exception()) for each in called for work in each.wait()]
        done.set()
        if end == "a lost rank":
            with pytest.raises(PeerLost, match="a reason"):
                works[1].wait()
        return found

    assert qccl.run_ranks(2, run)[0] == ENDS[end]


@on_ranks(2)
def test_a_result_that_is_refused(comm):
    called, x = Called(), np.full(10, np.nan, np.float32)
    comm.quantized_allreduce(x, async_op=True, nonfinite="error").add_done_callback(called)
    assert [type(work.exception()) for work in called.wait()] == [ArgumentError]


@on_ranks(2)
def test_a_thread_that_waits_and_callbacks_end_each_call_once(comm):
    x, called = np.ones(1000, np.float32), []
    for i in range(300):
        work = comm.quantized_allreduce(x, async_op=True)
        work.add_done_callback(called.append)
        if i % 3:
            work.wait()
    patience.wait_until(lambda: len(called) == 300, seconds=30)
    (compiled,) = comm._session.programs
    assert (len(called), len(set(map(id, called))), {program.users for program in compiled.programs}) == (300, 300, {0})


@on_ranks(2)
def test_functions_run_one_at_a_time_in_the_order_in_which_they_were_added(comm):
    """Though the program's thread makes calls, and adds functions, while the progress thread runs one."""
    log, begun, go, last = [], threading.Event(), threading.Event(), Called()
    work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)

    def first(work):
        log.append("first")
        begun.set()
        go.wait(SECONDS)
        work.add_done_callback(lambda work: (log.append("fourth"), last(work)))
        log.append("end of first")

    adds = threading.Thread(target=work.add_done_callback, args=(first,))
    adds.start()
    assert begun.wait(SECONDS)
    work.add_done_callback(lambda work: log.append("second"))
    for _ in range(3):
        comm.quantized_allreduce(np.ones(10, np.float32))
    work.add_done_callback(lambda work: log.append("third"))
    assert log == ["first"]
    go.set()
    last.wait()
    adds.join(SECONDS)
    assert log == ["first", "end of first", "second", "third", "fourth"]


@on_ranks(1)
def test_an_exception_while_functions_are_called_leaves_the_others_to_the_next_thread(comm):
    work, called = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True), Called()
    work.wait()

    class Interrupts(list):
        def pop(self, place):
            work._callbacks = list(self)
            raise KeyboardInterrupt

        def __bool__(self):
            return True

    work._callbacks = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        work.add_done_callback(called)
    comm._session.calling[work] = (threading.get_ident(),)  # an exception came before it was removed
    with pytest.raises(ArgumentError):
        comm.quantized_allreduce(np.ones(10, np.float32), codec=7)  # its guard removes it
    late = Called()
    thread = threading.Thread(target=work.add_done_callback, args=(late,))
    thread.start()
    thread.join(SECONDS)
    assert called.works == late.works == [work]
    comm.barrier()


def test_a_thread_that_waits_returns_only_when_the_result_was_checked(monkeypatch):
    """And calls can be made meanwhile: a check may wait for a GPU, and other ranks for these calls."""
    usual, checking, waiting, go = qccl.communicator.calls.refuse_nonfinite, *(threading.Event() for _ in range(3))

    def refuse(*arguments):
        checking.set()
        assert go.wait(SECONDS)
        usual(*arguments)

    def run(comm):
        x, lock = np.full(10, np.inf, np.float32), comm._session.engine._lock
        work = comm.quantized_allreduce(x, async_op=True, nonfinite="error", codec="none")

        def wait():
            waiting.set()
            with pytest.raises(ArgumentError, match="finite"):
                work.wait()
            return True

        with ThreadPoolExecutor(2) as pool:
            pool.submit(work.add_done_callback, lambda work: None)
            assert checking.wait(SECONDS)
            waited = pool.submit(wait)
            assert waiting.wait(SECONDS) and lock.acquire(timeout=SECONDS)
            lock.release()
            assert not waited.done()
            comm.quantized_allreduce(np.ones(20, np.float32))
            go.set()
            assert waited.result(SECONDS)

    monkeypatch.setattr(qccl.communicator.calls, "refuse_nonfinite", refuse)
    qccl.run_ranks(1, run)


@on_ranks(1)
def test_calls_that_are_refused_keep_no_array(comm, no_collector):
    """Without the cyclic garbage collector, which may come late."""

    class Array(np.ndarray):
        pass

    plan = comm.plan("allreduce", 10)
    refused = [
        lambda x: comm.quantized_allreduce(x, timeout=-1),
        lambda x: comm.quantized_allreduce(x, codec=7),
        lambda x: comm.quantized_allreduce(x[:100], x[50:150]),
        plan.bind,
        lambda x: comm.abort() or comm.quantized_allreduce(x),
    ]
    for call in refused:
        x = np.ones(1000, np.float32).view(Array)
        kept = weakref.ref(x)
        with contextlib.suppress(qccl.QcclError):
            call(x)
        del x
        assert kept() is None


@on_ranks(1)
def test_a_fork_while_another_thread_holds_the_lock(comm):
    work = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True)
    work.wait()
    held, go = threading.Event(), threading.Event()

    def hold():
        with comm._session.engine._lock:
            held.set()
            go.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(SECONDS)
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            comm.close()
        finally:
            os._exit(0)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
