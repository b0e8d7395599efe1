"""The host engine on threads: runs, their order, and their tags."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threads import Caller, Counting, Wrapped, address, outcomes, ramp

from qccl import _host
from qccl._host import RUNS_IN_FLIGHT
from qccl.engine.control import CONTROL_TAG
from qccl.transports.loopback import LoopbackGroup


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


class Held(Wrapped):
    """A loop whose runs advance only where somebody waits for them."""

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
