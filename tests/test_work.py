"""What is called when a call has ended: Work.add_done_callback() and get_future()."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import qccl
import qccl.calls
from qccl.errors import ArgumentError, CollectiveTimeout, PeerLost

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


def test_it_is_called_at_the_end_of_its_own_call():
    """And not when all calls under way have ended: the last one here ends only after the first one's callback."""

    def run(comm):
        first = Called()
        x, y = np.ones(COUNT, np.float32), np.ones(COUNT, np.float32)
        works = []
        if comm.rank:
            works.append(comm.quantized_allreduce(x, async_op=True))
            works[0].wait()
            go.wait(SECONDS)
            works.append(comm.quantized_allreduce(y, async_op=True))
        else:
            works.append(comm.quantized_allreduce(x, async_op=True))
            works.append(comm.quantized_allreduce(y, async_op=True))
            works[0].add_done_callback(first)
            first.wait()
            assert not works[1].is_completed()
            go.set()
        works[1].wait()
        return True

    go = threading.Event()
    assert qccl.run_ranks(2, run) == [True, True]


def test_in_the_order_in_which_they_were_added():
    def run(comm):
        order, last = [], Called()
        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)
        for i in range(10):
            work.add_done_callback(lambda _, i=i: order.append(i))
        work.add_done_callback(last)
        last.wait()
        return order

    assert qccl.run_ranks(2, run) == [[*range(10)]] * 2


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


def test_it_cannot_close_the_communicator():
    def run(comm):
        errors, called = [], Called()

        def close(work):
            try:
                comm.close()
            except ArgumentError as error:
                errors.append(str(error))

        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)
        work.add_done_callback(close)
        work.add_done_callback(called)
        called.wait()
        return errors, comm.quantized_allreduce(np.ones(10, np.float32))[0]  # the communicator goes on

    for errors, value in qccl.run_ranks(2, run):
        assert len(errors) == 1 and "cannot make calls on the communicator or close it" in errors[0] and value == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_cannot_make_calls(asynchronous):
    def run(comm):
        errors, called = [], Called()

        def call(work):
            try:
                comm.quantized_allreduce(np.ones(10, np.float32), async_op=asynchronous)
            except ArgumentError as error:
                errors.append(str(error))

        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)
        work.add_done_callback(call)
        work.add_done_callback(called)
        called.wait()
        comm.quantized_allreduce(np.ones(10, np.float32))  # the program itself can
        return errors

    for errors in qccl.run_ranks(2, run):
        assert len(errors) == 1 and "add_done_callback" in errors[0]


def test_something_else_than_a_function():
    def run(comm):
        work = comm.quantized_allreduce(np.ones(10, np.float32), async_op=True)
        with pytest.raises(ArgumentError, match="takes a function"):
            work.add_done_callback(3)
        work.wait()

    qccl.run_ranks(2, run)


def pending(comm, kind=Called, timeout=None):
    """Calls under way that no other rank makes, the last of them queued behind the others, and their callbacks.

    ``timeout`` is that of the first one; all must be made before it passes.
    """
    x = np.ones(1000, np.float32)
    works = [comm.quantized_allreduce(x, async_op=True, timeout=each) for each in (timeout, None, None)]
    called = [kind() for _ in works]
    for work, each in zip(works, called, strict=True):
        work.add_done_callback(each)
    return works, called


def failures(called):
    return [type(work.exception()) for each in called for work in each.wait()]


def test_a_lost_rank():
    def run(comm):
        if comm.rank:
            begun.wait(SECONDS)
            comm.abort("a reason")
            return None
        works, called = pending(comm)
        begun.set()
        found = failures(called)
        with pytest.raises(PeerLost, match="a reason"):
            works[1].wait()
        return found

    begun = threading.Event()
    assert qccl.run_ranks(2, run)[0] == [PeerLost] * 3


def test_a_deadline():
    def run(comm):
        if comm.rank:
            done.wait(SECONDS)
            return None
        found = failures(pending(comm, timeout=1.0)[1])
        done.set()
        return found

    done = threading.Event()
    assert qccl.run_ranks(2, run)[0] == [CollectiveTimeout] * 3


def test_a_wait_that_ends_before_the_call():
    def run(comm):
        if comm.rank:
            done.wait(SECONDS)
            return None
        works, called = pending(comm)
        with pytest.raises(CollectiveTimeout, match="wait"):
            works[0].wait(0.05)
        found = failures(called)
        done.set()
        return found

    done = threading.Event()
    assert qccl.run_ranks(2, run)[0] == [CollectiveTimeout, PeerLost, PeerLost]


@pytest.mark.parametrize("end", ["abort", "close"])
def test_the_end_of_the_communicator(end):
    def run(comm):
        if comm.rank:
            done.wait(SECONDS)
            return None
        called = pending(comm)[1]
        getattr(comm, end)()
        found = failures(called)
        done.set()
        return found

    done = threading.Event()
    assert qccl.run_ranks(2, run)[0] == [PeerLost] * 3


def test_a_result_that_is_refused():
    def run(comm):
        called = Called()
        x = np.full(10, np.nan, np.float32)
        comm.quantized_allreduce(x, async_op=True, nonfinite="error").add_done_callback(called)
        return failures([called])

    assert qccl.run_ranks(2, run) == [[ArgumentError]] * 2


def test_programs_are_used_again_though_nobody_waits():
    def run(comm):
        x = np.ones(1000, np.float32)
        for _ in range(20):
            called = Called()
            comm.quantized_allreduce(x, async_op=True).add_done_callback(called)
            called.wait()
        (compiled,) = comm._programs
        return len(compiled.programs), compiled.is_busy

    assert qccl.run_ranks(2, run) == [(1, False)] * 2


def test_a_thread_that_waits_and_callbacks_end_each_call_once():
    def run(comm):
        x, called = np.ones(1000, np.float32), []
        for i in range(300):
            work = comm.quantized_allreduce(x, async_op=True)
            work.add_done_callback(called.append)
            if i % 3:
                work.wait()
        deadline = time.monotonic() + SECONDS
        while len(called) < 300 and time.monotonic() < deadline:
            time.sleep(0.001)
        (compiled,) = comm._programs
        return len(called), len(set(map(id, called))), {program.users for program in compiled.programs}

    for calls, works, users in qccl.run_ranks(2, run):
        assert (calls, works, users) == (300, 300, {0})


def test_futures():
    torch = pytest.importorskip("torch")

    def run(comm):
        x, y = torch.ones(COUNT), torch.full((10,), 2.0)
        future = comm.quantized_allreduce(x, async_op=True).get_future()
        both = comm.quantized_allreduce_coalesced([x, y], async_op=True).get_future()
        assert future.wait() is x and [each[0].item() for each in both.wait()] == [4, 4]
        assert future.then(lambda f: f.value()[0].item()).wait() == 4
        done = comm.quantized_allreduce(y, async_op=True)
        done.wait()
        assert done.get_future().done()
        if comm.rank:
            begun.wait(SECONDS)
            comm.abort("a reason")
            return
        future = comm.quantized_allreduce(x, async_op=True).get_future()
        begun.set()
        with pytest.raises(PeerLost, match="a reason"):
            future.wait()

    begun = threading.Event()
    qccl.run_ranks(2, run)


def test_functions_run_one_at_a_time_in_the_order_in_which_they_were_added():
    """Though the program's thread makes calls, and adds functions, while the progress thread runs one."""

    def run(comm):
        log, begun, go = [], threading.Event(), threading.Event()
        work = comm.quantized_allreduce(np.ones(COUNT, np.float32), async_op=True)

        def first(work):
            log.append("first")
            begun.set()
            go.wait(SECONDS)
            work.add_done_callback(lambda work: log.append("fourth"))
            log.append("end of first")

        last = Called()
        adds = threading.Thread(target=work.add_done_callback, args=(first,))
        adds.start()
        assert begun.wait(SECONDS)
        work.add_done_callback(lambda work: log.append("second"))
        for _ in range(3):
            comm.quantized_allreduce(np.ones(10, np.float32))
        work.add_done_callback(lambda work: log.append("third"))
        assert log == ["first"]
        go.set()
        deadline = time.monotonic() + SECONDS
        while "fourth" not in log and time.monotonic() < deadline:
            time.sleep(0.001)
        work.add_done_callback(last)
        last.wait()
        adds.join(SECONDS)
        return log

    assert qccl.run_ranks(2, run) == [["first", "end of first", "second", "third", "fourth"]] * 2


def test_an_exception_while_functions_are_called_leaves_the_others_to_the_next_thread():
    def run(comm):
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

    qccl.run_ranks(1, run)


def test_a_thread_that_waits_returns_only_when_the_result_was_checked(monkeypatch):
    """And calls can be made meanwhile: a check may wait for a GPU, and other ranks for these calls."""
    usual, checking, go = qccl.calls.refuse_nonfinite, threading.Event(), threading.Event()

    def refuse(*arguments):
        checking.set()
        assert go.wait(SECONDS)
        usual(*arguments)

    def run(comm):
        x = np.full(10, np.inf, np.float32)
        work = comm.quantized_allreduce(x, async_op=True, nonfinite="error", codec="none")
        ends = threading.Thread(target=work.add_done_callback, args=(lambda work: None,))
        ends.start()
        assert checking.wait(SECONDS)
        waiting, errors = threading.Event(), []

        def wait():
            waiting.set()
            try:
                work.wait()
            except ArgumentError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait(SECONDS)
        assert comm._session.engine._lock.acquire(timeout=SECONDS)
        comm._session.engine._lock.release()
        assert not errors and thread.is_alive()
        comm.quantized_allreduce(np.ones(20, np.float32))
        go.set()
        thread.join(SECONDS)
        ends.join(SECONDS)
        assert len(errors) == 1 and "finite" in str(errors[0])

    monkeypatch.setattr(qccl.calls, "refuse_nonfinite", refuse)
    qccl.run_ranks(1, run)


def test_calls_that_are_refused_keep_no_array():
    """Without the cyclic garbage collector, which may come late."""

    class Array(np.ndarray):
        pass

    def run(comm):
        plan = comm.plan("allreduce", 10)
        refused = [
            lambda x: comm.quantized_allreduce(x, timeout=-1),
            lambda x: comm.quantized_allreduce(x, codec=7),
            lambda x: comm.quantized_allreduce(x[:100], x[50:150]),
            plan.bind,
            lambda x: comm.abort() or comm.quantized_allreduce(x),
        ]
        alive = []
        for call in refused:
            x = np.ones(1000, np.float32).view(Array)
            kept = weakref.ref(x)
            with contextlib.suppress(qccl.QcclError):
                call(x)
            del x
            alive.append(kept() is not None)
        return alive

    gc.disable()
    try:
        assert qccl.run_ranks(1, run) == [[False] * 5]
    finally:
        gc.enable()


def test_a_fork_while_another_thread_holds_the_lock():
    def run(comm):
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
        return os.waitpid(child, 0)[1]

    assert qccl.run_ranks(1, run) == [0]
