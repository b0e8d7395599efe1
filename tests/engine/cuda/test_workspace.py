"""The workspace that a communicator's plans share on a GPU, and the lack of memory."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import Captures, alike, on_gpus, ranks, values

import qccl
from qccl.engine.cuda import libraries

SMALL, LARGE = 3000, 40_000
CALL = {"codec": "minmax8", "algorithm": "two_round"}


def blocks(comm):
    """The sizes of the workspace's blocks, by their addresses."""
    return {block.ptr: nbytes for block, nbytes in comm._session.engine._workspace._blocks}


def room_for(nbytes, cupy, monkeypatch):
    """No allocation of the pool may be larger."""
    alloc = cupy.cuda.alloc

    def little(wanted):
        if wanted > nbytes:
            raise fake_cuda.OutOfMemoryError("out of memory")
        return alloc(wanted)

    monkeypatch.setattr(cupy.cuda, "alloc", little)


@pytest.fixture
def tiny(monkeypatch, cupy):
    """The first block is so small that a plan needs another."""
    module = importlib.import_module("qccl.engine.cuda.workspace")
    monkeypatch.setattr(module, "_GRANULE", 4096)
    monkeypatch.setattr(module, "RESERVED_NBYTES", 32_768)


# -- one workspace ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_plans_on_different_streams_share_it(seed, world, cupy):
    """All calls are under way at once, on three streams, and with different codecs; the bytes are the host's."""
    world.random.seed(seed)
    counts = [SMALL, 1, LARGE, 0, 777, LARGE + 1]
    codecs = ["minmax8", "none", "minmax4:rounding=stochastic,seed=3", "minmax8", "minmax3:bucket=shard", "minmax2"]

    def calls(comm, array):
        on_gpu, found, works = comm.backend == "cuda", [], []
        before = blocks(comm) if on_gpu else {}
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)] if not comm.rank else [0, 0, 0]
        for turn in range(2):
            for i, (count, codec) in enumerate(zip(counts, codecs, strict=True)):
                found.append(array(values(comm.rank, count, 10 * turn + i)))
                call = {"codec": codec, "algorithm": "two_round", "chunk": 1024, "async_op": True}
                how = {"stream": streams[i % 3]} if on_gpu else {}
                works.append(comm.quantized_allreduce(found[-1], **call, **how))
        for work in works:
            work.synchronize()
        if on_gpu:
            programs = [program for each in comm._session.programs for program in each.programs]
            bases = {program._workspace.ptr for program in programs}
            assert len(programs) == len(counts) and bases == set(before) == set(blocks(comm))
        return found

    alike(2, calls)


@pytest.mark.parametrize("seed", range(3))
def test_it_grows_under_calls_that_use_it(seed, world, cupy, tiny):
    """Earlier plans keep their block, also those of graphs; all give the host's bytes after it has grown."""
    world.random.seed(seed)
    capture = Captures(cupy, 2)

    def on_gpu(comm):
        with libraries.on_device(comm.rank):
            x, y, z = (fake_cuda.array(values(comm.rank, n, i), comm.rank) for i, n in enumerate((SMALL, LARGE, SMALL)))
            comm.quantized_allreduce(z, **CALL)
            stream, graph = capture(comm, lambda s: comm.quantized_allreduce(z, stream=s, **CALL))
            before = sum(blocks(comm).values())
            comm.quantized_allreduce(x, async_op=True, **CALL)
            comm.quantized_allreduce(y, async_op=True, **CALL)
            comm.quantized_allreduce(x, async_op=True, **CALL)
            comm.check()
            assert before == 32_768 and sum(blocks(comm).values()) >= 3 * before
            z.set(values(comm.rank, SMALL, 5))
            graph.launch(stream)
            comm.check(stream.ptr)
            used = [program._workspace.ptr for each in comm._session.programs for program in each.programs]
            assert sorted(used) == sorted(blocks(comm)) and len(used) == 2
            return [each.get().tobytes() for each in (x, y, z)]

    def on_host(comm):
        x, y, z = (values(comm.rank, n, i) for i, n in ((0, SMALL), (1, LARGE), (5, SMALL)))
        comm.quantized_allreduce(comm.quantized_allreduce(x, **CALL), **CALL)
        return [x.tobytes(), *(comm.quantized_allreduce(each, **CALL).tobytes() for each in (y, z))]

    assert ranks(2, on_gpu) == qccl.run_ranks(2, on_host)


@on_gpus(2)
def test_each_block_is_twice_as_large_as_the_one_before(comm, world, cupy, tiny):
    for count in (100_000, 101_000, 102_000):
        comm.quantized_allreduce(fake_cuda.array(values(comm.rank, count), comm.rank), **CALL)
    comm.check()
    sizes = list(blocks(comm).values())
    assert len(sizes) > 1 and all(b >= 2 * a for a, b in itertools.pairwise(sizes))


def test_a_block_is_smaller_where_there_is_no_room_for_twice_the_size(world, cupy, tiny, monkeypatch):
    room = 60_000
    room_for(room, cupy, monkeypatch)

    def run(comm):
        x = fake_cuda.array(values(comm.rank, LARGE), comm.rank)
        comm.quantized_allreduce(x, chunk=4096, **CALL)
        comm.check()
        return x.get().tobytes(), list(blocks(comm).values())

    def on_host(comm):
        return comm.quantized_allreduce(values(comm.rank, LARGE), chunk=4096, **CALL).tobytes()

    found = ranks(2, run)
    assert [got for got, _ in found] == qccl.run_ranks(2, on_host)
    assert all(len(sizes) == 2 and 32_768 < sizes[1] <= room for _, sizes in found)


@on_gpus(1)
def test_one_rank_alone_needs_none(comm, world, cupy):
    x, out = (fake_cuda.array(values(0, SMALL, i)) for i in range(2))
    comm.quantized_allreduce(x, out)
    comm.check()
    assert blocks(comm) == {}


# -- no room ---------------------------------------------------------------------------------------------------------


def test_the_error_says_what_was_asked_for_and_who_holds_the_memory(world, cupy, tiny, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    pool = SimpleNamespace(total_bytes=lambda: 300, used_bytes=lambda: 200)
    left = threading.Barrier(2)

    def run(comm):
        comm.barrier()
        left.wait(60)
        monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
        world.free_memory = 4000
        with pytest.raises(qccl.EngineError) as caught:
            comm.quantized_allreduce(fake_cuda.array(values(comm.rank, LARGE), comm.rank), **CALL)
        left.wait(60)
        comm.abort()
        return str(caught.value)

    room_for(1 << 16, cupy, monkeypatch)
    for rank, text in enumerate(ranks(2, run)):
        assert f"GPU {rank} has no room for the workspace: " in text and " bytes were asked for" in text
        assert "4000 of its 4000 are free" in text and "pool holds 300, of which 200 are used" in text
        assert "chunk=" in text and "torch" not in text


def without_room(on_gpu, name="quantized_allreduce"):
    """Rank 1 of 3 has no room first: ``on_gpu(comm, x, out)`` returns the text of the error, and leaves the result."""
    count = 80_001

    def run(comm):
        x = fake_cuda.array(values(comm.rank, count), comm.rank)
        out = fake_cuda.array(np.zeros(count, np.float32), comm.rank)
        return on_gpu(comm, x, out), out.get().tobytes()

    def on_host(comm):
        return getattr(comm, name)(values(comm.rank, count), np.zeros(count, np.float32), codec="minmax8").tobytes()

    texts, found = zip(*ranks(3, run), strict=True)
    theirs = "rank 1 cannot make this call, so no rank makes it: there is no room"
    assert texts == (theirs, "there is no room", theirs)
    assert list(found) == qccl.run_ranks(3, on_host)


def no_room(*arguments):
    raise qccl.EngineError("there is no room")


@pytest.mark.parametrize("name", ["quantized_allreduce", "quantized_all_to_all"])
def test_no_rank_waits_for_one_that_has_no_room_for_a_call(name, world, cupy, tiny):
    """All raise its reason. Where there is room later, they make the call."""

    def call(comm, x, out):
        device, calls = comm._session.engine.device, comm.calls
        allocate = device.allocate
        if comm.rank == 1:
            device.allocate = no_room
        with pytest.raises(qccl.EngineError) as caught:
            getattr(comm, name)(x, out, codec="minmax8")
        device.allocate = allocate
        assert comm.calls == calls and (out.get() == 0).all()
        getattr(comm, name)(x, out, codec="minmax8")
        comm.check()
        return str(caught.value)

    without_room(call, name)


def test_no_rank_waits_for_one_that_has_no_room_for_a_plan(world, cupy, tiny):
    """The call is known to all ranks: another plan has made it. All can bind the plan later."""

    def plan_and_call(comm, x, out):
        comm.plan("allreduce", x.size, codec="minmax8").bind(x, out)
        plan, compiled = comm.plan("allreduce", x.size, codec="minmax8"), comm._session.engine.compile
        if comm.rank == 1:
            comm._session.engine.compile = no_room
        with pytest.raises(qccl.EngineError) as caught:
            plan.bind(x, out)
        comm._session.engine.compile = compiled
        with pytest.raises(qccl.ArgumentError, match="no arrays yet"):
            plan.start()
        assert (out.get() == 0).all()
        plan.bind(x, out).start().synchronize()
        plan.bind(x if comm.rank else out)  # what follows is each rank's own affair: no rank waits
        return str(caught.value)

    without_room(plan_and_call)


@on_gpus(1)
def test_the_error_of_cupys_pool_says_the_same(comm, cupy, monkeypatch):
    def refuse(nbytes):
        raise fake_cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(cupy.cuda, "alloc", refuse)
    with pytest.raises(qccl.EngineError, match=r"GPU 0 has no room for the tables of a plan: \d+ bytes .*pool holds"):
        comm.quantized_allreduce(fake_cuda.array(np.ones(1000, np.float32)))


@pytest.mark.parametrize("beside_torch", [True, False])
def test_the_error_names_what_frees_the_cache_of_torch(beside_torch, cupy, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if beside_torch:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    text = str(libraries.no_room(0, 1234, "a test", "out of memory"))
    assert "1234 bytes were asked for" in text and ("torch.cuda.empty_cache()" in text) == beside_torch


@pytest.fixture
def little_room(cupy, monkeypatch):
    room_for((32 << 20) - 1, cupy, monkeypatch)


@on_gpus(2)
def test_without_room_for_the_first_block_a_plan_takes_what_it_needs(comm, little_room):
    before = sum(blocks(comm).values())
    x = fake_cuda.array(np.ones(SMALL, np.float32), comm.rank)
    comm.quantized_allreduce(x, **CALL)
    comm.check()
    assert before == 0 and sum(blocks(comm).values()) == 2 << 20 and (x.get() == 2).all()
