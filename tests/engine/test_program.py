"""A schedule compiled for the host: what is refused, and runs that share a program and its workspace."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from threads import CODEC, Caller, outcomes, ramp

from qccl.errors import ArgumentError, EngineError
from qccl.schedule import Buffer, Encode, Role, Schedule, Span


def test_refusals_when_compiling():
    wire = Buffer(72, None, Role.WORK)

    def run(t):
        caller = Caller(t)
        encode = Encode(CODEC, Span("w", 0, 64), Span("w", 0, 72), 0)
        with pytest.raises(EngineError, match="a buffer of bytes"):
            caller.engine.compile(Schedule("s", t.rank, 2, {"w": wire}, (encode,)))
        with pytest.raises(ArgumentError, match="rank 0 of 3"):
            caller.engine.compile(Schedule("s", 0, 3, {}, ()))
        caller.close()
        return True

    assert outcomes(2, run) == [True, True]


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
