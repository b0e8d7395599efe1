"""Ranks of a torch.distributed group over gloo: bytes, failures, and the end of their processes."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import patience
import pytest
import torch
import torch.distributed as dist
from on_ranks import check, in_group, on_ranks, run
from rank_calls import all_calls, check_texts_and_a_split, error_of

import qccl
from qccl.bench.sweep.plain import plain_allreduce
from qccl.transports.gloo import TorchTransport


@on_ranks(1, 2, 3, transport="gloo")
def test_calls() -> None:
    """The host's bytes, tensors, splits, and the group that was given goes on."""
    with qccl.Communicator.from_torch(timeout=30) as comm:
        assert (comm.backend, comm.transport.name) == ("host", "gloo" if comm.size > 1 else "loopback")
        assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
        expected = qccl.run_ranks(comm.size, all_calls)[comm.rank]
        assert all_calls(comm) == expected
        x = torch.full((1000,), float(comm.rank))
        assert comm.quantized_allreduce(x) is x and (x == sum(range(comm.size))).all()
        check_texts_and_a_split(comm)
        if comm.size > 1:
            z = np.arange(9, dtype=np.float32) * (comm.rank + 1)
            plain_allreduce(comm.transport)(z.ctypes.data, z.ctypes.data, 9, "float32", "max")
            assert (z == np.arange(9) * comm.size).all()
    dist.barrier()
    if dist.get_world_size() > 2:
        group = dist.new_group([1, 2])
        if dist.get_rank():
            with qccl.Communicator.from_torch(group, timeout=30) as comm:
                assert comm.size == 2 and (comm.quantized_allreduce(np.ones(10, np.float32)) == 2).all()
    dist.barrier()


@on_ranks(3, transport="gloo")
def test_mismatch() -> None:
    """Messages of other sizes: gloo would end the process."""
    for count, codec in ((1000 + dist.get_rank(), "minmax8"), (1000, f"minmax{4 + dist.get_rank()}")):
        comm = qccl.Communicator.from_torch(timeout=20)
        call = partial(comm.quantized_allreduce, np.ones(count, np.float32), codec=codec)
        assert "rank" in error_of(call, qccl.MismatchError)
        dist.barrier()


@on_ranks(3, transport="gloo")
def test_raises() -> None:
    """A rank that fails: the others know at once, and a new group can be made."""
    comm = qccl.Communicator.from_torch(timeout=20)
    comm.barrier()
    dist.barrier()  # all have left the first one
    if comm.rank == 0:
        comm.abort("a reason of its own")
    else:
        text = error_of(lambda: comm.quantized_allreduce(np.ones(1000, np.float32)), qccl.PeerLost)
        assert "a reason of its own" in text, text
    dist.barrier()
    with qccl.Communicator.from_torch(timeout=20) as comm:
        assert (comm.quantized_allreduce(np.ones(10, np.float32)) == comm.size).all()


@in_group
def dies_in_setup() -> None:
    """A rank that is gone in gloo's own collectives, whose errors do not say with whom they failed.

    test_ddp.py has one that is gone in a call.
    """
    comm = qccl.Communicator.from_torch(timeout=20)
    comm.barrier()
    dist.barrier()
    if comm.rank == 0:
        os._exit(0)
    text = error_of(lambda: comm.transport.allgather(b"x", 20), qccl.PeerLost)
    assert text.startswith(("rank 0 was lost", "ranks 0, ")), text
    time.sleep(1)  # so that the other ranks lose rank 0 alone


@in_group
def stops() -> float:
    """One rank stops and one dies, while many transfers are under way: rank 0 knows who died, and its process ends."""
    comm = qccl.Communicator.from_torch(timeout=20)
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == 1:
        time.sleep(1)
        os._exit(0)
    x = np.ones(100_000, np.float32)
    try:
        works = [comm.quantized_allreduce(x.copy(), async_op=True) for _ in range(8)]
        works[0].wait()
    except qccl.PeerLost as error:
        assert "rank 1 was lost" in str(error), error
        return time.time()
    raise AssertionError("no error")


@in_group
def never_comes() -> float:
    """A rank that has stopped before a group was made: the others give up in time, and their processes end."""
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    # the rank that gives up first leaves the other
    error_of(lambda: qccl.Communicator.from_torch(timeout=3), (qccl.CollectiveTimeout, qccl.PeerLost))
    return time.time()


@on_ranks(2, transport="gloo")
def test_stays_away() -> None:
    comm = qccl.Communicator.from_torch(timeout=20)
    comm.barrier()
    if comm.rank == 1:
        error_of(lambda: comm.quantized_allreduce(np.ones(1000, np.float32), timeout=0.5), qccl.CollectiveTimeout)
    dist.barrier()  # over gloo, which the failure does not end


@in_group
def leaves() -> None:
    """Nobody closes, and the processes end."""
    comm = qccl.Communicator.from_torch(timeout=20)
    comm.quantized_allreduce(np.ones(1000, np.float32))
    time.sleep(0.3 * comm.rank)


@in_group
def keeps() -> None:
    """gloo's collectives live on, or a thread of gloo's lets go of their tensors last, perhaps while Python ends.

    They are released with their group, because they keep its connections open.
    """
    works: list[weakref.ref[object]] = []

    def watch(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(*arguments: object) -> object:
            work = original(*arguments)
            works.append(weakref.ref(work))
            return work

        setattr(kind, name, call)

    watch(dist.ProcessGroup, "broadcast")
    watch(dist.ProcessGroupGloo, "allgather")
    watch(dist.ProcessGroupGloo, "allreduce")
    before = open_files()
    for _ in range(3):
        works.clear()
        with qccl.Communicator.from_torch(timeout=20) as comm:
            assert comm.allgather(b"abc") == [b"abc"] * comm.size
            z = np.ones(9, np.float32)
            plain_allreduce(comm.transport)(z.ctypes.data, z.ctypes.data, 9, "float32", "sum")
            assert len(works) > 4 and all(work() is not None for work in works)
        [own] = [work for work in works if work() is not None]  # the broadcast in the program's group, which is there
        assert own is works[0]
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_ranks(1, transport="gloo")
def test_refused() -> None:
    dist.destroy_process_group()
    for make in (qccl.Communicator.from_torch, lambda: TorchTransport.from_group(None, 1.0)):
        assert "init_process_group" in error_of(make, qccl.ArgumentError)


def test_a_rank_that_dies() -> None:
    check(run(dies_in_setup, 3, transport="gloo"), but=0)


@pytest.mark.parametrize("function", [stops, never_comes])
def test_a_process_ends_soon_after_a_rank_has_stopped(function: Callable[[], float]) -> None:
    first, *_, last = run(function, 3, transport="gloo")
    check([first])
    assert last.status < 0 and first.at - float(first.out.split()[0]) < 15 * patience.factor()


def test_processes_end_without_a_call_of_close() -> None:
    check(run(leaves, 3, transport="gloo"))


def test_collectives_of_gloo_are_released_with_their_group() -> None:
    check(run(keeps, 2, transport="gloo"))
