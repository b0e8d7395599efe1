"""The host engine on threads: agreement, order, deadlines, failure, traces."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque

import numpy as np
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, address, near_sum, outcomes, ramp

from qccl._host import RUNS_IN_FLIGHT
from qccl.collectives.allreduce import one_shot, two_round
from qccl.dtypes import FLOAT32
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES, Header, Kind
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost
from qccl.host import engine as host
from qccl.schedule import Buffer, Decode, Encode, Exchange, Role, Schedule, Span, Transfer
from qccl.transports import loopback
from qccl.transports.loopback import LoopbackGroup


def reduce_and_close(t):
    caller = Caller(t)
    y = caller.allreduce(ramp(t.rank, 1000))
    caller.close()
    assert not any(engine is caller.engine for engine in host._unfinished), "all others have left, too"
    return y


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_an_allreduce(n):
    results = outcomes(n, reduce_and_close)
    assert all(near_sum(y, n) for y in results)
    assert all(y.tobytes() == results[0].tobytes() for y in results)


# -- several runs at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [3, RUNS_IN_FLIGHT + 7])
def test_runs_end_whichever_the_ranks_wait_for(calls):
    """Ranks wait in opposite orders; more calls than tags for them line up by themselves."""

    def run(t):
        caller = Caller(t)
        xs = [ramp(t.rank + i, 500 + i) for i in range(calls)]
        ys = [np.empty_like(x) for x in xs]
        runs = [caller.start(caller.program(len(x)), x, y) for x, y in zip(xs, ys, strict=True)]
        for execution in runs if t.rank == 0 else reversed(runs):
            execution.run()
        assert all(e.done for e in runs)
        caller.close()
        return ys

    results = outcomes(2, run)
    for i in range(calls):
        assert results[0][i].tobytes() == results[1][i].tobytes()
        exact = ramp(i, 500 + i) + ramp(i + 1, 500 + i)
        assert np.abs(results[0][i] - exact).max() <= 4


@pytest.mark.parametrize("n", [2, 3])
def test_runs_that_share_memory_keep_their_order(n):
    """Whether one overwrites what another reads, or writes, or reads what another writes, wholly or in part."""

    def run(t, line_up):
        caller = Caller(t)
        memory = np.concatenate([ramp(t.rank, 20_000), ramp(t.rank + 5, 20_000)])
        a, between, b = memory[:20_000], memory[10_000:30_000], memory[20_000:]
        other = np.empty_like(a)
        runs = []
        for x, y in ((a, b), (b, a), (between, other), (other, between), (b, other)):
            runs.append(caller.start(caller.program(20_000, chunk_elements=1024, depth=1), x, y))
            if not line_up:
                runs[-1].run()
        for execution in runs if t.rank else reversed(runs):
            execution.run()
        caller.close()
        return memory.tobytes() + other.tobytes()

    expected = outcomes(n, lambda t: run(t, False))
    assert all(isinstance(e, bytes) for e in expected), expected
    assert outcomes(n, lambda t: run(t, True)) == expected


def test_runs_that_only_read_the_same_memory_go_on_together():
    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 1000)
        ys = [np.empty_like(x) for _ in range(3)]
        runs = [caller.start(caller.program(1000), x, y) for y in ys]
        together = all(e.begun for e in runs)
        ys.append(np.empty_like(x))
        another = caller.start(caller.program(1000), ys[0], ys[-1])
        lined_up = another.waits_for()
        for execution in (*runs, another):
            execution.run()
        caller.close()
        return together, lined_up

    assert outcomes(2, run) == [(True, "it is queued behind calls that have not ended")] * 2


def test_thousands_of_runs_that_end_at_once_may_be_lined_up():
    caller = Caller(LoopbackGroup(1).transport(0))
    x = ramp(0, 1000)
    y = np.empty_like(x)
    first = caller.start(caller.program(1000), x, y)
    in_place = [caller.program(4, in_place=True) for _ in range(3000)]
    runs = []
    for program in in_place:
        bindings = {"output": address(x)}
        runs.append(
            caller.engine.start(program, bindings, call=0, header=caller.header(4), deadline=time.monotonic() + 10)
        )
        caller.sequence += 1
    assert not first.done and not runs[-1].done
    first.run()
    assert all(e.done for e in runs)
    caller.close()


class Looking:
    """A transport that counts the looks that may wait for something."""

    def __init__(self, transport):
        self._transport, self.waits = transport, 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def poll(self, *, idle):
        self.waits += idle > 0
        return self._transport.poll(idle=idle)


def test_stepping_by_hand_never_blocks():
    """Each step runs one operation at most, and waits in one look at most, which the transport ends soon."""

    def run(t):
        looking = Looking(t)
        caller = Caller(looking)
        x = ramp(t.rank, 20_000)
        y = np.empty_like(x)
        events, most = [], 0
        program = caller.program(len(x), chunk_elements=512)
        execution = caller.start(program, x, y, trace=events)
        begin = time.monotonic()
        deadline = begin + 10
        done, steps = False, 0
        while not done and time.monotonic() < deadline:
            looking.waits = 0
            done = execution.step()
            most, steps = max(most, looking.waits), steps + 1
        caller.close()
        return most, steps, sum(e.queue == "compute" and e.start > begin for e in events), y

    for most, steps, operations, y in outcomes(2, run):
        assert near_sum(y, 2) and most <= 1 and steps >= operations


def test_a_program_is_run_again_and_again_but_not_twice_at_once():
    def run(t):
        caller = Caller(t)
        program = caller.program(300)
        for i in range(40):
            x = ramp(t.rank + i, 300)
            y = np.empty_like(x)
            execution = caller.start(program, x, y)
            if i == 0:
                with pytest.raises(ArgumentError, match="still running"):
                    caller.start(program, x, y)
            execution.run()
            exact = sum(ramp(r + i, 300) for r in range(3))
            assert np.abs(y - exact).max() <= 6
        caller.close()
        return True

    assert outcomes(3, run) == [True] * 3


def test_a_run_allocates_no_memory_of_the_messages_size():
    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 1_000_000)
        y = np.empty_like(x)
        program = caller.program(len(x))
        for _ in range(3):
            caller.start(program, x, y).run()
        if t.rank == 0:
            tracemalloc.start()
        caller.start(program, x, y).run()
        peak = 0
        if t.rank == 0:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        caller.close()
        return peak, program.workspace_nbytes

    peak, workspace = outcomes(2, run)[0]
    assert peak < 100_000
    assert workspace < 0.25 * 4_000_000


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
            assert looked.wait(10)
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
            assert looked.wait(10)
        execution = caller.start(program, x, y)
        if t.rank == 1:
            deadline = time.monotonic() + 10
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
        caller.engine.start(program, {}, call=0, header=caller.header(0), deadline=begin + 10).run()
        caller.sequence += 1
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


# -- deadlines and failure -----------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come():
    def run(t):
        caller = Caller(t, timeout=0.3)
        if t.rank < 2:
            caller.allreduce(ramp(t.rank, 100))

    first, second, absent = outcomes(3, run)
    assert absent is None
    assert {type(first), type(second)} <= {CollectiveTimeout, PeerLost}
    assert CollectiveTimeout in (type(first), type(second))
    assert all("rank 2 did not make this call" in str(e) for e in (first, second))


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
        other.run(time.monotonic() + 5)
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
        caller.start(caller.program(100), x, np.empty_like(x)).run(time.monotonic() + 5)

    error, _ = outcomes(2, run)
    assert isinstance(error, CollectiveTimeout) and "(call 0 of the group)" in str(error), error


class Paused:
    """A transport whose rank is paused once, when it has posted ``receives`` receives of data.

    What comes meanwhile it hears of right after that, if ``told``. From then on each look takes it a moment.
    """

    def __init__(self, transport, receives, *, told):
        self._transport, self._after, self._told = transport, receives, told
        self._receives, self._pausing = 0, False

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def pause(self):
        self._receives, self._pausing = 0, True

    def receive(self, peer, tag, address, nbytes, token, *, at_most=False):
        self._receives += tag != CONTROL_TAG
        self._transport.receive(peer, tag, address, nbytes, token, at_most=at_most)

    def poll(self, *, idle):
        if not self._pausing or self._receives < self._after:
            time.sleep(0 if self._pausing else 0.01)
            return self._transport.poll(idle=idle)
        self._pausing = False
        found, end = [], time.monotonic() + 0.4
        while time.monotonic() < end:
            if self._told:
                found += self._transport.poll(idle=1)
            else:
                time.sleep(0.01)
        return found


@pytest.mark.parametrize(("chunks", "receives", "told"), [(1, 0, False), (1, 0, True), (30, 29, True)])
def test_a_rank_that_was_paused_past_its_deadline_ends_its_call(chunks, receives, told):
    """Everything has come meanwhile, or before, and the result is right; also in the next run of the program."""
    begun = [threading.Event() for _ in range(2)]

    def run(t):
        caller = Caller(t if t.rank else Paused(t, receives, told=told), timeout=10 if t.rank else 0.3)
        program = caller.engine.compile(
            one_rank(one_shot, t.rank, 2, 64 * chunks, FLOAT32, CODEC, chunk_elements=64, depth=chunks)
        )
        x = ramp(t.rank, 64 * chunks)
        ys = [np.empty_like(x) for _ in begun]
        for y, rank_0_has_begun in zip(ys, begun, strict=True):
            if t.rank == 0:
                caller.transport.pause()
            else:
                assert rank_0_has_begun.wait(10)
            execution = caller.start(program, x, y)
            rank_0_has_begun.set()
            execution.run()
        return ys

    for ys in outcomes(2, run):
        assert isinstance(ys, list), ys
        assert all(near_sum(y, 2) for y in ys)


def test_a_slow_rank_cannot_keep_a_call_beyond_its_deadline():
    """It makes progress all the time; without a deadline this would take a minute and more."""

    def run(t):
        caller = Caller(t, timeout=0.3)
        x = ramp(t.rank, 100_000)
        execution = caller.start(caller.program(len(x), chunk_elements=64), x, np.empty_like(x))
        deadline = time.monotonic() + 10
        while t.rank and time.monotonic() < deadline:
            execution.step()
            time.sleep(0.01)
        execution.run()

    error = outcomes(2, run)[0]
    assert isinstance(error, CollectiveTimeout) and "rank 1" in str(error) and "[" not in str(error), error


def test_what_a_call_waits_for_is_named():
    """Ranks, where it waits for any; or its own part."""

    def run(t):
        caller = Caller(t, timeout=5)
        x = ramp(t.rank, 40_000)
        execution = caller.start(caller.program(len(x)), x, np.empty_like(x))
        found, deadline = set(), time.monotonic() + 10
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
        caller = Caller(t, timeout=2)
        x = ramp(t.rank, 100_000)
        y = np.empty_like(x)
        execution = caller.start(caller.program(len(x), chunk_elements=640), x, y)
        if t.rank == 1:
            for _ in range(40):
                execution.step()
            return execution.done
        execution.run()

    start = time.monotonic()
    first, stopped, third = outcomes(3, run)
    assert stopped is False
    assert all(isinstance(e, CollectiveTimeout | PeerLost) for e in (first, third)), (first, third)
    assert time.monotonic() - start < 15


def test_a_rank_that_gives_up_is_heard_at_once():
    def run(t):
        caller = Caller(t, timeout=20)
        if t.rank == 0:
            time.sleep(0.1)
            caller.engine.abort("rank 0 gave up: out of paper")
            return
        caller.allreduce(ramp(t.rank, 100))

    start = time.monotonic()
    _, *errors = outcomes(3, run)
    assert time.monotonic() - start < 5
    assert all(isinstance(e, PeerLost) and "out of paper" in str(e) for e in errors)


def test_a_rank_that_closed_is_missed_at_once():
    def run(t):
        caller = Caller(t, timeout=20)
        caller.allreduce(ramp(t.rank, 100))
        if t.rank == 0:
            caller.engine.close(0.2)
            return
        caller.allreduce(ramp(t.rank, 100))

    start = time.monotonic()
    _, *errors = outcomes(3, run)
    assert time.monotonic() - start < 5
    assert all(isinstance(e, PeerLost) for e in errors)
    assert any("rank 0 left the group" in str(e) and "called allreduce(count=100" in str(e) for e in errors)


def test_a_call_without_a_rank_that_has_closed_fails_at_once():
    """Nobody comes to end it: without the news it would last until its deadline."""

    def run(t):
        caller = Caller(t, timeout=20)
        if t.rank == 0:
            caller.engine.close(0.2)
            return
        deadline = time.monotonic() + 10
        while not caller.engine._left and time.monotonic() < deadline:
            caller.engine.step()
        caller.allreduce(ramp(t.rank, 100))

    start = time.monotonic()
    _, error = outcomes(2, run)
    assert time.monotonic() - start < 10
    assert isinstance(error, PeerLost) and "rank 0 left the group, and rank 1 called allreduce(count=100" in str(error)


def test_a_rank_that_closes_while_a_call_waits_for_it_ends_that_call_at_once():
    begun = threading.Event()

    def run(t):
        caller = Caller(t, timeout=20)
        if t.rank == 0:
            assert begun.wait(10)
            caller.engine.close(0.2)
            return
        x = ramp(t.rank, 100)
        execution = caller.start(caller.program(100), x, np.empty_like(x))
        begun.set()
        execution.run()

    start = time.monotonic()
    _, error = outcomes(2, run)
    assert time.monotonic() - start < 10
    assert isinstance(error, PeerLost) and "rank 0 left the group, and rank 1 called allreduce(count=100" in str(error)


def test_a_failed_engine_raises_the_same_again():
    def run(t):
        caller = Caller(t, timeout=0.2)
        if t.rank == 1:
            return
        x = ramp(0, 64)
        programs = [caller.program(64) for _ in range(2)]
        runs = [caller.start(program, x, np.empty_like(x)) for program in programs]
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


def test_last_words_get_out_before_a_failed_rank_lets_go(monkeypatch):
    """Another message is before them, and the other rank does not look just now."""
    monkeypatch.setattr(host, "_FLUSH_SECONDS", 10.0)
    monkeypatch.setattr(loopback, "_CONTROL_NBYTES", 0)  # what is not taken is lost
    begun = threading.Event()

    def run(t):
        caller = Caller(t, timeout=20)
        x = ramp(t.rank, 100)
        if t.rank == 0:
            caller.start(caller.program(100), x, np.empty_like(x))
            begun.set()
            caller.engine.abort("rank 0 gave up: out of paper")
            return
        assert begun.wait(10)
        time.sleep(0.2)
        caller.start(caller.program(100), x, np.empty_like(x)).run()

    _, error = outcomes(2, run)
    assert isinstance(error, PeerLost) and str(error) == "rank 0 gave up: out of paper", error


def test_an_abort_does_not_wait_for_a_thread_that_is_held_up(monkeypatch):
    """That one fails when it is back."""
    monkeypatch.setattr(host, "_HALT_SECONDS", 0.1)
    inside, aborted = threading.Event(), threading.Event()

    def run(t):
        if t.rank:
            aborted.wait(10)
            return None
        caller = Caller(t, timeout=20)
        poll = t.poll

        def held_up(*, idle):
            inside.set()
            assert aborted.wait(10)
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
        assert inside.wait(10)
        caller.engine.abort("enough")
        aborted.set()
        thread.join(10)
        return raised

    assert outcomes(2, run)[0] == ["enough"]


def test_an_interrupt_in_the_middle_reaches_the_other_ranks():
    def run(t):
        caller = Caller(t, timeout=20)
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
    assert 0.1 < waited < 5


def test_a_closed_engine_refuses_calls():
    def run(t):
        caller = Caller(t)
        program = caller.program(10)
        caller.close()
        caller.start(program, ramp(0, 10), ramp(0, 10))

    assert all(isinstance(e, ArgumentError) and "closed" in str(e) for e in outcomes(2, run))


# -- what cannot be run --------------------------------------------------------------------------------------------


def test_refusals_when_compiling():
    values, wire = Buffer(64, FLOAT32, Role.INPUT), Buffer(72, None, Role.WORK)

    def run(t):
        caller = Caller(t)
        exchange = Exchange((Transfer(1 - t.rank, Span("x", 0, 64)),), ())
        with pytest.raises(EngineError, match="transfers must be in work buffers"):
            caller.engine.compile(Schedule("s", t.rank, 2, {"x": values}, (exchange,)))
        encode = Encode(CODEC, Span("w", 0, 64), Span("w", 0, 72), 0)
        with pytest.raises(EngineError, match="a buffer of bytes"):
            caller.engine.compile(Schedule("s", t.rank, 2, {"w": wire}, (encode,)))
        with pytest.raises(ArgumentError, match="rank 0 of 3"):
            caller.engine.compile(Schedule("s", 0, 3, {}, ()))
        with pytest.raises(ArgumentError, match=r"needed for \['input', 'output'\], not for \['input'\]"):
            program = caller.program(10)
            caller.engine.start(program, {"input": 0}, call=0, header=caller.header(10), deadline=0)
        caller.close()
        return True

    assert outcomes(2, run) == [True, True]


# -- traces --------------------------------------------------------------------------------------------------------


def test_a_trace_has_every_node_with_its_times():
    def run(t):
        caller = Caller(t)
        x = ramp(t.rank, 4096)
        y = np.empty_like(x)
        program = caller.program(len(x), chunk_elements=512)
        events = []
        before = time.perf_counter()
        caller.start(program, x, y, trace=events).run()
        after = time.perf_counter()
        caller.start(program, x, y).run()
        assert program.run.trace() == [], "a run without a trace records nothing, and keeps nothing of the last"
        caller.close()
        return before, events, after, len(program.steps)

    for rank, (before, events, after, nodes) in enumerate(outcomes(2, run)):
        assert len(events) == nodes
        assert {e.queue for e in events} == {"compute", "send", "recv"}
        assert all(e.rank == rank and before <= e.start <= e.stop <= after for e in events)
        assert len({(e.queue, *sorted(e.args.items())) for e in events}) == nodes


class SlowLink:
    """A transport that tells of sends one by one, in order, so many looks after the one before: as on a slow link."""

    def __init__(self, transport, looks):
        self._transport, self._looks = transport, looks
        self._now = self._free = 0
        self._sends, self._ended = deque(), set()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, peer, tag, address, nbytes, token):
        if not self._sends:
            self._free = self._now + self._looks
        self._sends.append(token)
        self._transport.send(peer, tag, address, nbytes, token)

    def poll(self, *, idle):
        self._now += 1
        found = list(self._transport.poll(idle=idle))
        self._ended.update(token for token in found if token in self._sends)
        found = [token for token in found if token not in self._ended]
        if self._sends and self._sends[0] in self._ended and self._now >= self._free:
            self._free = self._now + self._looks
            self._ended.discard(self._sends[0])
            found.append(self._sends.popleft())
        return found


@pytest.mark.parametrize("count", [2000, 40_000])
def test_a_run_is_not_done_before_its_sends_are(count):
    """What they send, and the memory that it is in, would change under them: with the header, and without."""

    def run(t):
        link = SlowLink(t, 20)
        caller = Caller(link)
        x = ramp(t.rank, count)
        for make in (one_shot, two_round):
            program = caller.engine.compile(one_rank(make, t.rank, 2, count, FLOAT32, CODEC))
            caller.start(program, x, np.empty_like(x)).run()
            assert not link._sends
        caller.close()
        return True

    assert outcomes(2, run) == [True] * 2


def test_runs_in_flight_have_tags_of_their_own():
    def run(t):
        counting = Counting(t)
        caller = Caller(counting)
        x = ramp(t.rank, 40_000)
        found = []
        for _ in range(RUNS_IN_FLIGHT):
            counting.sent.clear()
            caller.start(caller.program(len(x), chunk_elements=4096), x, np.empty_like(x)).run()
            found.append({tag for _, tag, _ in counting.sent if tag != CONTROL_TAG})
        caller.close()
        return found

    for found in outcomes(2, run):
        assert all(found) and sum(map(len, found)) == len(set.union(*found))


class BadNewsFirst:
    """A transport that tells of sends when the second control message has come, in one look with it, and after it."""

    def __init__(self, transport, waits):
        self._transport, self._waits = transport, waits  # set when nothing is left but a send
        self._sends, self._listening, self._held, self._heard = set(), set(), [], 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, peer, tag, address, nbytes, token):
        self._sends.add(token)
        self._transport.send(peer, tag, address, nbytes, token)

    def receive(self, peer, tag, address, nbytes, token, *, at_most=False):
        if tag == CONTROL_TAG:
            self._listening.add(token)
        self._transport.receive(peer, tag, address, nbytes, token, at_most=at_most)

    def poll(self, *, idle):
        if self._heard and idle > 2:
            self._waits.set()
        found = list(self._transport.poll(idle=idle))
        self._heard += sum(token in self._listening for token in found)
        self._held += [token for token in found if token in self._sends]
        found = [token for token in found if token not in self._sends]
        if self._heard > 1:
            found, self._held = found + self._held, []
        return found


def test_a_run_that_ends_beside_bad_news_has_ended_well():
    waits = threading.Event()

    def run(t):
        caller = Caller(t if t.rank else BadNewsFirst(t, waits), timeout=20)
        program = caller.engine.compile(one_rank(one_shot, t.rank, 2, 2000, FLOAT32, CODEC))
        x = ramp(t.rank, 2000)
        y = np.empty_like(x)
        execution = caller.start(program, x, y)
        execution.run()
        if t.rank:
            assert waits.wait(10)
            caller.engine.abort("rank 1 gave up: out of paper")
            return None
        with pytest.raises(PeerLost, match="out of paper"):
            caller.allreduce(x)
        return execution.done and near_sum(y, 2)

    assert outcomes(2, run)[0] is True


def test_the_next_chunk_is_encoded_while_one_is_sent():
    """On a link where a send takes longer than an encode, whatever the machine does."""
    chunks = 8

    def run(t):
        caller = Caller(SlowLink(t, 20))
        caller.schedule = one_rank(one_shot, t.rank, 2, 64 * chunks, FLOAT32, CODEC, chunk_elements=64, depth=3)
        program = caller.engine.compile(caller.schedule)
        x = ramp(t.rank, 64 * chunks)
        y, events = np.empty_like(x), []
        caller.start(program, x, y, trace=events).run()
        caller.close()
        kinds = [[(e.start, e.stop) for e in events if e.name.startswith(kind)] for kind in ("encode", "send")]
        return y, *map(sorted, kinds)

    for y, encodes, sends in outcomes(2, run):
        assert near_sum(y, 2) and len(encodes) == len(sends) == chunks
        for encode, send in zip(encodes[1:], sends[:-1], strict=True):
            assert send[0] <= encode[0] and encode[1] <= send[1]


def test_a_run_leaves_nothing_behind():
    def run(t):
        caller = Caller(t)
        program = caller.program(100)
        for _ in range(50):
            x = ramp(t.rank, 100)
            caller.start(program, x, np.empty_like(x)).run()
        t.allgather(b"", 5)
        engine = caller.engine
        left = (dict(engine._active), list(engine._queue), engine._loop.early)
        caller.close()
        return left

    assert outcomes(2, run) == [({}, [], 0)] * 2


# -- small calls ---------------------------------------------------------------------------------------------------


class Counting:
    """A transport that counts what it sends, by tag."""

    def __init__(self, transport):
        self._transport, self.sent = transport, []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, peer, tag, address, nbytes, token):
        self.sent.append((peer, tag, nbytes))
        self._transport.send(peer, tag, address, nbytes, token)


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
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if caller.engine._loop.early and execution.waits_for() == f"rank {late} did not make this call":
                break
            caller.engine.step()
        heard.set()
        assert sent.wait(10)

    def run(t):
        caller = Caller(t)
        xs = [ramp(10 * t.rank + call, 128) for call in range(2)]
        ys = [np.zeros(192, np.float32) for _ in xs]
        if t.rank == late:
            assert heard.wait(10)
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
        time.sleep(0.5)

    first, _, third = outcomes(3, run)
    for error in (first, third):
        assert isinstance(error, MismatchError) and "rank 1 sent 100 bytes with the header" in str(error)


def test_an_exception_that_was_caught_is_not_what_ended_the_process(monkeypatch):
    """pytest and notebooks keep the last one where Python keeps the one that ends the program."""
    try:
        raise ValueError("caught")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert host._unhandled() is None
        monkeypatch.delattr(sys, "last_value")
        assert host._unhandled() is None


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
