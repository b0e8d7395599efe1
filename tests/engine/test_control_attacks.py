"""Messages that no honest rank sends: each ends the call with an error that names the rank, and none with a wrong sum.

Over the loopback transport, and over UCX.
"""

from __future__ import annotations

import functools
import re
import struct
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hostile import (
    Changed,
    announcing,
    kind_of,
    of_call,
    of_kind,
    only_data,
    only_headers,
    outcomes_over_ucx,
    sequence_of,
)
from schedule_cases import one_rank
from start_ranks import needs_ucx
from threads import CODEC, Caller, hear, near_sum, outcomes, ramp

from qccl._host import RUNS_IN_FLIGHT
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import EngineError, MismatchError, PeerLost
from qccl.collectives.allreduce import one_shot
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES, ControlKind, Header
from qccl.transports.loopback import LoopbackTransport
from qccl.transports.ucx import UcxTransport

#: runs a function on ranks that are threads
OVER = [pytest.param(outcomes, id="loopback"), pytest.param(outcomes_over_ucx, id="ucx", marks=needs_ucx)]
INBOX = HEADER_NBYTES + LoopbackTransport.eager_nbytes
#: elements of a vector that is sent with the header, and of one that is not
SMALL, LARGE = 1000, 40_000


def encoded(count: int) -> int:
    return CODEC.encoded_nbytes(count, FLOAT32)


#: what rank 1 sends in place of the header of its second call, with the data that follows it
CHANGES = {
    "announces data that it lacks": lambda m: [announcing(m[:HEADER_NBYTES], encoded(LARGE))],
    "lacks the end of its data": lambda m: [m[:-1]],
    "has more data": lambda m: [m + b"x"],
    "has data of another size, and says so": lambda m: [announcing(m[:HEADER_NBYTES], 100) + bytes(100)],
    "comes twice": lambda m: [m, m],
    "comes eleven times": lambda m: [m] * 11,
    "is followed by a few bytes": lambda m: [m, m[:8]],
    "is followed by nothing": lambda m: [m, b""],
    "is cut": lambda m: [m[:100]],
    "is empty": lambda m: [b""],
    "is that of the call before": lambda m: [of_call(m, sequence_of(m) - 1)],
    "is followed by that of the call before": lambda m: [m, of_call(m, sequence_of(m) - 1)],
    "is that of the next call": lambda m: [of_call(m, sequence_of(m) + 1)],
    "is that of a distant call": lambda m: [of_call(m, sequence_of(m) + (1 << 40))],
    "is that of the last call that there could be": lambda m: [of_call(m, -1)],
    "is followed by those of many calls": lambda m: [of_call(m, sequence_of(m) + i) for i in range(40)],
    "does not fit into the inbox": lambda m: [m + b"x" * INBOX],
}
#: the same where data follows
CHANGES_WITH_DATA = CHANGES | {
    "announces data that does not follow": lambda m: [m[:HEADER_NBYTES]],
    "announces nothing, and data follows": lambda m: [announcing(m, 0)],
}
#: what rank 1 sends in place of a message of data
CHANGES_OF_DATA = {
    "is too short": lambda m: [m[:-1]],
    "is too long": lambda m: [m + b"x"],
    "is much too long": lambda m: [m * 3],
    "is empty": lambda m: [b""],
}


#: the changes in which the transport takes part
OF_SIZES = {"comes twice", "is cut", "is empty", "lacks the end of its data", "does not fit into the inbox"}
OF_SIZES |= {"is too short", "is much too long"}


def three_calls(t, count):
    """Right sums, or an error."""
    caller = Caller(t)
    program = caller.engine.compile(one_rank(one_shot, t.rank, t.size, count, FLOAT32, CODEC))
    try:
        for call in range(3):  # each with data of its own: that of an earlier call would be wrong
            x = ramp(t.rank + 31 * call, count)
            y = np.full_like(x, -1)
            caller.start(program, x, y).run()
            exact = sum(ramp(rank + 31 * call, count) for rank in range(t.size))
            assert np.abs(y - exact).max() <= 2 * t.size, f"call {call} returned a wrong sum"
            time.sleep(0.02)  # all of rank 1's messages have come when the next call begins
    finally:
        caller.engine.close(5)


def against(change, count):
    """three_calls() where the messages of rank 1 are changed."""
    return lambda t: three_calls(Changed(t, change) if t.rank == 1 else t, count)


#: messages that rank 1 changes, how, and how many elements each call has
CHANGED = {
    "header with data": (CHANGES_WITH_DATA, functools.partial(only_headers, sequence=1), SMALL),
    "header without data": (CHANGES, functools.partial(only_headers, sequence=1), LARGE),
    "data": (CHANGES_OF_DATA, only_data, LARGE),
}


@pytest.mark.parametrize(
    ("what", "name", "over"),
    [
        pytest.param(what, name, *over.values, marks=over.marks, id=f"{what} {name} {over.id}")
        for what, (changes, *_) in CHANGED.items()
        for name in changes
        for over in OVER[: 1 + (name in OF_SIZES)]  # over UCX a group takes a second
    ],
)
def test_a_wrong_message_ends_the_call(what, name, over):
    changes, only, count = CHANGED[what]
    errors = over(3, against(only(changes[name]), count))
    for error in errors[:: 2 if what == "data" else 1]:
        assert isinstance(error, MismatchError) and "rank 1 sent" in str(error), repr(error)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("change", [lambda m: of_kind(m, 99), lambda m: b"x" * len(m)], ids=["kind", "magic"])
def test_a_control_message_of_an_unknown_kind(change, over):
    first, _, third = over(3, against(only_headers(lambda m: [change(m)], 1), LARGE))
    for error in (first, third):
        assert isinstance(error, EngineError | PeerLost | MismatchError), repr(error)
        assert re.search("rank 1 sent .*control message.* version of qccl", str(error))


@pytest.mark.parametrize("over", OVER)
def test_messages_after_the_last_one_change_nothing(over):
    """What follows a close message is not received."""

    def change(_, tag, message):
        is_close = tag == CONTROL_TAG and kind_of(message) == ControlKind.CLOSE
        after = [of_kind(message, ControlKind.CALL), b"", message + b"x", of_kind(message, ControlKind.ABORT)]
        return [message, *after] if is_close else [message]

    assert over(3, against(change, SMALL)) == [None] * 3


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe\x80", b"\x1b[2J\x9b31m", b"no\nWARNING\tforged", "nöt \N{GRINNING FACE}".encode()[:7]]
)
def test_the_reason_of_another_rank_is_text_that_names_it(text):
    """Whatever it sends, and without characters that control a terminal or begin a line of a log."""
    for sequence in (0, 1 << 40, 1 << 63, 2**64 - 1):
        message = Header(ControlKind.ABORT, sequence, "").pack()
        found = Header.unpack(message[:48] + text.ljust(len(message) - 48, b"\0"), 3).end(3, 5)
        assert str(found).startswith("rank 3 gave up: ") and str(found).isprintable() and found.rank == 3


def test_sixteen_calls_ahead_are_not_too_many():
    """As many headers as a rank can send before another one makes its first call."""
    calls, all_sent = 100, threading.Event()

    def run(t):
        caller = Caller(t, timeout=20)
        if t.rank == 0:
            assert all_sent.wait(60)
            hear(caller.engine, RUNS_IN_FLIGHT)
            for _ in range(20):
                caller.engine.step()
            assert caller.engine._loop.early == RUNS_IN_FLIGHT
        xs = [ramp(t.rank, 50) for _ in range(calls)]
        ys = [np.empty_like(x) for x in xs]
        runs = [caller.start(caller.program(50), x, y) for x, y in zip(xs, ys, strict=True)]
        all_sent.set()
        for execution in runs:
            execution.run()
        caller.close()
        return all(near_sum(y, 2) for y in ys)

    assert outcomes(2, run) == [True, True]


@needs_ucx
@pytest.mark.parametrize("nbytes", [-1, 1 << 62])
def test_an_item_of_an_all_gather_that_cannot_be(nbytes, monkeypatch):
    """Every rank says first how much it gives."""
    monkeypatch.setattr(UcxTransport, "_exchange", lambda *_: [struct.pack("<q", each) for each in (4, nbytes)])
    refused = pytest.raises(MismatchError, match=f"rank 1 gives {nbytes} bytes")
    with closing(UcxTransport.meet(lambda note: [note], 60.0)) as transport, refused:
        transport.allgather(b"mine", 60)
