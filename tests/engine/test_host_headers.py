"""The headers of calls on the host: the consistency check, and data that is sent with a header."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Counting, address, near_sum, outcomes, ramp

from qccl import lifetime
from qccl.collectives.allreduce import one_shot, two_round
from qccl.dtypes import FLOAT32
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES, Header, Kind
from qccl.errors import EngineError, MismatchError
from qccl.schedule import Buffer, Decode, Encode, Exchange, Role, Schedule, Span, Transfer


def reduce_and_close(t):
    caller = Caller(t)
    y = caller.allreduce(ramp(t.rank, 1000))
    caller.close()
    assert not any(engine is caller.engine for engine in lifetime._kept), "all others have left, too"
    return y


# -- agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(100, 105), (100, 40_000), (0, 3), (1 << 17, (1 << 17) + 64)])
def test_ranks_that_disagree_in_count(sizes):
    """Also with messages of unequal sizes; nothing is written, and every rank says who asked for what."""
    outputs = {}

    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, sizes[t.rank == 2])
        outputs[t.rank] = y = np.full_like(x, 7)
        start = time.monotonic()
        try:
            caller.start(caller.program(len(x)), x, y).run()
        finally:
            assert time.monotonic() - start < 5
            caller.engine.close()

    for error in outcomes(3, run):
        assert isinstance(error, MismatchError), error
        assert "rank 2 called allreduce" in str(error)
        assert f"count={sizes[0]}," in str(error) and f"count={sizes[1]}," in str(error)
    assert all((y == 7).all() for y in outputs.values())


@pytest.mark.parametrize(
    "changed", [{"op": "max"}, {"dtype": "float16"}, {"codec": "minmax4"}, {"algorithm": "one_shot"}, {"chunk": 64}]
)
def test_ranks_that_disagree_otherwise(changed):
    from qccl import codecs, dtypes

    change = dict(changed)
    if "dtype" in change:
        change["dtype"] = dtypes.get(change["dtype"])
    if "codec" in change:
        change["codec"] = codecs.get(change["codec"])

    def run(t):
        caller = Caller(t)
        caller.allreduce(ramp(t.rank, 100), **(change if t.rank == 1 else {}))

    key, value = next(iter(changed.items()))
    for error in outcomes(2, run):
        assert isinstance(error, MismatchError)
        assert f"{key}={value}" in str(error) and "call 0" in str(error)


def test_no_output_is_written_before_all_ranks_have_come():
    """Also where it needs nothing of theirs."""
    looked = threading.Event()
    wire = Span("wire", 0, CODEC.encoded_nbytes(64, FLOAT32))
    values = [Buffer(64, FLOAT32, role) for role in (Role.INPUT, Role.OUTPUT)]
    buffers = {"input": values[0], "output": values[1], "wire": Buffer(len(wire), None, Role.WORK)}
    ops = (Encode(CODEC, Span("input", 0, 64), wire, 0), Decode(CODEC, wire, Span("output", 0, 64)))

    def run(t):
        caller = Caller(t)
        x, y = ramp(0, 64), np.full(64, 7, np.float32)
        program = caller.engine.compile(Schedule("alone", t.rank, 2, buffers, ops))
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
    wire = Span("wire", 0, CODEC.encoded_nbytes(64, FLOAT32))
    values = [Buffer(64, FLOAT32, role) for role in (Role.INPUT, Role.OUTPUT)]
    buffers = {"input": values[0], "output": values[1], "wire": Buffer(len(wire), None, Role.WORK)}
    send, recv = ([Exchange(*((Transfer(p, wire),), ())[::d]) for p in range(3)] for d in (1, -1))
    ops = [
        (Encode(CODEC, Span("input", 0, 64), wire, 0), send[1]),
        (recv[0], send[2]),
        (recv[1], Decode(CODEC, wire, Span("output", 0, 64))),
    ]

    def run(t):
        counting = Counting(t)
        caller = Caller(counting)
        x, y = ramp(0, 64), np.zeros(64, np.float32)
        program = caller.engine.compile(Schedule("chain", t.rank, 3, buffers, ops[t.rank]))
        if t.rank == 2:
            assert looked.wait(60)
        execution = caller.start(program, x, y)
        if t.rank == 1:
            deadline = time.monotonic() + 60
            while execution.waits_for() != "rank 2 did not make this call" and time.monotonic() < deadline:
                execution.step()
            for _ in range(20):
                execution.step()
            assert not [tag for _, tag, _ in counting.sent if tag != CONTROL_TAG]
            looked.set()
        execution.run()
        caller.close()
        return t.rank < 2 or np.abs(y - x).max() <= 1

    assert outcomes(3, run) == [True] * 3


def test_ranks_that_make_different_numbers_of_calls():
    def run(t):
        caller = Caller(t)
        if t.rank == 0:
            caller.allreduce(ramp(0, 10))
        caller.allreduce(ramp(t.rank, 20))

    assert all(isinstance(e, MismatchError) for e in outcomes(2, run))


def test_a_rank_may_be_early():
    """Its headers wait for this rank to make the calls."""

    def run(t):
        caller = Caller(t)
        xs = [ramp(t.rank, 50) for _ in range(5)]
        ys = [np.empty_like(x) for x in xs]
        if t.rank:
            time.sleep(0.1)
            first = caller.start(caller.program(50), xs[0], ys[0])
            time.sleep(0.1)
            first.run()
            runs = [caller.start(caller.program(50), x, y) for x, y in zip(xs[1:], ys[1:], strict=True)]
        else:
            runs = [caller.start(caller.program(50), x, y) for x, y in zip(xs, ys, strict=True)]
        for execution in runs:
            execution.run()
        caller.close()
        return ys

    for ys in outcomes(2, run):
        assert all(near_sum(y, 2) for y in ys)


def test_headers_are_exchanged_without_data():
    """An empty schedule is a barrier."""

    def run(t):
        caller = Caller(t)
        if t.rank == 1:
            time.sleep(0.2)
        begin = time.monotonic()
        program = caller.engine.compile(Schedule("barrier", t.rank, t.size, {}, ()))
        caller.run_on(program, {}, caller.text(0)).run()
        end = time.monotonic()
        caller.close()
        return begin, end

    begins, ends = zip(*outcomes(3, run), strict=True)
    assert max(begins) <= min(ends), "nobody leaves before all have come"


def test_a_header_in_bytes():
    header = Header(Kind.CALL, 5, "x" * 1000)
    packed = header.pack()
    assert len(packed) == HEADER_NBYTES - 4
    assert Header(Kind.CALL, 5, "x" * 999 + "y").pack() != packed, "a text that is cut differs in its digest"
    again = Header.unpack(packed, 0)
    assert (again.kind, again.sequence) == (Kind.CALL, 5) and header.text.startswith(again.text)
    with pytest.raises(EngineError, match="rank 3 sent a control message that this version"):
        Header.unpack(b"QCCL" + packed[4:], 3)


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
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if caller.engine._loop.early and execution.waits_for() == f"rank {late} did not make this call":
                break
            caller.engine.step()
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


@pytest.mark.parametrize("count", [1000, 40_000])
def test_data_of_another_size_with_an_equal_header(count):
    """Only a fault of ours, or of another program, can send it; a rank that cannot see it hears what it was."""

    def run(t):
        if t.rank != 1:
            caller = Caller(t)
            caller.allreduce(ramp(t.rank, count))
        message = np.zeros(HEADER_NBYTES + 100, np.uint8)
        caller = Caller(t)
        packed = caller.header(count).pack() + (100).to_bytes(4, "little")
        message[:HEADER_NBYTES] = np.frombuffer(packed, np.uint8)
        t.send(0, CONTROL_TAG, address(message), len(message), 1 << 60)
        return message  # it lives until rank 0 has received it

    first, _, third = outcomes(3, run)
    for error in (first, third):
        assert isinstance(error, MismatchError) and "rank 1 sent 100 bytes with the header" in str(error)
