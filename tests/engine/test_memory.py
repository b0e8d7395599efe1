"""Memory of runs: a workspace that does not depend on the length, no copy of arrays, and which runs share some."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from swapped_memory import COUNT, call, refused

import qccl
from qccl import _host
from qccl.base.dtypes import FLOAT32
from qccl.collectives.allreduce import ALLREDUCE, choose_allreduce
from qccl.collectives.operands import CallerBuffers, RankGroup
from qccl.collectives.schedule import Role
from qccl.engine.host.engine import HostEngine
from qccl.transports.loopback import LoopbackGroup

MIB = 1 << 20
CODEC = qccl.codecs.get("minmax8")


def schedule(n, nbytes, chunking):
    count = nbytes // 4
    make = ALLREDUCE[choose_allreduce(count, n, FLOAT32, CODEC)]
    return make(RankGroup.of_all(0, n), CallerBuffers.alike((count,), FLOAT32), CODEC, chunking=chunking)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_workspace_is_small_and_constant(n, shared):
    transport = LoopbackGroup(n).transport(0)
    transport.shares_memory = shared
    engine = HostEngine(transport, 60.0)
    work = [
        sum(b.nbytes for b in schedule(n, size, engine.chunking).buffers.values() if b.role is Role.WORK)
        for size in (16 * MIB, 64 * MIB, 1024 * MIB)
    ]
    assert max(work) <= 0.25 * 16 * MIB
    assert work[2] - work[1] <= 0.025 * work[1]
    assert max(work) - work[0] <= 0.1 * work[0], "few chunks are rounded further down to what divides the length"


@pytest.mark.parametrize("n", [2, 8])
def test_a_plan_is_small(n):
    """With the description of its steps, which grows with their number."""

    def taken(nbytes):
        engine = HostEngine(LoopbackGroup(n).transport(0), 60.0)
        tracemalloc.start()
        program = engine.compile(schedule(n, nbytes, engine.chunking))
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert program.workspace_nbytes
        native = program.steps.nbytes  # which tracemalloc does not see
        assert native > 100 * len(program.steps)
        return held + native, peak + native

    small, large = taken(16 * MIB), taken(64 * MIB)
    assert max(small) <= 0.25 * 16 * MIB
    assert large[0] - small[0] <= 0.012 * 48 * MIB
    assert large[1] - small[1] <= 0.03 * 48 * MIB, "while it is made"


def test_the_process_grows_no_more_than_that():
    """By what the kernel counts: a call copies no array."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("this kernel does not tell the peak of a process's memory")

    def resident(key):
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    def run(comm):
        x, y = np.ones(4 * MIB, np.float32), np.zeros(4 * MIB, np.float32)
        y += 1  # its pages are there
        comm.quantized_allreduce(np.ones(100, np.float32))
        comm.barrier()
        if comm.rank == 0:
            reset.write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        comm.barrier()
        comm.quantized_allreduce(x, out=y)
        comm.barrier()
        grown = resident("VmHWM") - before
        comm.barrier()
        return grown

    assert max(qccl.run_ranks(2, run)) <= 2 * 0.25 * 16 * MIB


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


@pytest.mark.parametrize("planned", [False, True])
def test_an_array_cannot_be_resized_in_the_middle_of_a_call(planned: bool) -> None:
    def resize(x: np.ndarray) -> None:
        refused(ValueError, "cannot resize", lambda: x.resize(4 * COUNT))

    assert (call(lambda: np.full(COUNT, 2, np.float32), resize, planned=planned) == 3).all()
