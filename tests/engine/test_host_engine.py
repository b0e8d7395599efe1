"""The host engine on threads: runs, their order, and traces."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections import deque

import numpy as np
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Counting, address, near_sum, outcomes, ramp

from qccl import _host, lifetime
from qccl._host import RUNS_IN_FLIGHT
from qccl.collectives.allreduce import one_shot, two_round
from qccl.dtypes import FLOAT32
from qccl.engine.control import CONTROL_TAG
from qccl.errors import ArgumentError, EngineError, PeerLost
from qccl.schedule import Buffer, Encode, Exchange, Role, Schedule, Span, Transfer
from qccl.transports.loopback import LoopbackGroup


def reduce_and_close(t):
    caller = Caller(t)
    y = caller.allreduce(ramp(t.rank, 1000))
    caller.close()
    assert not any(engine is caller.engine for engine in lifetime._kept), "all others have left, too"
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
    looked = threading.Event()

    def run(t):
        caller = Caller(t)
        if t.rank:  # until then no run of rank 0 can end
            assert looked.wait(20)
        x = ramp(t.rank, 1000)
        ys = [np.empty_like(x) for _ in range(3)]
        runs = [caller.start(caller.program(1000), x, y) for y in ys]
        together = all(e.begun for e in runs)
        ys.append(np.empty_like(x))
        another = caller.start(caller.program(1000), ys[0], ys[-1])
        lined_up = another.waits_for()
        looked.set()
        for execution in (*runs, another):
            execution.run()
        caller.close()
        return together, lined_up

    assert outcomes(2, run)[0] == (True, "it is queued behind calls that have not ended")


class Held:
    """A loop whose runs advance only where somebody waits for them."""

    def __init__(self, loop):
        self._loop = loop

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def advance_briefly(self, on_control):
        return _host.Outcome.PAUSE


def test_thousands_of_runs_that_end_at_once_may_be_lined_up():
    caller = Caller(LoopbackGroup(1).transport(0))
    caller.engine._loop = Held(caller.engine._loop)
    x = ramp(0, 1000)
    y = np.empty_like(x)
    first = caller.start(caller.program(1000), x, y)
    in_place = [caller.program(4, in_place=True) for _ in range(3000)]
    runs = []
    for program in in_place:
        addresses = {"output": address(x)}
        runs.append(caller.run_on(program, addresses, caller.text(4), x))
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
        assert near_sum(y, 2) and most <= 1 and 0 < operations <= steps


def test_a_program_is_run_again_and_again():
    def run(t):
        caller = Caller(t)
        program = caller.program(300)
        for i in range(40):
            x = ramp(t.rank + i, 300)
            y = np.empty_like(x)
            execution = caller.start(program, x, y)
            execution.run()
            exact = sum(ramp(r + i, 300) for r in range(3))
            assert np.abs(y - exact).max() <= 6
        caller.close()
        return True

    assert outcomes(3, run) == [True] * 3


def test_runs_of_one_program_wait_for_each_other():
    """Rank 1 begins later, so no run of rank 0 can end meanwhile."""
    all_started = threading.Event()

    def run(t):
        caller = Caller(t)
        program = caller.program(5000, chunk_elements=512, depth=1)
        xs = [ramp(t.rank + i, 5000) for i in range(5)]
        ys = [np.empty_like(x) for x in xs]
        assert t.rank == 0 or all_started.wait(60)
        runs = [caller.start(program, x, y) for x, y in zip(xs, ys, strict=True)]
        begun = [e.begun for e in runs]
        all_started.set()
        for execution in runs if t.rank else reversed(runs):
            execution.run()
        caller.close()
        return begun, [np.abs(y - ramp(i, 5000) - ramp(i + 1, 5000)).max() for i, y in enumerate(ys)]

    (begun, errors), (_, others) = outcomes(2, run)
    assert begun == [True, False, False, False, False] and max(errors + others) <= 4


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
            caller.run_on(program, {"input": 0}, caller.text(10))
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

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        if tag == CONTROL_TAG:
            self._listening.add(token)
        self._transport.receive(peer, tag, address, nbytes, token, arrived=arrived)

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
            assert waits.wait(60)
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


def test_memory_that_two_runs_share():
    """The comparison in ascending order finds what a comparison of all pairs finds."""

    def shared(a, b) -> bool:
        (start, nbytes, is_written), (other_start, other_nbytes, other_is_written) = a, b
        overlap = start < other_start + other_nbytes and other_start < start + nbytes
        return overlap and nbytes > 0 < other_nbytes and (is_written or other_is_written)

    def memory(buffers) -> _host.Memory:
        made = _host.Memory(len(buffers))
        for number, (start, nbytes, is_written) in enumerate(buffers):
            made.add_caller(number, nbytes, is_written)
            made[number] = start
        return made

    rng = np.random.default_rng(5)
    found = []
    for _ in range(3000):
        sides = []
        for _ in range(2):
            starts = rng.integers(0, 60, rng.integers(0, 5))
            sides.append([(int(start), int(rng.integers(0, 9)), bool(rng.integers(2))) for start in starts])
        ours, theirs = map(memory, sides)
        expected = any(shared(a, b) for a in sides[0] for b in sides[1])
        assert ours.conflicts(theirs) == theirs.conflicts(ours) == expected
        found.append(expected)
    assert 500 < sum(found) < 2500


def test_an_empty_array_shares_no_memory():
    """It may lie inside another call's array, and its call need not wait."""

    def run(t):
        caller = Caller(t)
        memory = ramp(t.rank, 200)
        first = caller.start(caller.program(200), memory, memory)
        second = caller.start(caller.program(0), memory[50:50], memory[50:50])
        begun = second.begun
        for each in (first, second):
            each.run()
        caller.close()
        return begun

    assert outcomes(2, run) == [True, True]
