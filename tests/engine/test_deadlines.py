"""The host engine's calls that do not end: deadlines, ranks that give up, and exceptions in the middle."""

from __future__ import annotations

import threading
import time

import numpy as np
import patience
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Counting, Wrapped, near_sum, outcomes, ramp

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import CollectiveTimeout, PeerLost, QcclError
from qccl.collectives.allreduce import one_shot
from qccl.engine.control import CONTROL_TAG

#: of calls that end because of another rank: longer than outcomes() waits for them
NEVER = 10_000.0


def test_several_ranks_that_do_not_come():
    error = outcomes(3, lambda t: t.rank or Caller(t, timeout=0.3).begin(100).run())[0]
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
    missed = threading.Event()

    def run(t):
        caller = Caller(t)
        execution = caller.begin(100)
        if t.rank:
            execution.run()
            assert missed.wait(60)
            return
        caller.timeout = 0.3
        other = caller.begin(200)
        execution.run()
        assert execution.done and not other.done
        try:
            other.run(time.monotonic() + 60)
        finally:
            missed.set()

    error, _ = outcomes(2, run)
    assert isinstance(error, CollectiveTimeout) and "rank 1 did not make this call" in str(error), error


def test_the_nearest_deadline_counts():
    """Also where it is that of the call before."""

    def run(t):
        if t.rank:
            return
        caller = Caller(t, timeout=0.3)
        caller.begin(100)
        caller.timeout = 20
        caller.begin(100).run(time.monotonic() + 60)

    error, _ = outcomes(2, run)
    assert isinstance(error, CollectiveTimeout) and "(call 0 of the group)" in str(error), error


class Paused(Wrapped):
    """A transport whose rank is paused once, when it has posted ``receives`` receives of data, until ``came()``.

    What comes meanwhile it hears of right after that, if ``told``. From then on each look takes it a moment.
    """

    def __init__(self, transport, receives, seconds, came, *, told):
        super().__init__(transport)
        self._after, self._seconds, self._came, self._told = receives, seconds, came, told
        self._receives, self._pausing = 0, False

    def pause(self):
        self._receives, self._pausing = 0, True

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        self._receives += tag != CONTROL_TAG
        self.wrapped.receive(peer, tag, address, nbytes, token, arrived=arrived)

    def poll(self, *, idle):
        if not self._pausing or self._receives < self._after:
            time.sleep(0 if self._pausing else 0.01)
            return self.wrapped.poll(idle=idle)
        self._pausing = False
        found, begin, has_come = [], time.monotonic(), False
        limit = patience.Limit(30)
        while not has_come or time.monotonic() < begin + self._seconds:
            assert limit.left(), "the other rank has not sent its data"
            has_come = self._came()  # before the last look
            if self._told:
                found += self.wrapped.poll(idle=1)
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
        execution = caller.begin(100_000, chunk_elements=64)
        deadline = time.monotonic() + 60
        while t.rank and time.monotonic() < deadline:  # until rank 0 has given up
            execution.step()
            time.sleep(0.01)
        execution.run()

    error = outcomes(2, run)[0]
    assert isinstance(error, CollectiveTimeout) and "rank 1" in str(error) and "[" not in str(error), error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_middle_reaches_the_other_ranks(kind):
    def run(t):
        caller = Caller(t, timeout=NEVER)
        execution = caller.begin(100)
        if t.rank == 0:
            caller.transport.poll = lambda *, idle: (_ for _ in ()).throw(kind())
        try:
            execution.run()
        finally:
            with pytest.raises(PeerLost, match=f"rank 0 gave up: {kind.__name__}"):
                caller.begin(100)

    raised, other = outcomes(2, run)
    assert isinstance(raised, kind)
    assert isinstance(other, PeerLost) and f"rank 0 gave up: {kind.__name__}" in str(other)


class Interrupting(Wrapped):
    """A transport that calls ``interrupt`` in the poll that completes the first transfer of data, as a signal handler
    would, and records how it is used after abort().
    """

    def __init__(self, transport):
        super().__init__(transport)
        self.interrupt, self.used, self._data = None, None, set()

    def _use(self, name):
        if self.used is not None:
            self.used.append(name)

    def send(self, peer, tag, address, nbytes, token):
        self._use("send")
        self._data |= {token} if tag != CONTROL_TAG else set()
        self.wrapped.send(peer, tag, address, nbytes, token)

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        self._use("receive")
        self._data |= {token} if tag != CONTROL_TAG else set()
        self.wrapped.receive(peer, tag, address, nbytes, token, arrived=arrived)

    def poll(self, *, idle):
        self._use("poll")
        found = list(self.wrapped.poll(idle=idle))
        if self.interrupt is not None and self._data & set(found):
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        return found

    def abort(self, reason):
        self.used = []
        self.wrapped.abort(reason)


def abort(engine, execution):
    engine.fail(PeerLost("enough"))


def await_the_same_call(engine, execution):
    with pytest.raises(RuntimeError, match="started or waited for a call while qccl was running one"):
        execution.run()


@pytest.mark.parametrize(
    ("interrupt", "raised"),
    [(abort, "enough"), (await_the_same_call, "started or waited for a call while qccl was running one")],
)
def test_a_failure_inside_a_poll_ends_the_use_of_the_transport(interrupt, raised):
    """It has been aborted by then, although the poll returns completed transfers."""

    def run(t):
        transport = Interrupting(t)
        caller = Caller(transport)
        execution = caller.begin(64 * 200, chunk_elements=64, depth=2)  # many transfers are left
        if t.rank == 0:
            transport.interrupt = lambda: interrupt(caller.engine, execution)
        with pytest.raises((QcclError, RuntimeError), match=raised):
            execution.run()
        return transport.used

    assert outcomes(2, run)[0] == []
