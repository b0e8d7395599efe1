"""Calls that the host engine runs again with the objects of an earlier run behave like any others, also on failure."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest
import torch

import qccl
import qccl.plan
from qccl.errors import ArgumentError, InvalidBufferError
from qccl.host.engine import HostEngine
from qccl.host.execution import Execution

COUNT = 300
#: calls after which the next equal one runs again with the same objects
WARM = 3


def made(monkeypatch) -> list[Execution]:
    """The executions that are made from now on."""
    found = []
    usual = Execution.__init__

    def count(self, *arguments):
        found.append(self)
        usual(self, *arguments)

    monkeypatch.setattr(Execution, "__init__", count)
    return found


def warm(comm, **options) -> np.ndarray:
    x = np.zeros(COUNT, np.float32)
    for _ in range(WARM):
        comm.quantized_allreduce(x, **options)
    return x


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_equal_call_makes_no_execution(monkeypatch, size):
    executions = made(monkeypatch)

    def run(comm):
        x, y = warm(comm, codec="none"), np.empty(COUNT, np.float32)
        for _ in range(WARM):
            comm.quantized_allreduce(x, y, codec="none")
        comm.barrier()
        before = len(executions)
        comm.allgather(b"")  # all have counted
        for i in range(10):
            x[:] = i + comm.rank
            comm.quantized_allreduce(x, y, codec="none")
            comm.quantized_allreduce(x, codec="none")
            assert (x == size * i + size * (size - 1) // 2).all()
            assert (y == x).all()
        other = np.ones(COUNT, np.float32)  # of the same form
        assert (comm.quantized_allreduce(other, codec="none") == size).all()
        made_since = len(executions) - before
        comm.allgather(b"")
        return made_since, comm.calls

    # the barriers inside allgather() are runs, too: at most two of each rank
    for since, calls in qccl.run_ranks(size, run):
        assert since <= 2 * size
        assert calls == 2 * WARM + 21


def test_an_output_that_is_sometimes_the_input():
    def run(comm):
        x, y = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
        for i in range(12):
            x[:] = 1 + i
            out = (x, y)[i % 2 if i < 6 else i // 2 % 2]
            assert comm.quantized_allreduce(x, out, codec="none") is out
            assert (out == 2 + 2 * i).all()
            assert (x == (2 + 2 * i if out is x else 1 + i)).all()

    qccl.run_ranks(2, run)


def test_tensors(monkeypatch):
    executions = made(monkeypatch)

    def run(comm):
        x = torch.zeros(COUNT)
        for _ in range(WARM):
            comm.quantized_allreduce(x)
        before = len(executions)
        comm.quantized_allreduce(x)
        assert len(executions) == before
        with pytest.raises(InvalidBufferError, match="negated view"):
            comm.quantized_allreduce(x._neg_view())
        x.untyped_storage().resize_(8)
        with pytest.raises(InvalidBufferError, match="its storage has 8 bytes"):
            comm.quantized_allreduce(x)

    qccl.run_ranks(1, run)


def test_beside_calls_under_way():
    def run(comm):
        x, y = warm(comm, codec="none"), np.ones(COUNT, np.float32)
        for i in range(5):
            x[:] = i
            works = [comm.quantized_allreduce(each, codec="none", async_op=True) for each in (y, x)]
            comm.quantized_allreduce(x, codec="none")
            assert (x == 4 * i).all()
            for work in works:
                work.wait(timeout=20)
        assert (y == 2**5).all()

    qccl.run_ranks(2, run)


def test_random_numbers_are_those_of_the_call():
    def run(comm, resumed):
        x = np.linspace(-1, 1, COUNT, dtype=np.float32) + comm.rank
        found = []
        for i in range(8):
            if i == 5 and resumed:
                saved = comm.state_dict()
                for _ in range(4):
                    comm.quantized_allreduce(x, np.empty_like(x), codec="dithering:k=4")
                comm.load_state_dict(saved)
            found.append(comm.quantized_allreduce(x, np.empty_like(x), codec="dithering:k=4").tobytes())
        assert len(set(found)) == 8
        return found

    once = qccl.run_ranks(2, lambda comm: run(comm, False))
    assert once[0] == once[1]
    assert qccl.run_ranks(2, lambda comm: run(comm, True)) == once


def test_arrays_are_released_when_the_call_ends():
    def run(comm):
        warm(comm)
        for _ in range(3):
            x, out = np.ones(COUNT, np.float32), np.ones(COUNT, np.float32)
            dropped = weakref.ref(x), weakref.ref(out)
            comm.quantized_allreduce(x, out)
            comm.quantized_allreduce(out)
            del x, out
            assert [array() for array in dropped] == [None, None]

    qccl.run_ranks(2, run)


def test_a_plan_that_the_cache_dropped(monkeypatch):
    monkeypatch.setattr(qccl.plan, "CACHE_SPECS", 1)

    def run(comm):
        arrays = [np.ones(count, np.float32) for count in (10, 20)]
        for i in range(4):
            for x in arrays:
                assert (comm.quantized_allreduce(x, codec="none") == 2 ** (i + 1)).all()
                comm.quantized_allreduce(np.zeros(30 + i, np.float32))

    qccl.run_ranks(2, run)


def test_the_cache_keeps_the_plan_that_repeats(monkeypatch):
    monkeypatch.setattr(qccl.plan, "CACHE_SPECS", 2)
    executions = made(monkeypatch)

    def run(comm):
        x = warm(comm)
        for count in range(1, 6):
            comm.quantized_allreduce(np.ones(count, np.float32))
            before = len(executions)
            comm.quantized_allreduce(x)
            assert len(executions) == before

    qccl.run_ranks(1, run)


@pytest.mark.parametrize("option", [False, True])
def test_a_rank_that_does_not_call(option):
    warmed = threading.Barrier(2)

    def run(comm):
        options = {"timeout": 0.3} if option else {}
        x = warm(comm, **options)
        if not option:
            comm.timeout = 0.3
        warmed.wait(20)
        if comm.rank:
            time.sleep(1)
            with pytest.raises(qccl.PeerLost):
                comm.quantized_allreduce(x, **options)
        else:
            with pytest.raises(qccl.CollectiveTimeout, match=r"call 3 of the group\): rank 1 did not make this call"):
                comm.quantized_allreduce(x, **options)
        with pytest.raises(qccl.QcclError, match="failed earlier and is unusable"):
            comm.quantized_allreduce(x, **options)
        assert comm.calls == WARM

    qccl.run_ranks(2, run)


def test_a_rank_that_gives_up():
    warmed = threading.Barrier(2)

    def run(comm):
        x = warm(comm)
        warmed.wait(20)  # not barrier(): its last message might meet the end of the group
        if comm.rank:
            comm.abort("no more data")
            return
        with pytest.raises(qccl.PeerLost, match="rank 1 gave up: no more data"):
            comm.quantized_allreduce(x)
        assert comm.calls == WARM
        assert (x == 0).all()

    qccl.run_ranks(2, run)


def test_a_rank_that_left():
    warmed = threading.Barrier(2)

    def run(comm):
        x = warm(comm)
        warmed.wait(20)
        if comm.rank:
            comm._session.engine.close(0.1)
            return
        deadline = time.monotonic() + 20
        with pytest.raises(qccl.PeerLost, match=r"rank 1 has closed its communicator, and rank 0 called .*call 3"):
            while time.monotonic() < deadline:
                comm.quantized_allreduce(x)

    qccl.run_ranks(2, run)


def test_an_abort_by_another_thread():
    warmed = threading.Barrier(2)

    def run(comm):
        x = warm(comm)
        warmed.wait(20)
        if comm.rank:
            time.sleep(1)
            return
        threading.Timer(0.3, comm.abort, ["stopped by hand"]).start()
        begin = time.monotonic()
        with pytest.raises(qccl.PeerLost, match="stopped by hand"):
            comm.quantized_allreduce(x)
        assert time.monotonic() - begin < 20

    qccl.run_ranks(2, run)


def test_an_interrupt(monkeypatch):
    """Ctrl-C in a call that runs again is KeyboardInterrupt here and PeerLost on the other rank."""
    warmed = threading.Barrier(2)

    def run(comm):
        x = warm(comm)
        warmed.wait(20)
        if comm.rank:
            with pytest.raises(qccl.PeerLost, match="rank 0"):
                for _ in range(2):  # rank 0 may have sent all that the first one needs
                    comm.quantized_allreduce(x)
            return

        def interrupted(idle=0):
            raise KeyboardInterrupt

        monkeypatch.setattr(comm.transport, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.quantized_allreduce(x)
        monkeypatch.undo()
        with pytest.raises(qccl.PeerLost, match=r"failed earlier.*KeyboardInterrupt"):
            comm.quantized_allreduce(x)
        assert comm.calls == WARM

    qccl.run_ranks(2, run)


@pytest.mark.parametrize("place", [(HostEngine, "rerun"), (Execution, "renew")])
def test_an_interrupt_before_the_run_begins(monkeypatch, place):
    """Nothing was sent: the call can be made again, and has the number that it would have had."""
    warmed, interrupted = threading.Barrier(2), threading.Barrier(2)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    def call(comm, x):
        return comm.quantized_allreduce(x, np.empty_like(x), codec="dithering:k=4").tobytes()

    def run(comm):
        x = np.linspace(-1, 1, COUNT, dtype=np.float32)
        found = [call(comm, x) for _ in range(WARM)]
        if comm.rank == 0:
            warmed.wait(20)
            monkeypatch.setattr(*place, interrupt)
            interrupted.wait(20)
        else:
            warmed.wait(20)
            interrupted.wait(20)
        with pytest.raises(KeyboardInterrupt):
            call(comm, x)
        assert comm.calls == WARM
        warmed.wait(20)
        if comm.rank == 0:
            monkeypatch.undo()
        interrupted.wait(20)
        return [*found, call(comm, x)]

    def undisturbed(comm):
        x = np.linspace(-1, 1, COUNT, dtype=np.float32)
        return [call(comm, x) for _ in range(WARM + 1)]

    assert qccl.run_ranks(2, run) == qccl.run_ranks(2, undisturbed)


def test_nothing_is_run_again_while_another_thread_drives(monkeypatch):
    def run(comm):
        x = warm(comm)
        engine: HostEngine = comm._session.engine
        executions = made(monkeypatch)
        held, release = threading.Event(), threading.Event()

        def drive():
            with engine._lock:
                held.set()
                release.wait(20)

        thread = threading.Thread(target=drive)
        thread.start()
        held.wait(20)
        threading.Timer(0.2, release.set).start()
        comm.quantized_allreduce(x)  # waits for the lock as any first call does
        thread.join()
        assert len(executions) == 1

    qccl.run_ranks(1, run)


def test_the_rate_is_checked():
    def run(comm):
        x = warm(comm)
        for lr in (-1.0, "x", float("nan")):
            with pytest.raises(ArgumentError, match="lr must be"):
                comm.quantized_allreduce(x, lr=lr)
        comm.quantized_allreduce(x, lr=0.5)

    qccl.run_ranks(1, run)


def test_a_call_in_the_middle_of_another(monkeypatch):
    """A call that a signal handler starts while a repeated call waits gets a number of its own."""
    warmed = threading.Barrier(2)

    def run(comm):
        x, y = warm(comm, codec="none"), np.ones(COUNT, np.float32)
        warmed.wait(20)
        works, usual = [], comm.transport.poll

        def poll(idle=0):
            if not works:
                works.append(None)
                works[0] = comm.quantized_allreduce(x, codec="none", async_op=True)
                assert comm.calls == WARM + 2
            return usual(idle=idle)

        monkeypatch.setattr(comm.transport, "poll", poll)
        x[:] = 1
        comm.quantized_allreduce(x, codec="none")  # the other one waits for it, because it uses the same memory
        comm.quantized_allreduce(y, codec="none")
        assert (works[0].wait(timeout=20) == 4).all()
        assert (y == 2).all()
        assert comm.calls == WARM + 3

    qccl.run_ranks(2, run)


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_a_plan_that_is_called_again(monkeypatch, size):
    executions = made(monkeypatch)

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
        comm.allgather(b"")
        for i in range(5):
            x[:] = i
            assert plan.run() is y
            assert (y == size * i).all()
            assert plan.wait() is y
        since = len(executions) - before
        comm.allgather(b"")
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

    assert all(since <= 2 * size for since in qccl.run_ranks(size, run))


def test_a_plan_called_with_two_arrays_in_turn(monkeypatch):
    executions = made(monkeypatch)

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


@pytest.mark.parametrize("call", ["run", "start"])
def test_a_plan_whose_tensor_has_less_memory_at_the_same_address(call):
    def run(comm):
        memory = np.ones(COUNT, np.float32)
        x = torch.frombuffer(memory, dtype=torch.float32)
        plan = comm.plan("allreduce", COUNT).bind(x)
        x.data = torch.frombuffer(memory, dtype=torch.float32, count=2)
        with pytest.raises(InvalidBufferError, match=f"needs {4 * COUNT} bytes, but its storage has 8 bytes"):
            getattr(plan, call)()

    qccl.run_ranks(1, run)


def test_a_plan_that_runs_leaves_its_tensor_resizable():
    def run(comm):
        x = torch.ones(COUNT)
        plan = comm.plan("allreduce", COUNT).bind(x)
        for _ in range(3):
            plan.run()
        assert x.untyped_storage().resizable()

    qccl.run_ranks(1, run)


def test_a_plan_whose_tensor_was_moved():
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
