"""The CUDA engine on a fake GPU that runs what is put on streams in any order they allow: bytes, order, faults."""

from __future__ import annotations

import gc
import importlib
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_cuda
import fake_kernels
import numpy as np
import pytest

import qccl
from qccl import launch, launchers
from qccl.cuda import libraries, streams
from qccl.cuda.memory import CudaMemory
from qccl.transports import rendezvous

CALLS = [
    ("minmax8", 5000, {"algorithm": "two_round", "chunk": 1024}),
    ("minmax4:rounding=stochastic,bucket=64,seed=3", 20_000, {"algorithm": "two_round", "chunk": 1024}),
    ("minmax4:rounding=stochastic,bucket=64,seed=3", 20_000, {"algorithm": "one_shot", "chunk": 2048}),
    ("minmax3:bucket=shard", 3001, {"op": "avg"}),
    ("minmax4:bucket=16384", 70_000, {"algorithm": "two_round", "chunk": 16_384}),
    ("none", 3, {"op": "max"}),
    ("minmax2", 0, {}),
]


@pytest.fixture
def world():
    return fake_cuda.World()


@pytest.fixture
def cupy(world):
    with fake_cuda.installed(world, fake_kernels.work) as module:
        yield module


def values(rank: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32)


def ranks(n: int, fn: Callable[[qccl.Communicator], Any], *, timeout: float = 10.0) -> list[Any]:
    """What ``fn(comm)`` returned or raised on each of ``n`` GPUs."""
    unique_id = qccl.get_unique_id()

    def run(rank: int) -> Any:
        try:
            with qccl.Communicator(unique_id, rank, n, device=rank, timeout=timeout) as comm:
                return fn(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def pair(rank: int = 0, count: int = 100) -> tuple[fake_cuda.Array, fake_cuda.Array]:
    """x and out. (One rank alone has something to do only out of place: a copy.)"""
    return fake_cuda.array(values(rank, count), rank), fake_cuda.array(np.zeros(count, np.float32), rank)


def one(fn: Callable[[qccl.Communicator], Any], **arguments: Any) -> Any:
    [result] = ranks(1, fn, **arguments)
    if isinstance(result, Exception):
        raise result
    return result


def all_calls(comm: qccl.Communicator) -> list[bytes]:
    found = []
    for number, (codec, count, arguments) in enumerate(CALLS):
        x = fake_cuda.array(values(comm.rank, count, number), comm.rank)
        out = fake_cuda.array(np.full(count, np.nan, np.float32), comm.rank)
        comm.quantized_allreduce(x, out, codec=codec, **arguments)
        comm.quantized_allreduce(x, codec=codec, **arguments)
        found += [x, out]  # nothing has been waited for
    comm.check()
    return [each.get().tobytes() for each in found]


def all_calls_on_host(comm: qccl.Communicator) -> list[bytes]:
    found = []
    for number, (codec, count, arguments) in enumerate(CALLS):
        x, out = values(comm.rank, count, number), np.empty(count, np.float32)
        comm.quantized_allreduce(x, out, codec=codec, **arguments)
        comm.quantized_allreduce(x, codec=codec, **arguments)
        found += [x.tobytes(), out.tobytes()]
    return found


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0)])
def test_the_hosts_bytes_whatever_the_order(n, seed, world, cupy):
    world.random.seed(seed)
    assert ranks(n, all_calls) == qccl.run_ranks(n, all_calls_on_host)


def test_a_missing_event_shows(world, cupy, monkeypatch):
    """The fake would notice: with one edge of the event graph taken out, some order gives other bytes or none."""
    expected = qccl.run_ranks(2, all_calls_on_host)
    complete = streams.steps

    def without_one(schedule):
        program = list(complete(schedule))
        number = next((i for i, s in enumerate(program) if s.waits and s.ops and s.queue.value == "compute"), None)
        if number is not None:
            s = program[number]
            program[number] = streams.Step(s.queue, s.ops, (), s.records)
        return tuple(program)

    monkeypatch.setattr(importlib.import_module("qccl.cuda.program"), "steps", without_one)
    for seed in range(5):
        world.random.seed(seed)
        if ranks(2, all_calls) != expected:
            return
    pytest.fail("five orders without an event that was needed gave the right bytes")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_element_types(dtype, cupy):
    storage, code = {"float16": (np.float16, 2), "bfloat16": (np.uint16, 4)}[dtype]
    arguments = {"dtype": dtype, "codec": "minmax8", "algorithm": "two_round"}

    def x(rank):
        bits = values(rank, 3000).view(np.uint32) >> 16
        return bits.astype(np.uint16) if dtype == "bfloat16" else values(rank, 3000).astype(storage)

    def on_host(comm):
        mine = x(comm.rank)
        comm.quantized_allreduce(mine, **arguments)
        return mine.tobytes()

    def on_gpu(comm):
        mine = fake_cuda.array(x(comm.rank), comm.rank, code)
        comm.quantized_allreduce(mine, **arguments)
        comm.check()
        return mine.get().tobytes()

    assert ranks(2, on_gpu) == qccl.run_ranks(2, on_host)


def test_raw_pointers(cupy):
    def run(comm):
        x, out = (fake_cuda.array(values(comm.rank, 1000), comm.rank) for _ in range(2))
        assert qccl.quantized_allreduce(x.data.ptr, out.data.ptr, 1000, 7, 0, comm) is None
        work = qccl.quantized_allreduce(x.data.ptr, x.data.ptr, 1000, "float32", "sum", comm, async_op=True)
        work.synchronize()
        comm.check()
        return x.get().tobytes() == out.get().tobytes()

    assert ranks(2, run) == [True, True]


def test_memory_given_back_is_not_used_twice_at_once(world, cupy):
    """Programs come and go; their workspaces, from the pool, are each other's while work is still under way."""

    def run(comm, empty=lambda x: x):
        found = []
        for i in range(12):
            x = empty(values(comm.rank, 2000 + i, i))
            comm.plan("allreduce", 2000 + i, codec="minmax8", algorithm="two_round", chunk=512)(x)
            found.append(x)
        comm.check()
        return [getattr(x, "values", x).tobytes() for x in found]

    expected = qccl.run_ranks(2, run)
    for seed in range(3):
        world.random.seed(seed)
        assert ranks(2, lambda comm: run(comm, lambda x: fake_cuda.array(x, comm.rank))) == expected
    assert world.reused > 10


# -- what is put on streams ------------------------------------------------------------------------------------------


def test_the_host_never_waits_and_never_allocates(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(0, 5000))
        plan = comm.plan("allreduce", 5000, codec="minmax8", algorithm="two_round").bind(x)
        plan.start().synchronize()
        blocks = len(world.memory)
        world.frozen = True
        plan.start()
        plan.start().wait()
        comm.quantized_allreduce(x, async_op=True)
        assert len(world.pending) > 0
        assert len(world.memory) == blocks + 1  # the last call's plan is a new one
        world.frozen = False
        comm.check()

    one(run)


def test_the_calls_of_a_run(world, cupy):
    """Two ranks, one chunk: the caller's stream, then launches, groups and events as streams.py has them."""
    recorded, put = {}, threading.Event()

    def run(comm):
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        plan = comm.plan("allreduce", 3000, codec="minmax8", algorithm="two_round").bind(x)
        plan.start().synchronize()
        comm.barrier()
        if comm.rank == 0:
            world.calls.clear()
            plan.start(stream=0).wait()
            recorded["calls"] = list(world.calls)
            put.set()
        assert put.wait(10)
        if comm.rank == 1:
            plan.start().wait()
        comm.check()

    assert ranks(2, run) == [None, None]
    calls = recorded["calls"]
    kinds = [kind for kind, *_ in calls]
    launches = [fake_kernels.kind_of(call[1]) for call in calls if call[0] == "launch"]
    assert launches == ["encode", "reduce", "decode"]
    assert [call for call in calls if call[0] == "group"] == [("group", 2)] * 2
    assert kinds == [
        *("record", "wait"),  # the caller's stream, the computing lane
        *("launch", "record", "wait", "group", "record"),
        *("wait", "launch", "record", "wait", "group", "record"),
        *("wait", "launch", "record"),
        "wait",  # the caller's stream goes on
    ]
    assert calls[0][2] == calls[-1][1] == 0
    assert calls[-2][1] == calls[-1][2]


def test_async_op_orders_the_stream_only_when_waited_for(world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        world.calls.clear()
        work = comm.quantized_allreduce(x, out, async_op=True, stream=0)
        assert ("wait", 0, world.calls[-1][1]) not in world.calls
        assert work.wait() is out
        assert world.calls[-1] == ("wait", 0, world.calls[-2][1])
        assert work.synchronize() is out and work.is_completed() and work.exception() is None

    one(run)


def test_arrays_live_until_the_run_is_done(world, cupy):
    def run(comm):
        world.frozen = True
        x, out = pair()
        alive = sys.getrefcount(x)
        comm.quantized_allreduce(x, out)
        held = sys.getrefcount(x)
        world.frozen = False
        comm.check()
        return held > alive, sys.getrefcount(x) == alive

    assert one(run) == (True, True)


def test_a_trace(cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        events: list[qccl.trace.TraceEvent] = []
        comm.quantized_allreduce(x, algorithm="two_round", async_op=True, trace=events).synchronize()
        return [(e.rank, e.queue, e.name.split()[0]) for e in events]

    queues = [("compute", "encode"), ("comm", "exchange"), ("compute", "reduce"), ("comm", "exchange")]
    expected = [(rank, queue, name) for rank in range(2) for queue, name in [*queues, ("compute", "decode")]]
    assert [each for events in ranks(2, run) for each in events] == expected


# -- graphs ----------------------------------------------------------------------------------------------------------


def captured(cupy: ModuleType, comm: qccl.Communicator, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    try:
        call(stream)
    finally:
        graph = stream.end_capture()
    return stream, graph


@pytest.mark.parametrize("codec", ["minmax8", "minmax3:bucket=shard", "none"])
def test_a_call_in_a_graph(codec, cupy):
    count = 40_000 if "shard" in codec else 5000  # a bucket that takes two kernels, and scratch
    arguments = {"codec": codec, "algorithm": "two_round", "chunk": 1024}

    def on_host(comm):
        return [comm.quantized_allreduce(values(comm.rank, count, i), **arguments).tobytes() for i in range(3)]

    def run(comm):
        with libraries.on_device(comm.rank):
            x = fake_cuda.array(values(comm.rank, count), comm.rank)
            comm.quantized_allreduce(x, **arguments)
            comm.check()
            comm.barrier()
            one_at_a_time.acquire()  # the fake refuses what a capture in any thread forbids
            stream, graph = captured(cupy, comm, lambda s: comm.quantized_allreduce(x, stream=s, **arguments))
            one_at_a_time.release()
            comm.barrier()
            found = []
            for i in range(3):
                x.set(values(comm.rank, count, i))
                graph.launch(stream)
                comm.check(stream.ptr)
                found.append(x.get().tobytes())
            return found

    one_at_a_time = threading.Lock()
    assert ranks(2, run) == qccl.run_ranks(2, on_host)


def test_replays_draw_fresh_random_numbers(cupy):
    arguments = {"codec": "minmax2:rounding=stochastic", "algorithm": "two_round"}
    one_at_a_time = threading.Lock()

    def run(comm):
        with libraries.on_device(comm.rank):
            x, out = (fake_cuda.array(values(comm.rank, 5000), comm.rank) for _ in range(2))
            comm.quantized_allreduce(x, out, **arguments)
            comm.check()
            found = [out.get().tobytes()]
            comm.barrier()
            with one_at_a_time:
                stream, graph = captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s, **arguments))
            comm.barrier()
            for _ in range(3):
                graph.launch(stream)
                comm.check(stream.ptr)
                found.append(out.get().tobytes())
            comm.quantized_allreduce(x, out, **arguments)
            comm.check()
            return [*found, out.get().tobytes()]

    first, second = ranks(2, run)
    assert first == second
    assert len(set(first)) == 5

    def on_host(comm):  # the calls outside the graph are numbers 0 and 4
        found = []
        for _ in range(3):
            found.append(comm.quantized_allreduce(values(comm.rank, 5000), **arguments).tobytes())
            comm.barrier()
        return [found[0], found[2]]

    assert [first[0], first[-1]] == qccl.run_ranks(2, on_host)[0]


def test_what_a_capture_forbids(cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        work = []
        captured(cupy, comm, lambda s: work.append(comm.quantized_allreduce(x, out, async_op=True, stream=s)))
        with pytest.raises(qccl.ArgumentError, match="graph"):
            work[0].synchronize()
        return "captured"

    with pytest.raises(fake_cuda.CUDARuntimeError):  # nobody waited: the graph's end does not come after the call
        one(run)

    def traced(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s, trace=[]))

    with pytest.raises(qccl.ArgumentError, match="traced"):
        one(traced)


def test_a_captured_plan_keeps_its_memory(world, cupy):
    """The graph holds addresses of the workspace, so it is never given back, even if the cache drops the plan."""

    def run(comm):
        x, out = pair()
        arguments = {"codec": "minmax8:rounding=stochastic"}
        comm.quantized_allreduce(x, out, **arguments)
        comm.check()
        captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s, **arguments))
        [program] = comm._session.engine._captured
        comm._plans.clear()
        return program._workspace.ptr in world.memory and sys.getrefcount(program) >= 2

    assert one(run)


# -- streams of arrays -----------------------------------------------------------------------------------------------


class Interface:
    """An array of which only the array interface is known."""

    def __init__(self, array: fake_cuda.Array, **changed: Any) -> None:
        self._array = array
        self._interface = {
            "shape": array.values.shape, "typestr": "<f4", "data": (array.data.ptr, False), "version": 3,
            "strides": None, **changed,
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self):
        return self._interface


class OnlyDLPack:
    """An array of a library that does not tell its stream."""

    def __init__(self, array: fake_cuda.Array) -> None:
        self._array = array
        self.orders = array.orders

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Tensor(OnlyDLPack):
    """What is asked of a tensor of PyTorch."""

    negated = False

    def is_neg(self):
        return self.negated

    def is_conj(self):
        return False

    def data_ptr(self):
        return self._array.data.ptr

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: 4 * self._array.size)


def call_streams(world, x, **arguments):
    """The streams that a call on ``x`` waits for, and those that wait for it."""

    def run(comm):
        comm.quantized_allreduce(x, op="avg")
        comm.check()
        queues = set(comm._session.engine.device.queues.values())
        world.calls.clear()
        comm.quantized_allreduce(x, op="avg", **arguments)
        comm.check()
        waited = [c[2] for c in world.calls if c[0] == "record" and c[2] not in queues]
        waiting = [c[1] for c in world.calls if c[0] == "wait" and c[1] not in queues]
        return waited, waiting

    return one(run)


def test_the_stream_of_a_call(world, cupy):
    x = fake_cuda.array(values(0, 100))
    assert call_streams(world, x) == ([0], [0])
    mine, other = cupy.cuda.Stream(), cupy.cuda.Stream()
    assert call_streams(world, x, stream=mine.ptr) == ([mine.ptr, 0], [mine.ptr])
    with mine:
        pass  # a stream's context holds for its thread only; see below for the current stream
    assert call_streams(world, Interface(x)) == ([0], [0])
    assert call_streams(world, Interface(x, stream=mine.ptr)) == ([mine.ptr], [mine.ptr])
    assert call_streams(world, Interface(x, stream=1)) == ([1], [1])
    assert call_streams(world, Interface(x, stream=mine.ptr), stream=other.ptr) == (
        [other.ptr, mine.ptr],
        [other.ptr],
    )
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, other.ptr))
    assert call_streams(world, x, stream=protocol) == ([other.ptr, 0], [other.ptr])


def test_a_library_that_does_not_tell_its_stream_is_given_ours(world, cupy):
    """DLPack knows the legacy default stream as 1; -1, which asks for no order, is not known to all libraries."""
    x = OnlyDLPack(fake_cuda.array(values(0, 100)))
    assert call_streams(world, x) == ([0], [0])
    assert set(x.orders) == {1}
    mine = cupy.cuda.Stream()
    x.orders.clear()
    assert call_streams(world, x, stream=mine.ptr) == ([mine.ptr], [mine.ptr])
    assert x.orders[-1] == mine.ptr


def test_the_current_stream_of_torch_and_cupy(world, cupy, monkeypatch):
    mine = cupy.cuda.Stream()

    current = SimpleNamespace(cuda_stream=mine.ptr)
    torch = SimpleNamespace(Tensor=Tensor, cuda=SimpleNamespace(current_stream=lambda device: current))
    monkeypatch.setitem(sys.modules, "torch", torch)
    x = Tensor(fake_cuda.array(values(0, 100)))
    assert call_streams(world, x) == ([mine.ptr], [mine.ptr])
    assert set(x.orders) == {-1}

    def run(comm):
        y = fake_cuda.array(values(0, 100))
        comm.quantized_allreduce(y, op="avg")
        world.calls.clear()
        with mine:
            comm.quantized_allreduce(y, x, op="avg")
        return world.calls[0][2]

    assert one(run) == mine.ptr


def test_tensors_of_torch(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    memory, before, after = CudaMemory(0), *(fake_cuda.array(values(0, 100)) for _ in range(2))
    x = Tensor(before)
    held = memory.from_array(x, writable=True, what="x")
    assert held.owner.data_ptr() == held.address, "the storage, which has the memory even if the tensor has not"
    memory.hold([held])
    x._array = after
    with pytest.raises(qccl.InvalidBufferError, match="x has other memory"):
        memory.hold([held])
    del held  # it looks into what the fake array exported
    x.negated = True
    with pytest.raises(qccl.InvalidBufferError, match=r"x\.resolve_neg"):
        memory.from_array(x, writable=True, what="x")


def test_what_is_no_stream(cupy):
    def run(comm):
        x = fake_cuda.array(values(0, 100))
        for wrong in ("0", -1, True, 2.0):
            with pytest.raises(qccl.ArgumentError, match="stream"):
                comm.quantized_allreduce(x, stream=wrong)

    one(run)


# -- buffers ---------------------------------------------------------------------------------------------------------


def test_arrays_that_are_refused(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(0, 100))
        comm.quantized_allreduce(x)
        comm.check()
        before = len(world.calls)
        host = np.zeros(100, np.float32)
        elsewhere = fake_cuda.array(values(0, 100), device=3)
        for wrong, message in (
            (host, "host memory"),
            (elsewhere, "GPU 3"),
            (Interface(elsewhere), "GPU 3"),
            ([1.0], "neither __dlpack__ nor __cuda_array_interface__"),
            (Interface(x, mask=object()), "mask"),
            (Interface(x, data=(x.data.ptr, True)), "read-only"),
            (Interface(x, strides=(8,)), "not contiguous"),
            (Interface(x, typestr="<f8"), "<f8"),
            (Interface(x, shape=(10_000_000,)), "allocation"),
            (Interface(x, data=(host.ctypes.data, False)), "host memory"),
        ):
            with pytest.raises(qccl.InvalidBufferError, match=message):
                comm.quantized_allreduce(wrong)
            with pytest.raises(qccl.InvalidBufferError):
                comm.quantized_allreduce(x, wrong)
        p = x.data.ptr
        for arguments, message in {
            (0, p, 100): "null",
            (p, 0, 100): "null",
            (p + 2, p + 2, 50): "aligned",
            (host.ctypes.data, p, 100): "host memory",
            (p, p, 1 << 40): "allocation",
            (p, p + 4, 50): "overlap",
            (elsewhere.data.ptr, elsewhere.data.ptr, 100): "GPU 3",
        }.items():
            with pytest.raises(qccl.InvalidBufferError, match=message):
                qccl.quantized_allreduce(*arguments, "float32", "sum", comm)
        assert len(world.calls) == before  # nothing was put anywhere
        comm.quantized_allreduce(x)

    one(run)


def test_nonfinite(cupy):
    def run(comm):
        x = fake_cuda.array(values(0, 100))
        assert comm.quantized_allreduce(x, op="avg", nonfinite="error") is x
        spoilt = values(0, 100)
        spoilt[7] = np.inf
        with pytest.raises(qccl.ArgumentError, match="element 7"):
            comm.quantized_allreduce(fake_cuda.array(spoilt), op="avg", nonfinite="error")

    one(run)


# -- agreement and faults --------------------------------------------------------------------------------------------


def test_ranks_that_disagree(cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 100 + comm.rank), comm.rank)
        with pytest.raises(qccl.MismatchError, match=r"rank 0 called .*count=100.*rank 1 called .*count=101|count=101"):
            comm.quantized_allreduce(x)
        with pytest.raises(qccl.MismatchError, match="earlier"):
            comm.quantized_allreduce(x)
        assert x.get().tobytes() == values(comm.rank, 100 + comm.rank).tobytes()
        return "refused"

    assert ranks(2, run) == ["refused"] * 2


def test_the_agreement_is_asked_for_once(cupy):
    def run(comm):
        asked = []
        allgather = comm.transport.allgather
        comm.transport.allgather = lambda *arguments: asked.append(1) or allgather(*arguments)
        x = fake_cuda.array(values(comm.rank, 100), comm.rank)
        for _ in range(3):
            comm.quantized_allreduce(x)
        comm._plans.clear()
        comm.quantized_allreduce(x)  # another plan, but what it is has been agreed on
        return len(asked)

    assert ranks(2, run) == [1, 1]


def test_a_rank_that_stays_away(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 100), comm.rank)
        comm.quantized_allreduce(x)
        comm.check()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(1.0)
            return None
        work = comm.quantized_allreduce(x, async_op=True, timeout=0.3)
        begin = time.monotonic()
        with pytest.raises(qccl.CollectiveTimeout, match="allreduce"):
            work.synchronize()
        assert isinstance(work.exception(), qccl.CollectiveTimeout)
        for call in (lambda: comm.quantized_allreduce(x), comm.check, comm.barrier):
            with pytest.raises(qccl.CollectiveTimeout, match="earlier"):
                call()
        return time.monotonic() - begin < 5

    assert ranks(2, run)[0] is True
    assert ("abort", 0) in world.calls


def test_the_watchdog_needs_nobody_who_waits(world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen = True
        comm.quantized_allreduce(x, out, timeout=0.2)  # a program that never asks
        time.sleep(0.6)
        assert ("abort", 0) in world.calls
        world.frozen = False
        with pytest.raises(qccl.CollectiveTimeout):
            comm.check()

    one(run)


@pytest.mark.parametrize(("code", "kind"), [(2, qccl.EngineError), (6, qccl.PeerLost)])
def test_an_error_in_the_background(code, kind, world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        comm.transport.comm.asynchronous_error = 7  # in progress: no error
        comm.check()
        world.frozen = True
        work = comm.quantized_allreduce(x, out, async_op=True)
        comm.transport.comm.asynchronous_error = code
        with pytest.raises(kind, match=f"NCCL_ERROR_{code}"):
            work.synchronize()
        with pytest.raises(kind, match="earlier"):
            comm.quantized_allreduce(x)

    one(run)


def test_an_error_of_a_kernel(world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen, world.error = True, 700
        with pytest.raises(qccl.EngineError, match="700") as caught:
            comm.quantized_allreduce(x, out, async_op=True).synchronize()
        assert caught.value.code == 700

    one(run)


def test_a_call_that_cannot_be_put_on_its_streams(world, cupy, monkeypatch):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        for _ in range(2):  # a stream that does not exist: nothing has happened
            with pytest.raises(qccl.EngineError, match="400"):
                comm.quantized_allreduce(x, out, stream=0x999)
        comm.quantized_allreduce(x, out)
        comm.check()
        assert (out.get() == x.get()).all()

        def fails(*arguments):
            raise fake_cuda.CUDADriverError(719)

        monkeypatch.setattr(libraries.require().driver, "launchKernel", fails)
        comm._plans.clear()  # the plans there are have the other one
        with pytest.raises(qccl.EngineError, match="719") as caught:
            comm.quantized_allreduce(x, out)
        assert caught.value.code == 719
        with pytest.raises(qccl.EngineError, match="earlier"):
            comm.quantized_allreduce(x, out)

    one(run)


def test_a_group_is_closed_when_a_transfer_fails(world, cupy, monkeypatch):
    """A group of NCCL that stays open would swallow what the thread calls later, on any communicator."""

    def run(comm):
        x = fake_cuda.array(values(comm.rank, 5000), comm.rank)
        comm.quantized_allreduce(x)
        comm.check()
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.5)
            return None

        def fails(*arguments):
            raise fake_cuda.NcclError(4)

        comm.transport.comm.send = fails
        comm._plans.clear()
        with pytest.raises(qccl.EngineError, match="NCCL_ERROR_4"):
            comm.quantized_allreduce(x)
        return world.local.group

    assert ranks(2, run)[1] is None


def test_a_communicator_that_is_dropped_lives_until_its_calls_are_done(world, cupy):
    """The device still uses the workspace and the arrays, even if nobody holds the communicator or the Work."""
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=10.0)
    x, out = pair()
    comm.quantized_allreduce(x, out)
    comm.check()
    world.frozen = True
    comm.quantized_allreduce(x, out, async_op=True)
    engine, array = weakref.ref(comm._session.engine), weakref.ref(x)
    del comm, x
    gc.collect()
    time.sleep(0.1)
    assert engine() is not None and array() is not None
    world.frozen = False
    deadline = time.monotonic() + 10
    while engine() is not None or array() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()


def test_what_a_failed_call_uses_stays_until_the_device_is_done(world, cupy):
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=10.0)
    x, out = pair()
    comm.quantized_allreduce(x, out)
    comm.check()
    world.frozen = True
    with pytest.raises(qccl.CollectiveTimeout):
        comm.quantized_allreduce(x, out, async_op=True, timeout=0.1).synchronize()
    array = weakref.ref(x)
    del comm, x
    gc.collect()
    assert array() is not None
    world.frozen = False
    world.run()
    one(lambda comm: None)  # the next communicator looks
    gc.collect()
    assert array() is None


def test_a_question_that_a_capture_forbids_ends_nothing(world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen = True
        work = comm.quantized_allreduce(x, out, async_op=True)
        comm._session.engine.watch = lambda: True  # the watching thread is exempt
        time.sleep(0.05)
        world.error = 900
        with pytest.raises(qccl.ArgumentError, match="captures"):
            work.is_completed()
        world.error, world.frozen = 0, False
        assert work.synchronize() is out and work.exception() is None
        del comm._session.engine.watch

    one(run)


def test_a_communicator_that_does_not_end(world, cupy, monkeypatch):
    """NCCL waits for graphs; it is told from where, and not aborted as well, which would free it twice."""
    release = threading.Event()
    monkeypatch.setattr(fake_cuda.NcclCommunicator, "destroy", lambda self: release.wait(10))
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=0.2)
    with pytest.warns(RuntimeWarning, match="graphs"):
        comm.close()
    assert not any(call[0] == "abort" for call in world.calls)
    release.set()


def test_events_are_of_the_communicators_gpu(world, cupy):
    """Also where the thread's current one is another, and more calls are under way than there are events ready."""
    with qccl.Communicator(qccl.get_unique_id(), 0, 1, device=3, timeout=10.0) as comm:
        x, out = (fake_cuda.array(values(0, 100, seed), 3) for seed in range(2))
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen = True
        works = [comm.quantized_allreduce(x, out, async_op=True) for _ in range(50)]
        world.frozen = False
        assert libraries.require().runtime.getDevice() == 0
        assert all(work.synchronize() is out for work in works)
        assert (out.get() == x.get()).all()


def test_at_the_end_of_the_process(world, cupy):
    """Calls are waited for and the communicator is released, on a thread that the process need not wait for."""
    comm = qccl.Communicator(qccl.get_unique_id(), 0, 1, device=0, timeout=10.0)
    x, out = pair()
    comm.quantized_allreduce(x, out)
    importlib.import_module("qccl.cuda.engine")._leave_at_exit()
    assert (out.get() == x.get()).all()
    assert ("destroy", 0) in world.calls


def test_no_more_threads(cupy, monkeypatch):
    """At its end the interpreter starts none."""

    def refuses(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert libraries.bounded(0, 1.0, "a test", threading.get_ident) == threading.get_ident()


def test_errors_of_the_libraries_are_ours(cupy):
    for error, kind, code in (
        (KeyError(8), qccl.EngineError, 8),
        (fake_cuda.CompileException("no sm_50"), qccl.EngineError, None),
        (fake_cuda.OutOfMemoryError("1 TB"), qccl.EngineError, None),
        (fake_cuda.NcclError(6), qccl.PeerLost, None),
        (fake_cuda.CUDARuntimeError(2), qccl.EngineError, 2),
    ):
        found = libraries.mapped(error)
        assert type(found) is kind and getattr(found, "code", None) == code and str(error) in str(found)
    assert libraries.mapped(KeyError("x")) is None


def test_a_timeout_of_the_wait(world, cupy):
    def run(comm):
        x, out = pair()
        comm.quantized_allreduce(x, out)
        comm.check()
        world.frozen = True
        with pytest.raises(qccl.CollectiveTimeout, match=r"0\.1 s"):
            comm.quantized_allreduce(x, out, async_op=True).wait(timeout=0.1)

    one(run)


def test_making_a_communicator_has_a_deadline(cupy, monkeypatch):
    monkeypatch.setattr(fake_cuda, "BARRIER_SECONDS", 20.0)
    begin = time.monotonic()
    with pytest.raises(qccl.CollectiveTimeout, match="making of the communicator"):
        qccl.Communicator(qccl.get_unique_id(), 0, 2, timeout=0.2)
    assert time.monotonic() - begin < 10


def test_closing(world, cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 5000), comm.rank)
        comm.quantized_allreduce(x)
        comm.close()  # waits for the call
        comm.close()
        for call in (lambda: comm.quantized_allreduce(x), comm.check, lambda: comm.split(0)):
            with pytest.raises(qccl.ArgumentError, match="closed"):
                call()
        return x.get().tobytes()

    def on_host(comm):
        return comm.quantized_allreduce(values(comm.rank, 5000)).tobytes()

    assert ranks(2, run) == qccl.run_ranks(2, on_host)
    assert {("destroy", 0), ("destroy", 1)} <= set(world.calls)
    assert not [t for t in threading.enumerate() if t.name.startswith("qccl watchdog")]


# -- groups and ways to make one -------------------------------------------------------------------------------------


def test_split(cupy):
    def run(comm):
        group = comm.split(comm.rank % 2, key=-comm.rank)
        x = fake_cuda.array(np.full(100, 10.0**comm.rank, np.float32), comm.rank)
        group.quantized_allreduce(x)
        group.check()
        none = comm.split(None if comm.rank else 0)
        assert (none is None) == bool(comm.rank)
        comm.quantized_allreduce(fake_cuda.array(np.zeros(5, np.float32), comm.rank))
        comm.check()
        return group.rank, group.size, float(x.get()[0]), group.backend

    assert ranks(3, run) == [(1, 2, 101.0, "cuda"), (0, 1, 10.0, "cuda"), (0, 2, 101.0, "cuda")]


def test_adopting_a_communicator_of_cupy(world, cupy):
    unique_id = qccl.get_unique_id()

    def run(rank):
        given = cupy.cuda.nccl.NcclCommunicator(2, unique_id, rank)
        with pytest.raises(qccl.ArgumentError, match=f"rank {rank} of 2"):
            qccl.Communicator.from_nccl(given, rank, 3)
        with qccl.Communicator.from_nccl(given, rank, 2) as comm:
            x = fake_cuda.array(np.full(10, 1.0 + rank, np.float32), rank)
            comm.quantized_allreduce(x)
            comm.check()
        assert given.comm  # left as it was
        return float(x.get()[3]), comm.backend

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(3.0, "cuda")] * 2


def test_over_a_host_group(cupy, monkeypatch):
    """What MPI does under mpiexec, with threads: the id comes from rank 0, and one rank's trouble is everyone's."""
    from qccl.cuda.nccl import NcclTransport
    from qccl.transports.loopback import LoopbackGroup

    def make(n, device):
        group = LoopbackGroup(n)

        def run(rank):
            try:
                host = group.transport(rank)
                transport = NcclTransport.from_group(host, device(rank), 10.0)
                assert transport.host is host
                return transport.rank, transport.size, transport.device
            except qccl.QcclError as error:
                return type(error), str(error)

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(run, range(n)))

    assert make(2, lambda rank: None) == [(0, 2, 0), (1, 2, 1)]
    assert make(2, lambda rank: 5 + rank) == [(0, 2, 5), (1, 2, 6)]
    for kind, text in make(2, lambda rank: 99 if rank else 0):
        assert kind is qccl.EngineError and text.startswith("rank 1: device=99")


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_init(launcher, cupy, monkeypatch):
    if launcher == "torchrun":
        for key, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setenv("MASTER_PORT", "29511")
    for arguments in ({"backend": "cuda"}, {"backend": "auto"}, {"device": 3}, {"backend": "auto", "device": 0}):
        with qccl.init(**arguments) as comm:
            assert (comm.backend, comm.transport.device) == ("cuda", arguments.get("device", 0))
    with qccl.init(backend="host") as comm:
        assert comm.backend == "host"
    with pytest.raises(qccl.ArgumentError, match="no devices"):
        qccl.init(backend="host", device=0)
    with pytest.raises(qccl.ArgumentError, match="GPUs 0 to 7"):
        qccl.init(backend="cuda", device=8)


def test_ranks_without_mpi_decide_together(cupy, monkeypatch):
    """One machine has too few GPUs: all ranks go to the host, or all say whose fault it is."""

    class One(int):  # ranks are processes, which each count their own meetings; here they are threads of one
        def __add__(self, other):
            return self

    def inits(*arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("QCCL_PORT", str(probe.getsockname()[1]))

        def run(rank):
            must, device, local_size = arguments[rank]
            launcher = launchers.Launcher("torchrun", rank, len(arguments), rank, local_size)
            try:
                comm = launch._by_tcp(launcher, device, 10.0, must=must)
            except qccl.QcclError as error:
                return type(error), str(error)
            if comm is None:
                return "host"
            with comm:
                return comm.backend, comm.rank, comm.transport.device

        with ThreadPoolExecutor(len(arguments)) as pool:
            return list(pool.map(run, range(len(arguments))))

    monkeypatch.setattr(rendezvous, "_meetings", One(1))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert inits((False, None, 2), (False, None, 2)) == [("cuda", 0, 0), ("cuda", 1, 1)]
    assert inits((True, 4, 2), (True, 7, 2)) == [("cuda", 0, 4), ("cuda", 1, 7)]
    assert inits((False, None, 2), (False, None, 9), (False, None, 2)) == ["host"] * 3
    for kind, text in inits((True, None, 3), (True, None, 3), (True, 99, 3)):
        assert kind is qccl.EngineError and text.startswith("rank 2: device=99")
    for kind, text in inits((False, None, 2), (True, None, 2)):
        assert kind is qccl.MismatchError and "rank 1 called" in text and "rank 0 with" in text


def test_bad_ids(cupy):
    for unique_id in (b"short", "x" * 128, None):
        with pytest.raises(qccl.ArgumentError, match="128 bytes"):
            qccl.Communicator(unique_id, 0, 1)
    with pytest.raises(qccl.ArgumentError, match="rank 2 of 2"):
        qccl.Communicator(qccl.get_unique_id(), 2, 2)


# -- without CUDA ----------------------------------------------------------------------------------------------------


_STATEMENTS = (
    "import qccl.cuda.engine",
    "qccl.init(backend='cuda')",
    "qccl.init(device=0)",
    "qccl.get_unique_id()",
    "qccl.Communicator(b'x' * 128, 0, 1)",
    "qccl.Communicator.from_nccl(5, 0, 1)",
)
#: runs each statement in a fork, because a failed import may leave something behind
_WITHOUT_CUDA = """
import os, sys, qccl
for statement in sys.argv[1:]:
    if os.fork() == 0:
        try:
            exec(statement)
        except qccl.EngineError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_without_cuda_there_is_one_clear_error():
    if not libraries.missing():
        pytest.skip("this machine has CUDA")
    command = [sys.executable, "-c", _WITHOUT_CUDA, *_STATEMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(_STATEMENTS), done.stdout + done.stderr
    assert all(line.startswith("the CUDA backend cannot be used here: ") for line in lines), lines
    with qccl.init(backend="auto") as comm:
        assert comm.backend == "host"


def test_what_is_missing_is_named(world):
    with fake_cuda.installed(world, fake_kernels.work) as cupy, pytest.MonkeyPatch.context() as monkeypatch:
        assert libraries.missing() == []
        assert libraries.device_count() == fake_cuda.DEVICES
        assert libraries.nccl_version() == "2.28.0"
        monkeypatch.setattr(cupy, "__version__", "13.6.0")
        monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda: 21705)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)

        def no_driver():
            raise fake_cuda.CUDARuntimeError(35)

        monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
        lacking = " | ".join(libraries.missing())
        for part in ("CuPy is 13.6.0", "NCCL is 2.17", "cuda-python cannot be imported", "no CUDA driver"):
            assert part in lacking
        monkeypatch.setattr(cupy.cuda.nccl, "available", False)
        assert any("finds no NCCL" in each for each in libraries.missing())
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert libraries.device_count() == 0
        assert len(libraries.missing()) == 1


def test_which_gpu_a_rank_takes(cupy, monkeypatch):
    assert libraries.pick_device(3, 0) == 3
    assert libraries.pick_device(None, 5) == 5
    assert libraries.pick_device(None, None) == 0
    with pytest.raises(qccl.EngineError, match="rank 8"):
        libraries.pick_device(None, 8)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    assert libraries.pick_device(None, 3) == 0  # the launcher shows each rank its own


def test_the_benchmark_on_a_gpu(cupy):
    """qccl-bench's measure() on device arrays: right results, the plain all-reduce beside, a graph with -G."""
    from qccl import dtypes
    from qccl.bench.arrays import arrays_of
    from qccl.bench.calls import Case, PlainCall, QuantizedCall
    from qccl.bench.measure import Counts, measure

    case = Case(3000, dtypes.FLOAT32, "sum")
    counts = Counts(iters=10, warmups=1, checks=1)  # two calls in each of five rounds

    def run(comm):
        with libraries.on_device(comm.rank):
            found = []
            for call in (PlainCall(comm, case), QuantizedCall(comm, case, qccl.codecs.get("minmax8"), "auto", None)):
                assert call.name == "minmax8" or call.is_supported(arrays_of(comm))
                (row,) = measure(
                    comm, [call], counts, meter=None, before_turn=lambda turn: None, arrays=arrays_of(comm)
                )
                found += [row.out_of_place.wrong, row.in_place.wrong, row.out_of_place.seconds]
            info, number, bus = arrays_of(comm).device()
            return found, info, number, bus

    one_call = 1e-3 / 2  # the fake's clock says 1 ms for two calls
    expected = [0, 0, one_call] * 2
    assert ranks(2, run) == [(expected, "cuda Fake 100", r, f"0000:{r:02d}:00.0") for r in range(2)]

    def graphs(comm):
        arrays = arrays_of(comm, graph_launches=3)
        x = arrays.empty(3000, dtypes.FLOAT32)
        arrays.put(x, values(0, 3000))
        given = (Case(3000, dtypes.FLOAT32, "avg"), qccl.codecs.get("none"), "auto", None)
        call = QuantizedCall(comm, *given, as_plan=True)
        run = call.bind(arrays, x, x)
        run()
        return arrays.calls_per_run, arrays.run(run, 2)

    assert one(graphs) == (3, 1e-3 / 3)
