"""Plans that run again and again: what a run checks, and what another bind() changes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import qccl
from qccl.errors import ArgumentError, InvalidBufferError

COUNT = 300
WARM = 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_plan_that_is_called_again(executions, size):
    def run(comm):
        x, y = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
        plan = comm.plan("allreduce", COUNT, codec="none")
        with pytest.raises(ArgumentError, match="no arrays yet"):
            plan.run()
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
        with pytest.raises(ArgumentError, match="still running" if size > 1 else "running"):
            plan.bind(x)
        with pytest.raises(ArgumentError, match="running"):
            plan.run()
        work.wait(timeout=20)
        return since

    assert qccl.run_ranks(size, run) == [0] * size


def test_a_plan_called_with_two_arrays_in_turn(executions):
    def run(comm):
        plan, arrays = comm.plan("allreduce", COUNT), [np.ones(COUNT, np.float32) for _ in range(2)]
        plan(arrays[0])
        before = len(executions)
        for i in range(6):
            assert plan(arrays[i % 2]) is plan.wait() is arrays[i % 2]
        assert len(executions) == before
        with pytest.raises(ArgumentError, match="timeout"):
            plan.wait(timeout=-1)

    qccl.run_ranks(1, run)


def test_a_plan_started_in_the_middle_of_its_run(monkeypatch):
    """As a handler of a signal may do; poll() stands for it."""
    warmed = threading.Barrier(2)

    def run(comm):
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
        return refused, x[0]

    assert qccl.run_ranks(2, run) == [([True], 2 ** (WARM + 1))] * 2


@pytest.fixture
def torch():
    """Imported for these tests alone: the import takes seconds."""
    return pytest.importorskip("torch")


@pytest.mark.parametrize("call", ["run", "start"])
def test_a_plan_whose_tensor_has_less_memory_at_the_same_address(call, torch):
    def run(comm):
        memory = np.ones(COUNT, np.float32)
        x = torch.frombuffer(memory, dtype=torch.float32)
        plan = comm.plan("allreduce", COUNT).bind(x)
        x.data = torch.frombuffer(memory, dtype=torch.float32, count=2)
        with pytest.raises(InvalidBufferError, match=f"needs {4 * COUNT} bytes, but its storage has 8 bytes"):
            getattr(plan, call)()

    qccl.run_ranks(1, run)


def test_a_plan_that_runs_leaves_its_tensor_resizable(torch):
    def run(comm):
        x = torch.ones(COUNT)
        plan = comm.plan("allreduce", COUNT).bind(x)
        for _ in range(3):
            plan.run()
        assert x.untyped_storage().resizable()

    qccl.run_ranks(1, run)


def test_a_plan_whose_tensor_was_moved(torch):
    def run(comm):
        x = torch.ones(COUNT)
        plan = comm.plan("allreduce", COUNT).bind(x)
        for _ in range(3):
            plan.run()
        x.data = torch.ones(COUNT)
        with pytest.raises(InvalidBufferError, match=r"call plan.bind\(\) again"):
            plan.run()

    qccl.run_ranks(1, run)


def test_a_plan_that_failed():
    warmed = threading.Barrier(2)

    def run(comm):
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

    qccl.run_ranks(2, run)


def test_headers_of_a_plan_with_other_text():
    """A run started in another way between has left its own header in the plan's program."""

    def run(comm):
        rows = np.ones((10, 30), np.float32)
        columns = np.asfortranarray(rows)
        plan = comm.plan("reduce", COUNT, codec="none")
        for array in (rows, rows, columns, rows, columns, columns, rows):
            plan(array)
        dithered = comm.plan("allreduce", COUNT, codec="dithering:k=4").bind(np.ones(COUNT, np.float32))
        for _ in range(3):
            dithered.run()
        saved = comm.state_dict()
        comm.load_state_dict(saved | {"calls": 1000})
        dithered.start().wait() if comm.rank else dithered.run()
        comm.load_state_dict(saved)
        dithered.run()
        for array in (rows, rows, columns):
            plan(array)
        with pytest.raises(qccl.MismatchError):
            plan(rows if comm.rank else columns)

    qccl.run_ranks(2, run)


def test_a_key_on_a_rank_without_state():
    """A rank that owns nothing has no residuals, and behaves like the others under the key."""

    def run(comm):
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

    qccl.run_ranks(2, run)


@pytest.mark.parametrize("codec", ["minmax2+ef", "dithering:k=4"])
def test_a_plan_called_gives_the_bytes_of_one_started(codec):
    def run(comm, called):
        x, y = np.linspace(-1, 1, COUNT, dtype=np.float32) + comm.rank, np.empty(COUNT, np.float32)
        plan = comm.plan("allreduce", COUNT, codec=codec, key="x" if "ef" in codec else None).bind(x, y)
        found = []
        for i in range(6):
            if i == 4:
                comm.load_state_dict(comm.state_dict() | {"calls": 1000})
            if called:
                plan.run()
            else:
                plan.start().wait()
            found.append(y.tobytes())
        return found

    assert qccl.run_ranks(2, lambda comm: run(comm, True)) == qccl.run_ranks(2, lambda comm: run(comm, False))


def test_a_plan_in_other_orders_of_axes():
    """The header names the order; a rank with another one is told."""

    def run(comm):
        rows = np.ones((10, 30), np.float32)
        columns = np.asfortranarray(rows)
        plan = comm.plan("allreduce", COUNT, codec="none")
        for _ in range(3):
            for array in (rows, columns):
                array[:] = 1
                plan(array)
                assert (array == 2).all()
        with pytest.raises(qccl.MismatchError):
            plan(columns if comm.rank else rows)

    qccl.run_ranks(2, run)
