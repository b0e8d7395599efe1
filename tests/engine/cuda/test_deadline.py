"""Deadlines on fake GPUs: ranks that stay away, work that never ends, full queues, and the watchdog."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import fake_nccl
import patience
import pytest
from clocks import Clock
from cuda_ranks import called, on_gpus, one, pair, summed

import qccl


def wait_for_abort(world, blocked):
    """Return when rank 0 has aborted NCCL, while the thread ``blocked`` runs."""
    patience.wait_until(lambda: ("abort", 0) in world.calls or not blocked.is_alive(), what="NCCL is aborted")
    assert ("abort", 0) in world.calls, "the thread was not blocked"


@on_gpus(2)
def test_a_rank_that_stays_away(comm, missed: threading.Event, world, cupy):
    x = summed(comm)
    if comm.rank == 1:
        assert missed.wait(60)
        return
    work = comm.quantized_allreduce(x, async_op=True, timeout=0.3)
    with pytest.raises(qccl.CollectiveTimeout, match="allreduce"):
        work.synchronize()
    assert isinstance(work.exception(), qccl.CollectiveTimeout)
    for call in (lambda: comm.quantized_allreduce(x), comm.check, comm.barrier):
        with pytest.raises(qccl.CollectiveTimeout, match="earlier"):
            call()
    missed.set()
    wait_for_abort(world, threading.current_thread())  # which the thread that has failed makes last


@on_gpus(1)
def test_the_watchdog_needs_nobody_who_waits(comm, world, cupy):
    x, out = called(comm)
    world.ends = False
    comm.quantized_allreduce(x, out, timeout=0.2)  # a program that never asks
    wait_for_abort(world, threading.current_thread())
    world.ends = True
    with pytest.raises(qccl.CollectiveTimeout):
        comm.check()


@on_gpus(1)
def test_the_deadline_counts_from_the_first_step_on_the_device(comm, world, cupy, monkeypatch):
    """The caller's own work before a call may take longer than the call's timeout."""
    clock = Clock()
    monkeypatch.setattr("qccl.base.deadline.time", clock)
    x, out = called(comm)
    world.frozen = True
    work = comm.quantized_allreduce(x, out, async_op=True)
    clock.ahead = 1000.0
    patience.wait_until(lambda: clock.asked > 2 or work.is_completed())  # the watchdog has looked
    world.frozen = False
    assert work.synchronize() is out


@pytest.mark.parametrize("waits", ["a launch of the caller", "the wait for a call"])
@on_gpus(1)
def test_the_deadline_while_a_thread_waits_for_room_in_a_full_queue(comm, waits, world, cupy):
    """The driver answers no question meanwhile, so the watchdog must ask none. Work.wait() blocks, too."""
    x, out = called(comm)
    world.ends = False
    world.holds = lambda node: node.what == "a kernel of the caller"
    work = comm.quantized_allreduce(x, out, async_op=True, timeout=0.3)
    for _ in range(40):
        world.put(0, "a kernel of the caller")
    world.queue_entries = 40

    def wait():
        with contextlib.suppress(qccl.CollectiveTimeout):  # if the deadline has passed already
            world.put(0, "a kernel of the caller") if waits == "a launch of the caller" else work.wait()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_for_abort(world, waiter)
    world.ends, world.holds = True, lambda node: False
    waiter.join(60)
    with pytest.raises(qccl.CollectiveTimeout, match="deadline"):
        comm.check()


@on_gpus(1, timeout=60.0)
def test_the_runs_under_way_leave_room_in_the_queues(comm, world, cupy):
    """A caller who never waits is stopped before a launch blocks: the queue of a stream holds about 1,024 entries."""
    calls, fullest = 600, 0
    x, out = pair()
    plan = comm.plan("allreduce", 100, codec="minmax8").bind(x, out)
    plan.start().synchronize()
    world.frozen = True
    done = []
    caller = threading.Thread(target=lambda: [done.append(plan.start()) for _ in range(calls)])
    caller.start()
    before, limit = -1, patience.Limit(30)
    while len(done) < calls and (fullest <= 100 or before < len(done)):  # until the caller is blocked
        assert limit.left()
        before = len(done)
        time.sleep(0.3)
        fullest = max(world._queued(stream) for stream in world.tail)
    assert len(done) < calls
    world.frozen = False
    caller.join(60)
    comm.check()
    assert len(done) == calls and 100 < fullest < 1024


@on_gpus(1)
def test_waiting_for_room_has_a_deadline_though_no_call_begins(comm, world, cupy):
    """The queues are full behind work of the caller that never ends."""
    x, out = pair()
    plan = comm.plan("allreduce", 100, codec="minmax8").bind(x, out)
    plan.start().synchronize()
    world.frozen, errors = True, []

    def fill():
        try:
            while True:
                plan.start(timeout=0.3)
        except qccl.QcclError as error:
            errors.append(error)

    caller = threading.Thread(target=fill)
    caller.start()
    caller.join(60)
    world.frozen = False
    [error] = errors
    assert isinstance(error, qccl.CollectiveTimeout)
    assert "waited 0.3 s for an earlier call to begin" in str(error) and ("abort", 0) in world.calls


@on_gpus(1)
def test_a_function_that_blocks_holds_up_no_deadline(comm, world, cupy):
    """One of Work.add_done_callback(), of a call that has ended well."""
    called, release = threading.Event(), threading.Event()
    world.frozen = True
    work = comm.quantized_allreduce(*pair(), async_op=True)
    work.add_done_callback(lambda _: (called.set(), release.wait(60)))
    world.frozen = False
    assert called.wait(60)
    world.ends = False
    comm.quantized_allreduce(*pair(), async_op=True, timeout=0.2)
    try:
        wait_for_abort(world, threading.current_thread())
    finally:
        release.set()
        world.ends = True


@pytest.mark.parametrize("asked", ["wait", "check"])
@on_gpus(1)
def test_a_timeout_of_the_wait_or_the_check(comm, asked, world, cupy):
    x, out = called(comm)
    world.frozen = True
    work = comm.quantized_allreduce(x, out, async_op=True)
    pending = "" if asked == "wait" else "rank 0 has pending calls that did not end within "
    with pytest.raises(qccl.CollectiveTimeout, match=rf"{pending}0\.1 s"):
        (work.wait if asked == "wait" else comm.check)(timeout=0.1)


def test_making_a_communicator_has_a_deadline(world, cupy):
    """NCCL would wait longer for the other rank."""
    with pytest.raises(qccl.CollectiveTimeout, match=r"making of the communicator within 0\.2 s"):
        qccl.Communicator(qccl.get_unique_id(), 0, 2, timeout=0.2)


def test_a_watchdog_that_collects_another_communicator_keeps_its_deadline(world, cupy, monkeypatch):
    """The collector of garbage runs in any thread, and NCCL may end a communicator only when the device goes on."""
    threads = []

    def wait_for_the_device(comm):
        threads.append(threading.current_thread().name)
        patience.wait_until(lambda: ("abort", 0) in world.calls, seconds=60)  # longer than the watchdog may take

    def run(comm):
        x, out = called(comm)
        other = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0)
        called(other)
        cycle = [other]
        cycle.append(cycle)
        ended, collect, check = threading.Event(), threading.Event(), comm.transport.check
        weakref.finalize(other._session.engine, ended.set)

        def check_and_collect():
            if collect.is_set() and not ended.is_set():
                gc.collect()
            check()

        comm.transport.check = check_and_collect
        monkeypatch.setattr(fake_nccl.Communicator, "destroy", wait_for_the_device)
        del other, cycle
        world.ends = False
        comm.quantized_allreduce(x, out, timeout=0.3)
        collect.set()
        patience.wait_until(lambda: ("abort", 0) in world.calls, seconds=30, what="the watchdog is not blocked")
        assert ended.is_set()
        world.ends = True

    gc.disable()
    try:
        one(run)
    finally:
        gc.enable()
    world.finish(lambda: threads)
    assert set(threads) == {"garbage of qccl"}


@on_gpus(1)
def test_the_watchdog_frees_no_arrays(comm, world, cupy):
    threads = []

    class Kept:
        def __del__(self):
            threads.append(threading.current_thread().name)

    x, out = called(comm)
    x.kept = Kept()
    world.frozen = True
    comm.quantized_allreduce(x, out)
    del x
    assert not threads
    world.frozen = False
    patience.wait_until(lambda: threads)  # a program that never asks
    assert threads == ["garbage of qccl"]
