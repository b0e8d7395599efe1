"""The headers of calls on the host: the consistency check, and data that is sent with a header."""

from __future__ import annotations

import re
import threading

import numpy as np
import patience
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Counting, near_sum, outcomes, ramp

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import CollectiveTimeout, EngineError, PeerLost, gave_up
from qccl.collectives.allreduce import one_shot, two_round
from qccl.collectives.schedule import Buffer, Decode, Encode, Exchange, Role, Schedule, Span, Transfer
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES, Block, ControlKind, Header, mismatch_error

# -- agreement -----------------------------------------------------------------------------------------------------


WIRE = Span("wire", 0, CODEC.encoded_nbytes(64, FLOAT32))
BUFFERS = {"input": Buffer(64, FLOAT32, Role.INPUT), "output": Buffer(64, FLOAT32, Role.OUTPUT)}
BUFFERS |= {"wire": Buffer(len(WIRE), None, Role.WORK)}
ENCODE, DECODE = Encode(CODEC, Span("input", 0, 64), WIRE, 0), Decode(CODEC, WIRE, Span("output", 0, 64))


def test_no_output_is_written_before_all_ranks_have_come():
    """Also where it needs nothing of theirs."""
    looked = threading.Event()

    def run(t):
        caller = Caller(t)
        x, y = ramp(0, 64), np.full(64, 7, np.float32)
        program = caller.engine.compile(Schedule("alone", t.rank, 2, BUFFERS, (ENCODE, DECODE)))
        if t.rank:
            assert looked.wait(60)
        execution = caller.start(program, x, y)
        if t.rank == 0:
            for _ in range(20):
                execution.step()
            assert (y == 7).all()
            looked.set()
        execution.run()
        caller.close()
        return np.abs(y - x).max() <= 1

    assert outcomes(2, run) == [True, True]


def test_nothing_that_came_is_passed_on_before_all_ranks_have_come():
    """The rank that it is for may never make this call, and would have to keep it."""
    looked = threading.Event()
    send, recv = ([Exchange(*((Transfer(p, WIRE),), ())[::d]) for p in range(3)] for d in (1, -1))
    ops = [(ENCODE, send[1]), (recv[0], send[2]), (recv[1], DECODE)]

    def run(t):
        counting = Counting(t)
        caller = Caller(counting)
        x, y = ramp(0, 64), np.zeros(64, np.float32)
        program = caller.engine.compile(Schedule("chain", t.rank, 3, BUFFERS, ops[t.rank]))
        if t.rank == 2:
            assert looked.wait(60)
        execution = caller.start(program, x, y)
        if t.rank == 1:
            patience.wait_until(lambda: execution.waits_for() == "rank 2 did not make this call", execution.step)
            for _ in range(20):
                execution.step()
            assert not [tag for _, tag, _ in counting.sent if tag != CONTROL_TAG]
            looked.set()
        execution.run()
        caller.close()
        return t.rank < 2 or np.abs(y - x).max() <= 1

    assert outcomes(3, run) == [True] * 3


def test_a_header_in_bytes():
    header = Header(ControlKind.CALL, 5, "x" * 1000)
    packed = header.pack()
    assert len(packed) == HEADER_NBYTES - 4 == len(Header(ControlKind.CALL, 5, "x").pack())
    for end in ("y", "z" * 5000):
        assert Header(ControlKind.CALL, 5, "x" * 999 + end).pack() != packed, "a text that is cut differs in its digest"
    again = Header.unpack(packed, 0)
    assert (again.kind, again.sequence) == (ControlKind.CALL, 5) and header.text.startswith(again.text)
    for version in (b"QCCL" + packed[4:], packed[:4] + bytes([packed[4] + 1]) + packed[5:]):
        with pytest.raises(EngineError, match="rank 3 sent a control message that this version"):
            Header.unpack(version, 3)


@pytest.mark.parametrize(
    "error",
    [
        gave_up(2, "ValueError: no"),
        PeerLost("rank 0 was lost: no connection", 0),
        PeerLost("ranks 0, 2 were lost"),
        CollectiveTimeout("rank 1 reached the deadline of f: rank 2 did not make this call"),
    ],
    ids=str,
)
def test_a_last_message_brings_the_error(error):
    """With the lost rank and its reason, also if another rank passes it on; of a deadline the text alone."""
    packed = Header.of_end(ControlKind.ABORT, 1, error).pack()
    found = Header.unpack(packed, 1).end(1, 3)
    assert type(found) is PeerLost and str(found) == str(error)
    assert (found.rank, found.reason) == (getattr(error, "rank", None), getattr(error, "reason", None))


@pytest.mark.parametrize(
    ("calls", "texts", "expected"),
    [
        ((4, 5), ("f", "f"), r"rank 0 called f \(call 4 of the group\), rank 1 called f \(call 5 of the group\); all"),
        ((4, 4), ("x" * 5000, "x" * 5001), r"called x+ \(call 4 of the group\); they differ after the first \d+ bytes"),
    ],
)
def test_a_mismatch_names_the_difference(calls, texts, expected):
    """It is in the number of the call, or in the part of a text that does not fit a header."""
    mine, theirs = (Header(ControlKind.CALL, call, text).pack() for call, text in zip(calls, texts, strict=True))
    assert re.search(expected, str(mismatch_error(mine, theirs, 0, 1)))


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4096])
def test_workspace_begins_at_a_cache_line(nbytes):
    blocks = [Block(nbytes) for _ in range(20)]
    assert all(block.address % 64 == 0 and block.read(0, nbytes) == bytes(nbytes) for block in blocks)


# -- small calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_small_call_is_one_message_to_each_rank(n):
    """One step; of two steps, the first. What does not fit goes by itself, and all give the same bits."""

    def run(t):
        counting = Counting(t)
        caller = Caller(counting)
        found, sent = [], []
        for make, count, chunk in (
            (one_shot, 2000, None), (one_shot, 2000, 1024), (two_round, 2000, None), (one_shot, 40_000, None)
        ):  # fmt: skip
            program = caller.engine.compile(one_rank(make, t.rank, n, count, FLOAT32, CODEC, chunk_elements=chunk))
            x = ramp(t.rank, count)
            y = np.empty_like(x)
            counting.sent.clear()
            caller.start(program, x, y).run()
            found.append(y)
            sent.append([(tag != CONTROL_TAG, nbytes) for _, tag, nbytes in counting.sent])
        caller.close()
        return found, sent

    for found, sent in outcomes(n, run):
        code = CODEC.encoded_nbytes(2000, FLOAT32)
        assert sent[0] == [(False, HEADER_NBYTES + code)] * (n - 1)
        assert found[0].tobytes() == found[1].tobytes()
        assert sorted(tag for tag, _ in sent[1]) == [False] * (n - 1) + [True] * (n - 1), "the second chunk by itself"
        assert [tag for tag, _ in sent[2]].count(False) == n - 1
        assert sorted(sent[3]) == sorted(
            [(False, HEADER_NBYTES), (True, CODEC.encoded_nbytes(40_000, FLOAT32))] * (n - 1)
        )
        assert near_sum(found[2], n) and near_sum(found[3], n)


def kept_data(rank):
    """Two codes from rank 0 to rank 1, the first of them into memory that a code from rank 2 must have left."""

    def code(name):
        return Span(name, 0, CODEC.encoded_nbytes(64, FLOAT32))

    def values(name, i):
        return Span(name, 64 * i, 64 * i + 64)

    buffers = {"input": Buffer(128, FLOAT32, Role.INPUT), "output": Buffer(192, FLOAT32, Role.OUTPUT)}
    buffers |= {name: Buffer(code(name).stop, None, Role.WORK) for name in ("a", "b")}
    if rank == 1:
        recv = [Exchange((), (Transfer(peer, code(name)),)) for peer, name in ((2, "a"), (0, "a"), (0, "b"))]
        decode = [Decode(CODEC, code("aab"[i]), values("output", i), False, 0, 0, (2, 0, 0)[i]) for i in range(3)]
        return Schedule("kept", rank, 3, buffers, (recv[0], decode[0], *recv[1:], *decode[1:]))
    ops = []
    for i, name in enumerate("ab" if rank == 0 else "a"):
        ops += [Encode(CODEC, values("input", i), code(name), 0), Exchange((Transfer(1, code(name)),), ())]
    return Schedule("kept", rank, 3, buffers, tuple(ops))


@pytest.mark.parametrize("late", [0, 2])
def test_data_that_came_with_a_header_waits_for_its_place(late):
    """Another message comes from the same rank meanwhile, and what is received after it has its place already."""
    heard, sent = threading.Event(), threading.Event()

    def hear(caller, execution):
        """Until the others' messages have come: that of the late rank last, in one look with that of its next call."""
        text = f"rank {late} did not make this call"
        patience.wait_until(lambda: caller.engine._loop.early and execution.waits_for() == text, caller.engine.step)
        heard.set()
        assert sent.wait(60)

    def run(t):
        caller = Caller(t)
        xs = [ramp(10 * t.rank + call, 128) for call in range(2)]
        ys = [np.zeros(192, np.float32) for _ in xs]
        if t.rank == late:
            assert heard.wait(60)
        runs = []
        for x, y in zip(xs, ys, strict=True):
            runs.append(caller.start(caller.engine.compile(kept_data(t.rank)), x, y))
            if t.rank == 1 and y is ys[0]:
                hear(caller, runs[0])
        if t.rank == late:
            sent.set()
        for execution in runs:
            execution.run()
        caller.close()
        return xs, ys

    found = outcomes(3, run)
    for call, y in enumerate(found[1][1]):
        expected = np.concatenate([found[2][0][call][:64], found[0][0][call]])
        assert np.abs(y - expected).max() <= 1
