"""One run on the host: steps by hand, when it is done, what it waits for, and its trace."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import pytest
from schedule_cases import one_rank
from threads import CODEC, Caller, Wrapped, near_sum, outcomes, ramp

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import PeerLost
from qccl.collectives.allreduce import one_shot, two_round
from qccl.engine.control import CONTROL_TAG

#: of calls that end because of another rank: longer than outcomes() waits for them
NEVER = 10_000.0


class Looking(Wrapped):
    """A transport that counts the looks that may wait for something."""

    def __init__(self, transport):
        super().__init__(transport)
        self.waits = 0

    def poll(self, *, idle):
        self.waits += idle > 0
        return self.wrapped.poll(idle=idle)


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
        assert program.native.trace() == [], "a run without a trace records nothing, and keeps nothing of the last"
        caller.close()
        return before, events, after, len(program.steps)

    for rank, (before, events, after, nodes) in enumerate(outcomes(2, run)):
        assert len(events) == nodes
        assert {e.queue for e in events} == {"compute", "send", "recv"}
        assert all(e.rank == rank and before <= e.start <= e.stop <= after for e in events)
        assert len({(e.queue, *sorted(e.args.items())) for e in events}) == nodes


class SlowLink(Wrapped):
    """A transport that tells of sends one by one, in order, so many looks after the one before: as on a slow link."""

    def __init__(self, transport, looks):
        super().__init__(transport)
        self._looks = looks
        self._now = self._free = 0
        self._sends, self._ended = deque(), set()

    def send(self, peer, tag, address, nbytes, token):
        if not self._sends:
            self._free = self._now + self._looks
        self._sends.append(token)
        self.wrapped.send(peer, tag, address, nbytes, token)

    def poll(self, *, idle):
        self._now += 1
        found = list(self.wrapped.poll(idle=idle))
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


class BadNewsFirst(Wrapped):
    """A transport that tells of sends when the second control message has come, in one look with it, and after it."""

    def __init__(self, transport, waits):
        super().__init__(transport)
        self._waits = waits  # set when nothing is left but a send
        self._sends, self._listening, self._held, self._heard = set(), set(), [], 0

    def send(self, peer, tag, address, nbytes, token):
        self._sends.add(token)
        self.wrapped.send(peer, tag, address, nbytes, token)

    def receive(self, peer, tag, address, nbytes, token, *, arrived=0):
        if tag == CONTROL_TAG:
            self._listening.add(token)
        self.wrapped.receive(peer, tag, address, nbytes, token, arrived=arrived)

    def poll(self, *, idle):
        if self._heard and idle > 2:
            self._waits.set()
        found = list(self.wrapped.poll(idle=idle))
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
            caller.engine.fail(PeerLost("rank 1 gave up: out of paper"))
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


def test_what_a_call_waits_for_is_named():
    """Ranks, where it waits for any; or its own part."""

    def run(t):
        caller = Caller(t, timeout=NEVER)
        execution = caller.begin(40_000)
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
