"""Plans: what bind() and each run check, runs again and again, and calls of several arrays by names of buffers."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError
from qccl.collectives import CoalescedSpec, PeerExchangeSpec
from qccl.collectives.schedule import buffer_name

COUNT = 300
WARM = 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_plan_that_is_called_again(executions, size):
    def run(comm):
        x, y = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
        with pytest.raises(ArgumentError, match="allreduce"):
            comm.plan("alltoall", COUNT)
        plan = comm.plan("allreduce", COUNT, codec="none")
        for call in (plan.run, plan.start):
            with pytest.raises(ArgumentError, match=r"no arrays yet.*bind"):
                call()
        with pytest.raises(ArgumentError, match="start"):
            plan.wait()
        with pytest.raises(ArgumentError, match=f"{COUNT}"):
            plan.bind(np.ones(COUNT + 1, np.float32))
        for _ in range(2):
            plan(x)
            plan(x, y)
        plan.bind(x, y)
        comm.barrier()
        before = len(executions)
        for i in range(5):
            x[:] = i
            assert plan.run() is y
            assert (y == size * i).all()
            assert plan.wait() is y
        since = len(executions) - before
        comm.barrier()  # all have counted
        x[:] = 1
        assert plan(x) is x
        assert (x == size).all()
        assert plan.wait() is x
        work = plan.start()
        for call in (lambda: plan.bind(x), plan.run, plan.start):
            with pytest.raises(ArgumentError, match="running"):
                call()
        work.wait(timeout=20)
        assert plan.wait() is work.wait() is x
        assert (plan.nbytes > 0 or size == 1) and "codec=none" in repr(plan)
        return since

    assert qccl.run_ranks(size, run) == [0] * size


@on_ranks(1)
def test_a_plan_called_with_two_arrays_in_turn(comm, executions):
    plan, arrays = comm.plan("allreduce", COUNT), [np.ones(COUNT, np.float32) for _ in range(2)]
    plan(arrays[0])
    before = len(executions)
    for i in range(6):
        assert plan(arrays[i % 2]) is plan.wait() is arrays[i % 2]
    assert len(executions) == before
    with pytest.raises(ArgumentError, match="timeout"):
        plan.wait(timeout=-1)


@on_ranks(2)
def test_a_plan_started_in_the_middle_of_its_run(comm, warmed: threading.Barrier, monkeypatch):
    """As a handler of a signal may do; poll() stands for it."""
    x = np.ones(COUNT, np.float32)
    plan = comm.plan("allreduce", COUNT, codec="none").bind(x)
    for _ in range(WARM):
        plan.run()
    warmed.wait(20)
    usual, refused = comm.transport.poll, []

    def poll(idle=0):
        if not refused:
            assert plan.is_active()
            for call in (plan.start, plan.run, lambda: plan(x), lambda: plan.bind(x)):
                with pytest.raises(ArgumentError, match="running"):
                    call()
            refused.append(True)
        return usual(idle=idle)

    monkeypatch.setattr(comm.transport, "poll", poll)
    assert plan.run() is x
    assert not plan.is_active()
    assert (refused, x[0]) == ([True], 2 ** (WARM + 1))


@on_ranks(2)
def test_a_plan_that_failed(comm, warmed: threading.Barrier):
    x = np.zeros(COUNT, np.float32)
    plan = comm.plan("allreduce", COUNT)
    for _ in range(WARM):
        plan(x)
    warmed.wait(20)
    if comm.rank:
        comm.abort("no more data")
        return
    for call in (plan.run, plan.wait, plan.start, lambda: plan(x)):
        with pytest.raises(qccl.PeerLost, match="no more data"):
            call()


@on_ranks(2)
def test_a_refused_bind_leaves_the_plan_as_it_was(comm):
    memory = np.ones(COUNT + 10, np.float32)
    x, out = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    plan = comm.plan("allreduce", COUNT).bind(x, out)
    with pytest.raises(qccl.InvalidBufferError, match="overlap"):
        plan.bind(memory[:COUNT], memory[10:])
    plan.start().wait()
    assert out.tolist() == [2.0] * COUNT and memory.tolist() == [1.0] * (COUNT + 10)


@on_ranks(2)
def test_headers_of_a_plan_with_other_text(comm):
    """A run started in another way between has left its own header, which names the order of axes, in the program."""
    rows = np.ones((10, 30), np.float32)
    columns = np.asfortranarray(rows)
    plans = [comm.plan(collective, COUNT, codec="none") for collective in ("allreduce", "reduce")]
    for array in (rows, rows, columns, rows, columns, columns, rows):
        for plan in plans:
            array[:] = 1
            plan(array)
            assert (array == 2).all() or (comm.rank and plan is plans[1])
    dithered = comm.plan("allreduce", COUNT, codec="dithering:k=4").bind(np.ones(COUNT, np.float32))
    for _ in range(3):
        dithered.run()
    saved = comm.state_dict()
    comm.load_state_dict(saved | {"calls": 1000})
    dithered.start().wait() if comm.rank else dithered.run()
    comm.load_state_dict(saved)
    dithered.run()
    for array in (rows, rows, columns):
        plans[1](array)
    with pytest.raises(qccl.MismatchError):
        plans[comm.calls % 2](rows if comm.rank else columns)


@on_ranks(2)
def test_a_key_on_a_rank_without_state(comm):
    """A rank that owns nothing has no residuals, and behaves like the others under the key."""
    x = np.ones(COUNT, np.float32)
    plan = comm.plan("reduce_scatter", COUNT, codec="minmax4+ef", key="k", counts=[COUNT, 0]).bind(x)
    for _ in range(2):
        for _ in range(3):
            plan.run()
        comm.reset("k")
        plan.run()
        comm.reset("k")
    plan.run(lr=0.5)
    with pytest.raises(ArgumentError, match="lr"):
        plan.run()
    comm.reset("k")
    plan.run()
    comm.reset("k")


def test_a_plan_that_runs_again_keeps_no_memory():
    """Not the smallest object per run, of 16 bytes; what Python keeps now and then is less than 2000 in all."""
    runs = 500

    def run(comm):
        x, y = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
        plan = comm.plan("allreduce", COUNT, chunk=4096).bind(x, y)
        if comm.rank == 0:
            tracemalloc.start()
        found = []
        for count in (200, runs):
            for _ in range(count):
                plan.start().wait()
            comm.barrier()
            found.append(tracemalloc.get_traced_memory())
            comm.barrier()
            if comm.rank == 0:
                tracemalloc.reset_peak()
            comm.barrier()
        if comm.rank == 0:
            tracemalloc.stop()
        (held, _), (now, peak) = found
        return now - held, peak - held

    growth, peak = qccl.run_ranks(2, run)[0]
    assert growth < 16 * runs and peak < 50_000


@on_ranks(2, timeout=20)
def test_many_arrays(comm: qccl.Communicator) -> None:
    sizes = (5, 3000)
    plan = comm.plan_of(CoalescedSpec.from_arguments(sum(sizes), "float32", "none", None, each=sizes))
    xs = [np.full(size, comm.rank + 1, np.float32) for size in sizes]
    outs = [np.empty_like(x) for x in xs]
    arrays = {buffer_name("input", i): x for i, x in enumerate(xs)}
    arrays |= {buffer_name("output", i): out for i, out in enumerate(outs)}
    assert plan.bind_buffers(arrays, outs).run() is outs
    assert all((out == 3).all() for out in outs) and all((x == comm.rank + 1).all() for x in xs)
    with pytest.raises(qccl.ArgumentError, match=r"the buffers of this call are \['input 0', .*, not \['input 0'\]"):
        plan.bind_buffers({"input 0": xs[0]})
    with pytest.raises(qccl.ArgumentError, match="has 3000 elements, and allreduce_coalesced"):
        plan.bind_buffers(arrays | {"input 0": xs[1]})


@on_ranks(2, timeout=20)
def test_replicas_and_state(comm: qccl.Communicator) -> None:
    other = 1 - comm.rank
    peers = {"send_to": [other], "receive_from": [other], "applied": True}
    spec = PeerExchangeSpec.from_arguments(4, "float32", "minmax8+ef", None, **peers)
    with pytest.raises(qccl.ArgumentError, match="pass key="):
        comm.plan_of(spec)
    plan = comm.plan_of(spec, "x")
    z, applied, replica = (np.full(4, value, np.float32) for value in (comm.rank + 1, 0, 0))
    plan.bind_buffers({"input": z, "applied": applied, buffer_name("replica", other): replica}, applied).run()
    assert (
        (applied == comm.rank + 1).all() and (replica == other + 1).all() and list(comm.state_dict()["keys"]) == ["x"]
    )


def test_buffers_of_a_plan_are_a_dict():
    with pytest.raises(qccl.ArgumentError, match="arrays must be a dict of arrays by names of buffers, not list"):
        qccl.run_ranks(1, lambda comm: comm.plan("allreduce", 8).bind_buffers([np.ones(8, np.float32)]))
