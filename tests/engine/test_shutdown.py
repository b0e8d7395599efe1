"""The end of a group on the host: ranks that close, fail, or disagree, and what the others hear of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import patience
import pytest
from threads import Caller, outcomes

import qccl
from qccl.base import lifetime
from qccl.base.errors import MismatchError, PeerLost
from qccl.engine.control import ControlKind, Header, data_nbytes
from qccl.engine.host import engine as host
from qccl.engine.host import shutdown
from qccl.transports import loopback

#: of calls that end because of another rank: longer than outcomes() waits for them
NEVER = 10_000.0


def test_a_program_that_an_error_of_another_group_ends(monkeypatch):
    """The other group numbers ranks in another way: for this group it is rank 2 that gave up."""
    monkeypatch.setattr(host, "unhandled", lambda: PeerLost("rank 1 was lost", 1))

    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 2:
            caller.engine._leave_at_exit()
            return
        patience.wait_until(lambda: caller.engine._left, caller.engine.step)
        caller.begin(100).run()

    for error in outcomes(3, run)[:2]:
        assert isinstance(error, PeerLost), error
        assert (error.rank, error.reason) == (2, "PeerLost: rank 1 was lost")


def test_a_rank_that_closed_before_a_call_is_missed_at_once():
    """Nobody comes to end the call: without the news it would last until its deadline."""

    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 0:
            caller.engine.close(0.2)
            return
        patience.wait_until(lambda: caller.engine._left, caller.engine.step)
        caller.begin(100).run()

    text = "rank 0 has closed its communicator, and rank 1 called allreduce(count=100"
    error = outcomes(2, run)[1]
    assert isinstance(error, PeerLost) and text in str(error), error


def test_a_rank_that_calls_while_another_closes_is_still_heard():
    """The header of its call is not its last message: the close message comes after it."""

    def run(t):
        caller = Caller(t)
        if t.rank:
            for message in (caller.header(1000), Header(ControlKind.CLOSE, 0, "rank 1 left the group")):
                caller.engine._loop.broadcast_control(message.pack() + data_nbytes(0))
                caller.engine._shutdown.flush()
            return None
        caller.engine.close(60.0)
        return caller.engine not in lifetime._kept

    assert outcomes(2, run)[0] is True


def test_an_exception_in_close_reaches_the_other_ranks(monkeypatch):
    """Those that close, too, would wait for this rank's last message, as in grow(), until their deadline."""
    packed, raised = shutdown.Shutdown._packed, list[Exception]()

    def interrupted(self, kind, error):
        if threading.current_thread().name == "rank 0" and not raised:
            raised.append(error)
            raise ConnectionResetError("of a signal's handler")
        return packed(self, kind, error)

    monkeypatch.setattr(shutdown.Shutdown, "_packed", interrupted)

    def run(comm):
        if comm.rank == 0:
            with pytest.raises(ConnectionResetError):
                comm.close()
            return ""
        comm.close()
        return str(comm._session.engine._shutdown.left[0])

    assert qccl.run_ranks(2, run)[1] == "rank 0 gave up: ConnectionResetError: of a signal's handler"


class OfRank:
    """The seconds that each rank of outcomes() adds to the present time; ``asked`` is released when it does."""

    def __init__(self, *seconds):
        self._seconds, self.asked = seconds, threading.Semaphore(0)

    def __radd__(self, now):
        self.asked.release()
        return now + self._seconds[int(threading.current_thread().name.removeprefix("rank "))]


def test_last_words_get_out_before_a_failed_rank_lets_go(monkeypatch):
    """Another message is before them, and the other rank does not look just now."""
    monkeypatch.setattr(shutdown, "_FLUSH_SECONDS", OfRank(NEVER, 0.1))
    monkeypatch.setattr(loopback, "_CONTROL_NBYTES", 0)  # what is not taken is lost
    begun = threading.Event()

    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 0:
            caller.begin(100)
            begun.set()
            caller.engine.fail(PeerLost("rank 0 gave up: out of paper"))
            return
        assert begun.wait(60)
        time.sleep(0.2)
        caller.begin(100).run()

    _, error = outcomes(2, run)
    assert isinstance(error, PeerLost) and str(error) == "rank 0 gave up: out of paper", error


def test_ranks_that_disagree_wait_until_the_others_have_heard(monkeypatch):
    """The last one comes after they have sent their last words."""
    seconds = OfRank(NEVER, NEVER, 0.1)
    monkeypatch.setattr(shutdown, "_MISMATCH_SECONDS", seconds)
    monkeypatch.setattr(loopback, "_CONTROL_NBYTES", 0)  # what is not taken is lost

    def run(t):
        if t.rank == 2:
            assert all(seconds.asked.acquire(timeout=60) for _ in range(2))
        Caller(t, timeout=NEVER).begin(105 if t.rank == 0 else 100).run()

    for error in outcomes(3, run):
        assert isinstance(error, MismatchError) and "count=105" in str(error), error


def test_an_abort_does_not_wait_for_a_thread_that_is_held_up(monkeypatch):
    """That one fails when it is back."""
    monkeypatch.setattr(host, "_HALT_SECONDS", 0.1)
    inside, aborted = threading.Event(), threading.Event()

    def run(t):
        if t.rank:
            return aborted.wait(60)
        caller, poll = Caller(t, timeout=NEVER), t.poll

        def held_up(*, idle):
            inside.set()
            assert aborted.wait(60)
            return poll(idle=idle)

        t.poll = held_up
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(caller.begin(100).run)
            assert inside.wait(60)
            caller.engine.fail(PeerLost("enough"))
            aborted.set()
            with pytest.raises(PeerLost, match=r"^enough$"):
                waits.result(60)

    assert outcomes(2, run) == [None, True]


def test_closing_waits_for_the_others_but_not_for_ever():
    """The time of the wait is a bound from below, and that of outcomes() one from above."""

    def run(t):
        if t.rank:
            return True
        engine, start = Caller(t).engine, time.monotonic()
        engine.close(0.2)
        engine.close(0.2)
        return time.monotonic() - start > 0.1

    assert outcomes(2, run) == [True, True]


@pytest.mark.processes
def test_engines_say_goodbye_before_their_transports_end():
    """Also where the transport's module was imported when there were engines already, as MPI's may be."""
    program = """
import atexit
import qccl
from qccl.transports.loopback import LoopbackGroup

def make():
    return qccl.Communicator._from_transport(LoopbackGroup(1).transport(0), timeout=5)

first = make()
atexit.register(lambda: print([comm._session.end.failure is not None for comm in (first, second)]))
second = make()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[True, True]", ended
