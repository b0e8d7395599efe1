"""The host engine's failure paths on threads: a call that ends another one, and ranks that leave in the middle."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, outcomes, ramp

from qccl import lifetime
from qccl.collectives.allreduce import one_shot
from qccl.dtypes import FLOAT32
from qccl.engine.base import Progress
from qccl.engine.control import CONTROL_TAG, Block, Header, Kind, data_nbytes, mismatch_error
from qccl.errors import EngineError, PeerLost, QcclError


class Interrupting:
    """A transport that calls ``interrupt`` in the poll that completes the first transfer of data, as a signal handler
    would, and records how it is used after abort().
    """

    def __init__(self, transport):
        self._transport, self.interrupt, self.used = transport, None, None
        self._data = set()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def _use(self, name):
        if self.used is not None:
            self.used.append(name)

    def send(self, peer, tag, address, nbytes, token):
        self._use("send")
        self._data |= {token} if tag != CONTROL_TAG else set()
        self._transport.send(peer, tag, address, nbytes, token)

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        self._use("receive")
        self._data |= {token} if tag != CONTROL_TAG else set()
        self._transport.receive(peer, tag, address, nbytes, token, arrived=arrived)

    def poll(self, *, idle):
        self._use("poll")
        found = list(self._transport.poll(idle=idle))
        if self.interrupt is not None and self._data & set(found):
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        return found

    def abort(self, reason):
        self.used = []
        self._transport.abort(reason)


def abort(engine, execution):
    engine.abort("enough")


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
        program = caller.engine.compile(
            one_rank(
                one_shot, t.rank, 2, 64 * 200, FLOAT32, CODEC, chunk_elements=64, depth=2
            )  # many transfers are left
        )
        x = ramp(t.rank, 64 * 200)
        execution = caller.start(program, x, np.empty_like(x))
        if t.rank == 0:
            transport.interrupt = lambda: interrupt(caller.engine, execution)
        with pytest.raises((QcclError, RuntimeError), match=raised):
            execution.run()
        return transport.used

    assert outcomes(2, run)[0] == []


def test_closing_in_the_middle_of_a_call_ends_it_on_all_ranks():
    closed = threading.Event()

    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 1000)
        if t.rank:
            assert closed.wait(60)
        execution = caller.start(caller.program(1000), x, np.empty_like(x))
        if t.rank == 0:
            caller.engine.close(1.0)
            closed.set()
        with pytest.raises(PeerLost) as info:
            execution.run()
        return str(info.value)

    assert outcomes(2, run) == ["rank 0 closed the group in the middle of a call"] * 2


def test_a_rank_that_calls_while_another_closes_is_still_heard():
    """The header of its call is not its last message: the close message comes after it."""

    def run(t):
        caller = Caller(t)
        if t.rank:
            for message in (caller.header(1000), Header(Kind.CLOSE, 0, "rank 1 left the group")):
                caller.engine._loop.broadcast_control(message.pack() + data_nbytes(0))
                caller.engine._shutdown.flush()
            return None
        caller.engine.close(3.0)
        return caller.engine not in lifetime._kept

    assert outcomes(2, run)[0] is True


def test_a_thread_that_sleeps_is_woken_by_a_run_that_nobody_waits_for():
    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 1000)
        for _ in range(2):
            execution = caller.start(caller.program(1000), x, np.empty_like(x), progress=Progress.SOON)
            thread = caller.engine._progress_thread
            deadline = time.monotonic() + 60
            while not (execution.done and thread._asleep) and time.monotonic() < deadline:
                time.sleep(0.005)
        done = execution.done
        caller.close()
        return done

    assert outcomes(2, run) == [True] * 2


def test_a_message_of_another_version_is_refused():
    message = bytearray(Header(Kind.CLOSE, 0, "rank 1 left the group").pack() + data_nbytes(0))
    assert Header.unpack(bytes(message), 1).kind is Kind.CLOSE
    message[4] += 1
    with pytest.raises(EngineError, match="rank 1 sent a control message that this version"):
        Header.unpack(bytes(message), 1)


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4096])
def test_workspace_begins_at_a_cache_line(nbytes):
    blocks = [Block(nbytes) for _ in range(20)]
    assert all(block.address % 64 == 0 and block.read(0, nbytes) == bytes(nbytes) for block in blocks)


@pytest.mark.parametrize(
    ("calls", "texts", "expected"),
    [
        ((4, 5), ("f", "f"), r"rank 0 called f \(call 4 of the group\), rank 1 called f \(call 5 of the group\); all"),
        ((4, 4), ("x" * 5000, "x" * 5001), r"called x+ \(call 4 of the group\); they differ after the first \d+ bytes"),
    ],
)
def test_a_mismatch_names_the_difference(calls, texts, expected):
    """It is in the number of the call, or in the part of a text that does not fit a header."""
    mine, theirs = (Header(Kind.CALL, call, text).pack() for call, text in zip(calls, texts, strict=True))
    assert re.search(expected, str(mismatch_error(mine, theirs, 0, 1)))


def test_headers_of_long_texts_differ_where_their_ends_do():
    """The text in a header is truncated; its digest is that of the whole."""
    headers = [Header(Kind.CALL, 0, "x" * 5000 + end).pack() for end in "ab"]
    assert headers[0] != headers[1] and len(headers[0]) == len(headers[1])
