"""The CUDA engine on a fake GPU that runs the work of streams in any order they allow: bytes, order, graphs."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import dispatch
import fake_cuda
import fake_kernels
import numpy as np
import pytest
from cuda_ranks import Captures, alike, all_calls, called, captured, on_gpus, one, pair, ranks, values

import qccl
from qccl.base.deadline import Deadline
from qccl.engine.control import ControlKind, Header
from qccl.engine.cuda import libraries
from qccl.engine.cuda import run as run_module

# -- bytes -----------------------------------------------------------------------------------------------------------


CODEC = "minmax3:bucket=64,rounding=stochastic"
COUNT = 3000


def every_collective(comm, array):
    """All collectives once; what they left."""
    rank, size = comm.rank, comm.size

    def given(count, seed):
        return array(values(rank, count, seed))

    def empty(count):
        return array(np.full(count, np.nan, np.float32))

    def parts(count):
        return [count + 70 * r for r in range(size)]

    options = {"codec": CODEC, "chunk": 512}
    found = [given(sum(parts(500)), 1), empty(parts(500)[rank])]
    comm.quantized_reduce_scatter(*found[-2:], counts=parts(500), op="avg", **options)
    found += [given(parts(500)[rank], 2), empty(sum(parts(500)))]
    comm.quantized_all_gather(*found[-2:], counts=parts(500), **options)
    found += [given(COUNT * size, 3), empty(COUNT * size)]
    comm.quantized_all_to_all(*found[-2:], **options)
    sends = [100 + 10 * rank + p for p in range(size)]
    receives = [100 + 10 * p + rank for p in range(size)]
    found += [given(sum(sends), 4), empty(sum(receives))]
    comm.quantized_all_to_all(*found[-2:], send_counts=sends, recv_counts=receives, **options)
    for algorithm in ("chain", "binomial"):
        found.append(given(COUNT, 5))
        comm.quantized_broadcast(found[-1], root=size - 1, algorithm=algorithm, **options)
    for algorithm in ("one_shot", "two_round"):
        found.append(given(COUNT, 6))
        comm.quantized_reduce(found[-1], root=0, algorithm=algorithm, **options)
    found += [given(n, 7) for n in (10, 700, 0, 65)]
    comm.quantized_allreduce_coalesced(found[-4:], **options)
    for layout, intra in (("leader", "none"), ("sharded", "none"), ("sharded", "minmax8:bucket=64")):
        found.append(given(COUNT, 8))
        node_ids = [r // 2 for r in range(size)]
        comm.hierarchical_allreduce(found[-1], layout=layout, intra=intra, node_ids=node_ids, **options)
    z, model, replica = given(COUNT, 9), given(COUNT, 10), given(COUNT, 11)
    around = {"send_to": [(rank + 1) % size], "replicas": {(rank - 1) % size: replica}} if size > 1 else None
    comm.peer_exchange(z, applied=model, **(around or {"send_to": [], "replicas": {}}), **options)
    found += [z, model, replica]
    return found


@pytest.mark.parametrize(
    ("calls", "n", "seed"),
    [
        *((all_calls, *each) for each in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0))),
        *((every_collective, *each) for each in ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0))),
    ],
)
def test_the_hosts_bytes_whatever_the_order(calls, n, seed, world, cupy):
    world.random.seed(seed)
    alike(n, calls)


@on_gpus(2)
def test_one_sided_lists_are_found_when_the_plan_is_made(comm, cupy):
    z, x = (fake_cuda.array(values(comm.rank, 100, seed), comm.rank) for seed in (0, 1))
    with pytest.raises(qccl.MismatchError, match="does not send to"):
        comm.peer_exchange(z, send_to=[1 - comm.rank] if comm.rank else [], replicas={}, applied=x)
    assert x.get().tobytes() == values(comm.rank, 100, 1).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_element_types(dtype, cupy):
    def calls(comm, array):
        x = values(comm.rank, 3000)
        x = x.astype(dtype) if dtype == "float16" else (x.view(np.uint32) >> 16).astype(np.uint16)
        x = array(x, code=2 if dtype == "float16" else 4)
        comm.quantized_allreduce(x, dtype=dtype, codec="minmax8", algorithm="two_round")
        return [x]

    alike(2, calls)


@on_gpus(2)
def test_raw_pointers(comm, cupy):
    x, out = (fake_cuda.array(values(comm.rank, 1000), comm.rank) for _ in range(2))
    assert qccl.quantized_allreduce(x.data.ptr, out.data.ptr, 1000, 7, 0, comm) is None
    work = qccl.quantized_allreduce(x.data.ptr, x.data.ptr, 1000, "float32", "sum", comm, async_op=True)
    work.synchronize()
    comm.check()
    assert x.get().tobytes() == out.get().tobytes()


def test_memory_given_back_is_not_used_twice_at_once(world, cupy):
    """Programs come and go; their tables, from the pool, are each other's while work is still under way."""

    def calls(comm, array):
        found = []
        for i in range(12):
            x = array(values(comm.rank, 2000 + i, i))
            comm.plan("allreduce", 2000 + i, codec="minmax8", algorithm="two_round", chunk=512)(x)
            found.append(x)
        return found

    for seed in range(3):
        world.random.seed(seed)
        alike(2, calls)
    assert world.reused > 10


def test_a_hundred_arrays_in_one_call(cupy):
    """More buffers than a launch passes by value, in a call and in its repetition with others."""

    def calls(comm, array):
        found = []
        for turn in range(2):
            xs = [array(values(comm.rank, 5 + 7 * i, 100 * turn + i)) for i in range(100)]
            comm.quantized_allreduce_coalesced(xs, codec="minmax4:bucket=64", algorithm="two_round", chunk=4096)
            found += xs
        return found

    alike(2, calls)


# -- what is put on streams ------------------------------------------------------------------------------------------


@on_gpus(1)
def test_the_host_never_waits_and_never_allocates(comm, world, cupy):
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


def test_the_calls_of_a_run(world, cupy):
    """Two ranks, one chunk: the caller's stream, then launches, groups and events as streams.py has them."""
    recorded, idle, put = {}, threading.Event(), threading.Event()

    def run(comm):
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        plan = comm.plan("allreduce", 3000, codec="minmax8", algorithm="two_round").bind(x)
        plan.start().synchronize()
        comm.barrier()
        if comm.rank == 1:
            idle.set()
        assert idle.wait(60)  # rank 1's barrier may end later, and the ranks share the list of calls
        if comm.rank == 0:
            world.calls.clear()
            plan.start(stream=0).wait()
            recorded["calls"] = list(world.calls)
            put.set()
        assert put.wait(60)
        if comm.rank == 1:
            plan.start().wait()
        comm.check()

    assert ranks(2, run) == [None, None]
    calls = recorded["calls"]
    kinds = [kind for kind, *_ in calls]
    launches = [fake_kernels.kind_of(call[1]) for call in calls if call[0] == "launch"]
    assert launches == ["qccl_begin", "encode", "reduce", "decode", "qccl_end"]
    assert [call for call in calls if call[0] == "group"] == [("group", 2)] * 2
    assert kinds == [
        *("record", "wait"),  # the caller's stream, the computing lane
        *("launch", "launch", "record", "wait", "group", "record"),
        *("wait", "launch", "record", "wait", "group", "record"),
        *("wait", "launch", "launch", "record"),
        "wait",  # the caller's stream goes on
    ]
    assert calls[0][2] == calls[-1][1] == 0
    assert calls[-2][1] == calls[-1][2]


@on_gpus(1)
def test_async_op_orders_the_stream_only_when_waited_for(comm, world, cupy):
    x, out = called(comm)
    world.calls.clear()
    work = comm.quantized_allreduce(x, out, async_op=True, stream=0)
    assert ("wait", 0, world.calls[-1][1]) not in world.calls
    assert work.wait() is out
    assert world.calls[-1] == ("wait", 0, world.calls[-2][1])
    assert work.synchronize() is out and work.is_completed() and work.exception() is None


@on_gpus(1)
def test_functions_are_called_when_the_run_has_ended_though_nobody_waits(comm, world, cupy):
    world.frozen = True
    works, called = [], threading.Event()
    work = comm.quantized_allreduce(*pair(), async_op=True)
    work.add_done_callback(lambda ended: (works.append(ended), called.set()))
    before = list(works)
    world.frozen = False
    assert called.wait(60) and before == [] and works == [work] and work.exception() is None
    world.ends = False
    called.clear()
    late = comm.quantized_allreduce(*pair(), async_op=True, timeout=0.1)
    late.add_done_callback(lambda ended: called.set())
    assert called.wait(60)
    world.ends = True
    assert "deadline" in str(late.exception())


def test_a_trace(cupy):
    def run(comm):
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        events: list[qccl.base.trace.TraceEvent] = []
        comm.quantized_allreduce(x, algorithm="two_round", async_op=True, trace=events).synchronize()
        return [(e.rank, e.queue, e.name.split()[0]) for e in events]

    queues = [("compute", "encode"), ("comm", "exchange"), ("compute", "reduce"), ("comm", "exchange")]
    expected = [(rank, queue, name) for rank in range(2) for queue, name in [*queues, ("compute", "decode")]]
    assert [each for events in ranks(2, run) for each in events] == expected


def test_a_step_asks_cuda_for_errors_until_the_run_has_ended():
    asked = list[str]()
    pending = SimpleNamespace(sweep=lambda: asked.append("flags"), check_device=lambda: asked.append("CUDA"))
    run = run_module.CudaRun(pending, Header(ControlKind.CALL, 0, "a call"), 0, Deadline(10, counts=False))
    assert not run.step() and asked == ["flags", "CUDA"]
    run.done = True
    assert run.step() and asked == ["flags", "CUDA", "flags"]


@pytest.mark.cupy
def test_a_repeated_call_runs_few_functions() -> None:
    """Of CUDA and NCCL exactly those that two rounds need; of qccl's own not many more than now."""
    with dispatch.silent() as comm:
        made = dispatch.calls(comm)
        found = {name: dispatch.counts(call) for name, call in made.items()}
    two_round = {"launchKernel": 5, "groupStart": 2, "groupEnd": 2, "send": 2, "recv": 2}
    two_round |= {"eventRecord": 6, "streamWaitEvent": 6, "getDevice": 2}
    assert found["quantized_allreduce(x)"].cuda == two_round
    assert found["plan.start().wait()"].cuda == two_round
    assert found["quantized_allreduce_coalesced(8 arrays)"].cuda == two_round
    limits = {"quantized_allreduce(x)": 85, "quantized_allreduce_coalesced(8 arrays)": 135, "plan.start().wait()": 68}
    assert {name: found[name].python for name in limits if found[name].python > limits[name]} == {}


# -- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["minmax8", "minmax3:bucket=shard", "none"])
def test_replays_of_a_whole_step_are_the_hosts_steps(codec, cupy):
    """A step with several calls in one graph; residuals and momenta go on from replay to replay."""
    counts = (3000, 40_000 if "shard" in codec else 5000)  # a bucket that takes two kernels, and scratch
    kept = {"codec": "minmax3:bucket=64+ef+nesterov", "key": "gradients", "op": "avg"}

    def calls(comm, xs, **more):
        comm.quantized_allreduce_coalesced(xs, **kept, **more)
        comm.quantized_allreduce(xs[1], codec=codec, algorithm="two_round", chunk=1024, **more)

    def inputs(comm, step):
        return [values(comm.rank, count, step) for count in counts]

    def on_host(comm):
        found = []
        for step in range(4):
            xs = inputs(comm, step)
            calls(comm, xs)
            found.append([x.tobytes() for x in xs])
        return found, comm.state_dict()["keys"]["gradients"]["values"]

    def run(comm):
        with libraries.on_device(comm.rank):
            xs = [fake_cuda.array(x, comm.rank) for x in inputs(comm, 0)]
            calls(comm, xs)
            comm.check()
            found = [[x.get().tobytes() for x in xs]]
            stream, graph = capture(comm, lambda s: calls(comm, xs, stream=s))
            for step in range(1, 4):
                for x, content in zip(xs, inputs(comm, step), strict=True):
                    x.set(content)
                graph.launch(stream)
                comm.check(stream.ptr)
                found.append([x.get().tobytes() for x in xs])
            return found, comm.state_dict()["keys"]["gradients"]["values"]

    capture = Captures(cupy, 2)
    expected = qccl.run_ranks(2, on_host)
    assert len(expected[0][1]) == 4
    np.testing.assert_equal(ranks(2, run), expected)


def test_replays_draw_fresh_random_numbers(cupy):
    arguments = {"codec": "minmax2:rounding=stochastic", "algorithm": "two_round"}
    capture = Captures(cupy, 2)

    def run(comm):
        with libraries.on_device(comm.rank):
            x, out = (fake_cuda.array(values(comm.rank, 5000), comm.rank) for _ in range(2))
            comm.quantized_allreduce(x, out, **arguments)
            comm.check()
            found = [out.get().tobytes()]
            stream, graph = capture(comm, lambda s: comm.quantized_allreduce(x, out, stream=s, **arguments))
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
        x, out = called(comm)
        work = []
        captured(cupy, comm, lambda s: work.append(comm.quantized_allreduce(x, out, async_op=True, stream=s)))
        with pytest.raises(qccl.ArgumentError, match="graph"):
            work[0].synchronize()
        return "captured"

    with pytest.raises(fake_cuda.CUDARuntimeError):  # nobody waited: the graph's end does not come after the call
        one(run)

    def traced(comm):
        x, out = called(comm)
        captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s, trace=[]))

    with pytest.raises(qccl.ArgumentError, match="traced"):
        one(traced)


@on_gpus(1)
def test_a_captured_program_keeps_its_memory(comm, world, cupy):
    """The graph holds addresses of its tables, so they are never given back, even if the cache drops the program."""
    x, out = pair()
    arguments = {"codec": "minmax8:rounding=stochastic"}
    comm.quantized_allreduce(x, out, **arguments)
    comm.check()
    captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s, **arguments))
    [program] = comm._session.engine._captured
    comm._session.programs.clear()
    assert program._tables.ptr in world.memory and sys.getrefcount(program) >= 2
