"""Ctrl-C, and any other exception from outside, at each point of a call: interruptions.py says what must hold then.

The usual tests take a sample. ``scripts/test -m every_interruption`` takes every function entry and every instruction
of a call of each kind, over threads and over UCX, and random times for ten minutes. Of first calls, whose preparation
is long and sends nothing, it takes some of the instructions.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from interruption_kinds import KINDS
from interruptions import AfterTime, Expected, Tally, close, every_entry, inject
from start_ranks import needs_ucx, start_plain
from thread_ranks import on_ranks

import qccl
from qccl.base.guard import guarded, register_guard
from qccl.communicator.session import Session

pytestmark = pytest.mark.usefixtures("threads_end")

#: kinds whose calls compile a program, which runs many functions before anything is sent
LONG = tuple(name for name, kind in KINDS.items() if kind.warm == 0 or name == "trace")
SHORT = tuple(name for name in KINDS if name not in LONG)
#: of the instructions of short calls, and of long ones
STRIDES = 1, 29
#: the instructions of a kind of call are shared out among so many tests, so that each ends within minutes
PARTS = 8


def entries(names, **options) -> Tally:
    return qccl.run_ranks(2, lambda parent: every_entry(parent, names, **options))[0]


def check(tally: Tally, *stories: str) -> None:
    assert tally.wrong == []
    assert set(stories) <= set(tally.stories), tally.stories


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a generator was closed
class TestAtFunctionEntries:
    @pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.slow)])
    def test_sample(self, stride):
        check(entries(SHORT, stride=stride, first=1), "not made", "failed")

    def test_sample_of_first_calls(self):
        check(entries(LONG, stride=149, first=20), "not made", "failed")

    def test_sample_of_instructions(self):
        check(entries(("repeated", "async", "plan.start"), opcodes=True, stride=59), "not made", "failed")

    @pytest.mark.parametrize("again", [0, 3, 9])
    def test_sample_of_two_exceptions(self, again):
        """The second one ends what the first one has begun; the next use of the communicator goes on with it."""
        check(entries(("repeated", "async", "plan.run"), stride=23, first=20, again=again), "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("name", KINDS)
    def test_every_one(self, name):
        check(entries((name,)), "not made", "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("part", range(PARTS))
    @pytest.mark.parametrize("name", KINDS)
    def test_instructions(self, name, part):
        stride = STRIDES[name in LONG]
        check(entries((name,), opcodes=True, stride=PARTS * stride, first=part * stride), "not made", "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("again", range(12))
    def test_two_exceptions(self, again):
        check(entries(SHORT[::3], stride=2, again=again), "failed")


def test_at_random_times_from_another_thread():
    """As PyThreadState_SetAsyncExc() raises them."""

    def run(parent):
        tally, spare, chosen = Tally(Counter(), []), [], random.Random(5)
        for name in ("repeated", "async", "plan.run", "state"):
            expected = Expected.of(parent, KINDS[name], spare)
            for _ in range(8):
                after = AfterTime(5e-6 * 400 ** chosen.random())
                tally.add(name, inject(parent, KINDS[name], after, spare=spare), expected)
        close(spare)
        return tally

    assert qccl.run_ranks(2, run)[0].wrong == []


def over_ucx(limit: float, *arguments: str) -> None:
    ended = start_plain(2, "tests/support/interruptions.py", *arguments, limit=limit)
    assert ended.status == 0, ended.output


@needs_ucx
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "stride"), [("entries", 11), ("instructions", 149)])
def test_sample_over_ucx(mode, stride):
    over_ucx(100, mode, str(stride), "repeated", "async", "plan.start", "state")


@needs_ucx
@pytest.mark.processes
def test_at_random_times_over_ucx():
    over_ucx(100, "times", "2", "1", "repeated", "async", "plan.run")


@needs_ucx
@pytest.mark.processes
@pytest.mark.every_interruption
@pytest.mark.parametrize("name", KINDS)
def test_every_one_over_ucx(name):
    over_ucx(1800, "entries", "1", name)
    over_ucx(1800, "instructions", str(STRIDES[name in LONG]), name)


@needs_ucx
@pytest.mark.processes
@pytest.mark.every_interruption
def test_ten_minutes_over_ucx():
    over_ucx(1200, "times", "600", "2")


def warm(comm):
    """An array, of which three all-reduces have been made."""
    x = np.ones(300, np.float32)
    for _ in range(3):
        comm.quantized_allreduce(x, codec="none")
    return x


@on_ranks(2)
def test_a_call_that_nobody_could_settle(comm, warmed: threading.Barrier, interrupted: threading.Barrier, monkeypatch):
    """Where exceptions ended the guard's own work, too, the next use of the communicator ends the group."""
    x, other = warm(comm), np.ones(100, np.float32)
    warmed.wait(20)
    if comm.rank:
        interrupted.wait(20)
        with pytest.raises(qccl.PeerLost, match="rank 0 gave up: exceptions have ended an earlier call"):
            for _ in range(2):  # rank 0 may have sent all of the first one
                comm.quantized_allreduce(x, codec="none")
        return
    usual = comm._session.engine.start

    def start(*arguments):
        usual(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(comm._session.engine, "start", start)
        patch.setattr(Session, "interrupted", lambda *arguments: None)
        threading.Timer(0.2, interrupted.wait).start()
        with pytest.raises(KeyboardInterrupt):
            comm.quantized_allreduce(x, codec="none")
    for use in (comm.barrier, comm.check, lambda: comm.quantized_allreduce(other)):
        with pytest.raises(qccl.PeerLost, match="exceptions have ended an earlier call"):
            use()
    assert comm.calls == 3


@on_ranks(2)
def test_an_exception_that_a_handler_of_a_signal_catches(comm, warmed: threading.Barrier, monkeypatch):
    """A call in a handler that fails takes no lock from the call in whose middle it was made."""
    x = warm(comm)
    warmed.wait(20)
    usual, refused = comm.transport.poll, []

    def poll(idle=0):
        if not refused:
            with pytest.raises(qccl.ArgumentError, match="codec"):
                comm.quantized_allreduce(x, codec=7)
            refused.append(True)
        return usual(idle=idle)

    monkeypatch.setattr(comm.transport, "poll", poll)
    comm.quantized_allreduce(x, codec="none")
    comm.quantized_allreduce(x, codec="none")
    assert (x[0], refused) == (2.0**5, [True])


class Guarded:
    """Has a method that is guarded, as those of a communicator are."""

    def __init__(self, comm):
        self._session = comm._session

    @guarded
    def run(self, function):
        return function()


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(20)


@pytest.fixture
def quick_switches():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@on_ranks(2)
def test_functions_of_a_work_that_look_at_it_while_calls_are_made(comm, quick_switches):
    xs, y = [np.ones(256, np.float32) for _ in range(4)], np.ones(64, np.float32)
    looked = threading.Semaphore(0)

    def look(work):
        for _ in range(20):
            work.wait()
            assert work.is_completed()
        with pytest.raises(qccl.ArgumentError, match="add_done_callback"):
            comm.barrier()
        looked.release()

    for _ in range(60):
        works = [comm.quantized_allreduce(x, async_op=True) for x in xs]
        for work in works:
            work.add_done_callback(look)
        comm.quantized_allreduce(y)
        comm.quantized_allreduce(y)
        for work in works:
            work.wait()
        for _ in works:
            assert looked.acquire(timeout=20)
    assert comm.calls == 360


@on_ranks(2)
def test_a_thread_that_waits_while_another_one_makes_calls(comm):
    x, y = np.ones(1 << 18, np.float32), np.ones(64, np.float32)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            waited = pool.submit(comm.quantized_allreduce(x, codec="none", async_op=True).wait)
            for _ in range(3):
                comm.quantized_allreduce(y, codec="none")
            assert waited.result(20) is x
    assert x[0] == 2.0**20


@on_ranks(1)
def test_a_guard_leaves_the_marks_of_other_threads(comm):
    """One that began before the mark was set, and one that began and ended meanwhile."""
    session, guards, begun, go = comm._session, Guarded(comm), threading.Event(), threading.Event()
    waits = threading.Thread(target=guards.run, args=(lambda: begun.set() or go.wait(20),))

    def call():
        session.unsettle(0)
        mark = session.mark()
        go.set()
        waits.join()
        in_thread(lambda: guards.run(lambda: session.unsettle(0)))
        assert session.mark() is mark

    waits.start()
    assert begun.wait(20)
    guards.run(call)
    assert not session.unsettled
    comm.check()


@on_ranks(1)
def test_an_exception_in_one_thread_ends_the_group_for_another_one_that_waits(comm):
    guards = Guarded(comm)

    def fails():
        comm._session.unsettle(0)
        raise KeyboardInterrupt

    def call():
        comm._session.unsettle(0)
        with pytest.raises(KeyboardInterrupt):
            in_thread(lambda: guards.run(fails))
        assert comm._session.mark() is not None
        comm.check()

    with pytest.raises(qccl.PeerLost, match="gave up: KeyboardInterrupt"):
        guards.run(call)


@pytest.mark.parametrize("is_alive", [False, True])
@on_ranks(1)
def test_a_mark_that_another_thread_has_abandoned(comm, monkeypatch, is_alive):
    """A new thread may have the number of one that has ended, so a mark alone does not tell that its thread works."""
    ended, go = threading.Event(), threading.Event()

    def abandon():
        comm._session.unsettle(0)
        raise KeyboardInterrupt

    def work():
        with pytest.raises(KeyboardInterrupt):
            Guarded(comm).run(abandon)
        ended.set()
        go.wait(20 * is_alive)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "interrupted", lambda *arguments: None)
        thread = threading.Thread(target=work)
        thread.start()
        ended.wait(20) if is_alive else thread.join()
    assert comm._session.unsettled
    for use in (comm.check, comm.check, comm.barrier):
        with pytest.raises(qccl.PeerLost, match="exceptions have ended an earlier call"):
            in_thread(use)
    go.set()
    thread.join()


def test_a_guard_without_the_variables_that_are_read_is_refused():
    def renamed(session, earlier):
        return session, earlier

    with pytest.raises(TypeError, match=r"renamed lacks the variables \['before'\]"):
        register_guard(renamed)
