"""The host engine on threads: deadlines, failures, and ranks that leave."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import patience
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Counting, near_sum, outcomes, ramp

from qccl import lifetime
from qccl.collectives.allreduce import one_shot
from qccl.dtypes import FLOAT32
from qccl.engine.control import CONTROL_TAG
from qccl.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost
from qccl.host import engine as host
from qccl.host import shutdown
from qccl.transports import loopback

#: of calls that end because of another rank: longer than outcomes() waits for them
NEVER = 10_000.0

# -- deadlines and failure -----------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come():
    begun = threading.Event()

    def run(t):
        caller = Caller(t, timeout=0.3 if t.rank == 1 else NEVER)
        if t.rank == 0:
            x = ramp(t.rank, 100)
            execution = caller.start(caller.program(100), x, np.empty_like(x))
            begun.set()  # before the deadline of rank 1, which would miss rank 0, too
            execution.run()
        elif t.rank == 1:
            assert begun.wait(60)
            caller.allreduce(ramp(t.rank, 100))

    first, second, absent = outcomes(3, run)
    assert absent is None
    assert (type(first), type(second)) == (PeerLost, CollectiveTimeout), (first, second)
    assert all("rank 2 did not make this call" in str(e) for e in (first, second))


def test_several_ranks_that_do_not_come():
    def run(t):
        caller = Caller(t, timeout=0.3)
        if t.rank == 0:
            caller.allreduce(ramp(t.rank, 100))

    error = outcomes(3, run)[0]
    assert isinstance(error, CollectiveTimeout) and "ranks 1, 2 did not make this call" in str(error), error


def test_the_deadline_of_a_call_that_is_queued():
    """It is nearer than that of the call before, whose memory it uses."""

    def run(t):
        caller = Caller(t, timeout=30.0)
        if t.rank:
            return
        x = ramp(t.rank, 100)
        caller.start(caller.program(100), x, x)
        caller.timeout = 0.3
        caller.start(caller.program(100), x, x).run()

    error = outcomes(2, run)[0]
    assert isinstance(error, CollectiveTimeout) and "it is queued behind calls that have not ended" in str(error), error


def test_only_one_of_two_calls_in_flight_ends():
    """The deadline of the other one, which was later, is then the nearest."""

    def run(t):
        caller = Caller(t)
        first, second = ramp(t.rank, 100), ramp(t.rank, 200)
        execution = caller.start(caller.program(100), first, np.empty_like(first))
        if t.rank:
            execution.run()
            time.sleep(2)
            return None
        caller.timeout = 0.3
        other = caller.start(caller.program(200), second, np.empty_like(second))
        execution.run()
        assert execution.done and not other.done
        other.run(time.monotonic() + 60)
        return "no timeout"

    error, _ = outcomes(2, run)
    assert isinstance(error, CollectiveTimeout) and "rank 1 did not make this call" in str(error), error


def test_the_nearest_deadline_counts():
    """Also where it is that of the call before."""

    def run(t):
        if t.rank:
            return
        caller = Caller(t, timeout=0.3)
        x = ramp(t.rank, 100)
        caller.start(caller.program(100), x, np.empty_like(x))
        caller.timeout = 20
        caller.start(caller.program(100), x, np.empty_like(x)).run(time.monotonic() + 60)

    error, _ = outcomes(2, run)
    assert isinstance(error, CollectiveTimeout) and "(call 0 of the group)" in str(error), error


class Paused:
    """A transport whose rank is paused once, when it has posted ``receives`` receives of data, until ``came()``.

    What comes meanwhile it hears of right after that, if ``told``. From then on each look takes it a moment.
    """

    def __init__(self, transport, receives, seconds, came, *, told):
        self._transport, self._after, self._seconds, self._came, self._told = transport, receives, seconds, came, told
        self._receives, self._pausing = 0, False

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def pause(self):
        self._receives, self._pausing = 0, True

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        self._receives += tag != CONTROL_TAG
        self._transport.receive(peer, tag, address, nbytes, token, arrived=arrived)

    def poll(self, *, idle):
        if not self._pausing or self._receives < self._after:
            time.sleep(0 if self._pausing else 0.01)
            return self._transport.poll(idle=idle)
        self._pausing = False
        found, begin, has_come = [], time.monotonic(), False
        limit = patience.Limit(30)
        while not has_come or time.monotonic() < begin + self._seconds:
            assert limit.left(), "the other rank has not sent its data"
            has_come = self._came()  # before the last look
            if self._told:
                found += self._transport.poll(idle=1)
            else:
                time.sleep(0.01)
        return found


@pytest.mark.parametrize(("chunks", "receives", "told"), [(1, 0, False), (1, 0, True), (30, 29, True)])
def test_a_rank_that_was_paused_past_its_deadline_ends_its_call(chunks, receives, told):
    """Everything has come meanwhile, or before, and the result is right; also in the next run of the program."""
    begun = [threading.Event() for _ in range(2)]
    timeout = 1.0 if receives else 0.3  # rank 0 has this time to post its receives
    sent, runs = [], []

    def came():
        return sum(nbytes for _, _, nbytes in sent) >= len(runs) * chunks * CODEC.encoded_nbytes(64, FLOAT32)

    def run(t):
        if t.rank == 0:
            caller = Caller(Paused(t, receives, timeout + 0.1, came, told=told), timeout=timeout)
        else:
            caller = Caller(Counting(t), timeout=NEVER)
            caller.transport.sent = sent
        program = caller.engine.compile(
            one_rank(one_shot, t.rank, 2, 64 * chunks, FLOAT32, CODEC, chunk_elements=64, depth=chunks)
        )
        x = ramp(t.rank, 64 * chunks)
        ys = [np.empty_like(x) for _ in begun]
        first = 1 if receives else 0  # rank 0 posts no receives before rank 1 has begun
        for y, has_begun in zip(ys, begun, strict=True):
            if t.rank == 0:
                caller.transport.pause()
                runs.append(y)
            if t.rank != first:
                assert has_begun.wait(60)
            execution = caller.start(program, x, y)
            has_begun.set()
            execution.run()
        return ys

    for ys in outcomes(2, run):
        assert isinstance(ys, list), ys
        assert all(near_sum(y, 2) for y in ys)


def test_a_slow_rank_cannot_keep_a_call_beyond_its_deadline():
    """It makes progress all the time; without a deadline this would take a minute and more."""

    def run(t):
        caller = Caller(t, timeout=NEVER if t.rank else 0.3)
        x = ramp(t.rank, 100_000)
        execution = caller.start(caller.program(len(x), chunk_elements=64), x, np.empty_like(x))
        deadline = time.monotonic() + 60
        while t.rank and time.monotonic() < deadline:  # until rank 0 has given up
            execution.step()
            time.sleep(0.01)
        execution.run()

    error = outcomes(2, run)[0]
    assert isinstance(error, CollectiveTimeout) and "rank 1" in str(error) and "[" not in str(error), error


def test_what_a_call_waits_for_is_named():
    """Ranks, where it waits for any; or its own part."""

    def run(t):
        caller = Caller(t, timeout=NEVER)
        x = ramp(t.rank, 40_000)
        execution = caller.start(caller.program(len(x)), x, np.empty_like(x))
        found, deadline = set(), time.monotonic() + 60
        while not execution.done and time.monotonic() < deadline:
            found.add(execution.waits_for())
            execution.step()
        caller.close()
        return found

    for rank, found in enumerate(outcomes(2, run)):
        peer = 1 - rank
        assert found <= {
            f"rank {peer} did not make this call",
            f"waiting to send to rank {peer}",
            f"waiting to receive from rank {peer}",
            f"waiting to send to rank {peer} and to receive from rank {peer}",
            "every rank has made this call, and this rank has not ended its own part",
        }
        assert len(found) > 1


def test_a_rank_that_stops_in_the_middle():
    def run(t):
        caller = Caller(t, timeout=NEVER if t.rank == 1 else 2)
        x = ramp(t.rank, 100_000)
        y = np.empty_like(x)
        execution = caller.start(caller.program(len(x), chunk_elements=640), x, y)
        if t.rank == 1:
            with contextlib.suppress(PeerLost):  # the others may reach their deadlines meanwhile
                for _ in range(40):
                    execution.step()
            return execution.done
        execution.run()

    first, stopped, third = outcomes(3, run)
    assert stopped is False
    assert all(isinstance(e, CollectiveTimeout | PeerLost) for e in (first, third)), (first, third)


def test_a_rank_that_gives_up_is_heard_at_once():
    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 0:
            time.sleep(0.1)
            caller.engine.abort("rank 0 gave up: out of paper")
            return
        caller.allreduce(ramp(t.rank, 100))

    _, *errors = outcomes(3, run)
    assert all(isinstance(e, PeerLost) and "out of paper" in str(e) for e in errors)


def test_a_rank_that_closed_is_missed_at_once():
    def run(t):
        caller = Caller(t, timeout=NEVER)
        caller.allreduce(ramp(t.rank, 100))
        if t.rank == 0:
            caller.engine.close(0.2)
            return
        caller.allreduce(ramp(t.rank, 100))

    _, *errors = outcomes(3, run)
    assert all(isinstance(e, PeerLost) for e in errors)
    assert any(
        "rank 0 has closed its communicator" in str(e) and "called allreduce(count=100" in str(e) for e in errors
    )


def test_a_call_without_a_rank_that_has_closed_fails_at_once():
    """Nobody comes to end it: without the news it would last until its deadline."""

    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 0:
            caller.engine.close(0.2)
            return
        deadline = time.monotonic() + 60
        while not caller.engine._left and time.monotonic() < deadline:
            caller.engine.step()
        caller.allreduce(ramp(t.rank, 100))

    _, error = outcomes(2, run)
    assert isinstance(
        error, PeerLost
    ) and "rank 0 has closed its communicator, and rank 1 called allreduce(count=100" in str(error)


def test_a_rank_that_closes_while_a_call_waits_for_it_ends_that_call_at_once():
    begun = threading.Event()

    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 0:
            assert begun.wait(60)
            caller.engine.close(0.2)
            return
        x = ramp(t.rank, 100)
        execution = caller.start(caller.program(100), x, np.empty_like(x))
        begun.set()
        execution.run()

    _, error = outcomes(2, run)
    assert isinstance(
        error, PeerLost
    ) and "rank 0 has closed its communicator, and rank 1 called allreduce(count=100" in str(error)


def test_a_failed_engine_raises_the_same_again():
    def run(t):
        caller = Caller(t, timeout=NEVER)
        if t.rank == 1:
            return
        x = ramp(0, 64)
        programs = [caller.program(64) for _ in range(2)]
        runs = [caller.start(programs[0], x, np.empty_like(x))]
        caller.timeout = 0.2  # of the last call only: an engine that has failed starts none
        runs.append(caller.start(programs[1], x, np.empty_like(x)))
        again = (lambda: caller.allreduce(x), lambda: caller.start(programs[0], x, np.empty_like(x)))
        raised = []
        for use in (runs[0].run, runs[1].run, runs[1].step, *again):
            with pytest.raises(CollectiveTimeout) as info:
                use()
            raised.append(str(info.value))
        caller.engine.close()
        return raised

    messages, _ = outcomes(2, run)
    assert len(set(messages)) == 1


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
        x = ramp(t.rank, 100)
        if t.rank == 0:
            caller.start(caller.program(100), x, np.empty_like(x))
            begun.set()
            caller.engine.abort("rank 0 gave up: out of paper")
            return
        assert begun.wait(60)
        time.sleep(0.2)
        caller.start(caller.program(100), x, np.empty_like(x)).run()

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
        caller = Caller(t, timeout=NEVER)
        x = ramp(t.rank, 105 if t.rank == 0 else 100)
        caller.start(caller.program(len(x)), x, np.empty_like(x)).run()

    for error in outcomes(3, run):
        assert isinstance(error, MismatchError) and "count=105" in str(error), error


def test_an_abort_does_not_wait_for_a_thread_that_is_held_up(monkeypatch):
    """That one fails when it is back."""
    monkeypatch.setattr(host, "_HALT_SECONDS", 0.1)
    inside, aborted = threading.Event(), threading.Event()

    def run(t):
        if t.rank:
            aborted.wait(60)
            return None
        caller = Caller(t, timeout=NEVER)
        poll = t.poll

        def held_up(*, idle):
            inside.set()
            assert aborted.wait(60)
            return poll(idle=idle)

        t.poll = held_up
        x, raised = ramp(0, 100), []
        execution = caller.start(caller.program(100), x, np.empty_like(x))

        def wait():
            try:
                execution.run()
            except PeerLost as error:
                raised.append(str(error))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert inside.wait(60)
        caller.engine.abort("enough")
        aborted.set()
        thread.join(60)
        return raised

    assert outcomes(2, run)[0] == ["enough"]


def test_an_interrupt_in_the_middle_reaches_the_other_ranks():
    def run(t):
        caller = Caller(t, timeout=NEVER)
        x = ramp(t.rank, 100)
        execution = caller.start(caller.program(100), x, np.empty_like(x))
        if t.rank == 0:
            caller.transport.poll = lambda *, idle: (_ for _ in ()).throw(KeyboardInterrupt())
        execution.run()

    interrupted, other = outcomes(2, run)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert isinstance(other, PeerLost) and "rank 0 gave up: KeyboardInterrupt" in str(other)


def test_closing_waits_for_the_others_but_not_for_ever():
    def run(t):
        caller = Caller(t)
        start = time.monotonic()
        if t.rank == 0:
            caller.engine.close(0.2)
            caller.engine.close(0.2)
        return time.monotonic() - start

    waited, _ = outcomes(2, run)
    assert waited > 0.1


def test_a_closed_engine_refuses_calls():
    def run(t):
        caller = Caller(t)
        program = caller.program(10)
        caller.close()
        caller.start(program, ramp(0, 10), ramp(0, 10))

    assert all(isinstance(e, ArgumentError) and "closed" in str(e) for e in outcomes(2, run))


def test_an_exception_that_was_caught_is_not_what_ended_the_process(monkeypatch):
    """pytest and notebooks keep the last one where Python keeps the one that ends the program."""
    try:
        raise ValueError("caught")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert lifetime.unhandled() is None
        monkeypatch.delattr(sys, "last_value")
        assert lifetime.unhandled() is None


def test_engines_say_goodbye_before_their_transports_end():
    """Also where the transport's module was imported when there were engines already, as MPI's may be."""
    program = """
import atexit
import qccl
from qccl.transports.loopback import LoopbackGroup

def make():
    return qccl.Communicator._from_transport(LoopbackGroup(1).transport(0), timeout=5)

first = make()
atexit.register(lambda: print([comm._session.engine._failure is not None for comm in (first, second)]))
second = make()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[True, True]", ended
