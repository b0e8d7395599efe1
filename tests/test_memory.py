"""What a call takes beside the caller's arrays: a workspace that does not depend on the length, and no copy of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import qccl
from qccl.collectives.allreduce import ALLREDUCE, choose_allreduce
from qccl.collectives.operands import CallerBuffers, Group
from qccl.dtypes import FLOAT32
from qccl.host.engine import HostEngine
from qccl.schedule import Role
from qccl.transports.loopback import LoopbackGroup

MIB = 1 << 20
CODEC = qccl.codecs.get("minmax8")


def schedule(n, nbytes, chunking):
    count = nbytes // 4
    make = ALLREDUCE[choose_allreduce(count, n, FLOAT32, CODEC)]
    return make(Group.of_all(0, n), CallerBuffers.alike((count,), FLOAT32), CODEC, chunking=chunking)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_workspace_is_small_and_constant(n, shared):
    transport = LoopbackGroup(n).transport(0)
    transport.shares_memory = shared
    engine = HostEngine(transport)
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
        engine = HostEngine(LoopbackGroup(n).transport(0))
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


def test_a_call_copies_no_array():
    """All ranks' memory together, from the first call of its kind on; the arrays are made before."""
    n, nbytes = 4, 16 * MIB
    arrays = [np.ones(nbytes // 4, np.float32) for _ in range(n)]
    tracemalloc.start()
    try:
        qccl.run_ranks(n, lambda comm: comm.quantized_allreduce(arrays[comm.rank]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all((x == n).all() for x in arrays)
    assert peak <= n * 0.25 * nbytes


def test_the_process_grows_no_more_than_that():
    """The same of one rank by what the kernel counts."""
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
