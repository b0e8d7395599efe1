"""Calls on a fake GPU that repeat earlier ones: what may have changed since is noticed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import fake_cuda
import numpy as np
import patience
import pytest
from cuda_ranks import captured, on_gpus, pair, ranks, values
from dlpack import FLOAT, Producer
from fake_arrays import Interface, OnlyDLPack, Tensor

import qccl
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.engine.cuda import libraries

COUNT = 100


def array(count: int = COUNT, device: int = 0) -> fake_cuda.Array:
    return fake_cuda.array(np.ones(count, np.float32), device)


@pytest.fixture
def current(cupy, monkeypatch):
    """PyTorch's current stream."""
    stream = SimpleNamespace(cuda_stream=cupy.cuda.Stream().ptr)
    torch = SimpleNamespace(Tensor=Tensor, cuda=SimpleNamespace(current_stream=lambda device: stream))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return stream


@pytest.fixture
def waited(world):
    """Of a call: the callers' streams that it waits for. Of them the first waits for the call."""

    def streams_of(comm, call):
        comm.check()
        queues = set(comm._session.engine.device.queues.values())
        world.calls.clear()
        call()
        found = [entry[2] for entry in world.calls if entry[0] == "record" and entry[2] not in queues]
        assert [entry[1] for entry in world.calls if entry[0] == "wait" and entry[1] not in queues] == found[:1]
        return found

    return streams_of


def test_an_equal_call_is_found(current, cupy, monkeypatch):
    """Of every collective, in place or not, on tensors and pointers, with the results of the first one."""
    barrier = threading.Barrier(2)
    current.cuda_stream = 0  # each GPU has its own
    mine = cupy.cuda.Stream()

    def refuse(*arguments):
        raise AssertionError("the call was not found")

    def run(comm):
        peer, counts = 1 - comm.rank, [40, 60]
        x, y, z, w = (array(count, comm.rank) for count in (COUNT, COUNT, 3, 3))
        double, part = array(2 * COUNT, comm.rank), array(counts[comm.rank], comm.rank)
        tensor, only = Tensor(x), OnlyDLPack(x)
        there = x.data.ptr, y.data.ptr, COUNT, "float32", "sum", comm
        edges = {"send_to": [peer], "replicas": {peer: y}}
        calls = [
            lambda: comm.quantized_allreduce(x, op="max", timeout=50.0),
            lambda: comm.quantized_allreduce(x, y, codec="none"),
            lambda: comm.quantized_allreduce(x, stream=0),
            lambda: comm.quantized_allreduce(tensor, codec="none"),
            lambda: comm.quantized_allreduce(only, codec="none"),
            lambda: comm.quantized_allreduce(x, async_op=True).wait(),
            lambda: comm.quantized_allreduce(x, codec="onebit", lr=1 / (1 + comm.calls)),
            lambda: comm.quantized_allreduce(x, codec="minmax4+ef", key="x"),
            lambda: comm.quantized_allreduce(x, nonfinite="error"),
            lambda: comm.quantized_allreduce_coalesced([x, z], [y, w]),
            lambda: comm.quantized_allreduce_coalesced((x, y), codec="minmax4"),
            lambda: comm.quantized_reduce_scatter(x, part, counts=counts),
            lambda: comm.quantized_all_gather(x, double),
            lambda: comm.quantized_all_to_all(x, y, async_op=True).wait(),
            lambda: comm.quantized_broadcast(x, y, root=1),
            lambda: comm.quantized_reduce(x, y, root=1),
            lambda: comm.hierarchical_allreduce(x, y, node_ids=[0, 1]),
            lambda: comm.peer_exchange(x, **edges),
            lambda: qccl.quantized_allreduce(*there),
            lambda: qccl.hierarchical_allreduce(*there, node_ids=(0, 1)),
            lambda: qccl.peer_exchange(there[0], COUNT, "float32", comm, send_to=[peer], replicas={peer: there[1]}),
        ]

        def results():
            found = []
            for call in calls:
                for each in (x, y, z, w, double, part):
                    each.set(values(comm.rank, each.size))
                call()
                comm.check()
                found.append([each.get().tobytes() for each in (x, y, z, w, double, part)])
            return found

        with libraries.on_device(comm.rank):
            first = results()
            comm.reset("x")
            if barrier.wait(20) == 0:
                monkeypatch.setattr(qccl.Communicator, "_prepare", refuse)
            barrier.wait(20)
            second = results()
            assert comm.calls == 2 * len(calls)
            for options in ({"stream": mine.ptr}, {"nonfinite": "error", "op": "max"}, {"op": "min"}, {"trace": []}):
                with pytest.raises(AssertionError, match="not found"):
                    comm.quantized_allreduce(x, **options)
            with pytest.raises(AssertionError, match="not found"):
                comm.quantized_allreduce(array(COUNT, comm.rank), op="max", timeout=50.0)
            return first == second

    assert ranks(2, run) == [True, True]


@on_gpus(1)
def test_current_streams_that_changed(comm, current, cupy, waited):
    streams = [cupy.cuda.Stream() for _ in range(3)]

    x, y, tensor = array(), array(), Tensor(array())
    out = array()
    for call in (lambda: comm.quantized_allreduce(x), lambda: comm.quantized_allreduce_coalesced([x, y])):
        call()
        for stream in streams:
            with stream:
                assert waited(comm, call) == [stream.ptr]
        assert waited(comm, call) == [0]
    for call in (
        lambda: comm.quantized_allreduce(tensor, out),
        lambda: comm.quantized_allreduce_coalesced([tensor], [out]),
    ):
        call()
        for stream in streams:
            current.cuda_stream = stream.ptr
            assert waited(comm, call) == [stream.ptr, 0], "torch's and CuPy's"
            with streams[0]:
                assert waited(comm, call) == list(dict.fromkeys([stream.ptr, streams[0].ptr]))
    assert set(tensor.orders) == {-1}, "PyTorch need not order anything"


@on_gpus(1)
def test_the_stream_that_is_given(comm, cupy, waited):
    streams = [cupy.cuda.Stream() for _ in range(3)]

    x = array()
    for _ in range(2):
        for stream in streams:
            protocol = SimpleNamespace(__cuda_stream__=lambda stream=stream: (0, stream.ptr))
            for given in (stream.ptr, stream, protocol):
                call = lambda given=given: comm.quantized_allreduce(x, stream=given)  # noqa: E731
                assert waited(comm, call) == [stream.ptr, 0]
        for given in (0, 1):
            assert waited(comm, lambda given=given: comm.quantized_allreduce(x, stream=given)) == [given]
        for wrong in (True, False, -1, 2.0, "0"):
            with pytest.raises(ArgumentError, match="stream"):
                comm.quantized_allreduce(x, stream=wrong)


@on_gpus(1)
def test_an_object_whose_stream_changed(comm, cupy, waited):
    first, second = cupy.cuda.Stream(), cupy.cuda.Stream()

    x = array()
    holder = SimpleNamespace(ptr=first.ptr)
    shown = Interface(array(), stream=first.ptr)
    for told, stream in ({}, 0), ({"stream": 1}, 1):
        assert waited(comm, lambda told=told: comm.quantized_allreduce(Interface(array(), **told))) == [stream]
    for stream in (first, second, first):
        holder.ptr = shown._interface["stream"] = stream.ptr
        for _ in range(2):
            assert waited(comm, lambda: comm.quantized_allreduce(x, stream=holder)) == [stream.ptr, 0]
            assert waited(comm, lambda: comm.quantized_allreduce(shown)) == [stream.ptr]
            given = lambda: comm.quantized_allreduce(shown, stream=holder.ptr)  # noqa: E731
            assert waited(comm, given) == [stream.ptr]
        assert waited(comm, lambda: comm.quantized_allreduce(shown, stream=0)) == [0, stream.ptr]


@on_gpus(1)
def test_a_library_that_does_not_tell_its_stream_is_given_ours_in_each_call(comm, world, cupy):
    """Before the call waits for its stream, with which the library is to order its work so far."""
    first, second = cupy.cuda.Stream(), cupy.cuda.Stream()

    x = OnlyDLPack(array())
    for stream in (first, second):
        comm.quantized_allreduce(x, stream=stream.ptr)
    orders = []
    record = world.record
    world.record = lambda event, stream: orders.append((stream, list(x.orders))) or record(event, stream)
    for stream in (first, second, first):
        x.orders.clear()
        orders.clear()
        comm.quantized_allreduce(x, stream=stream.ptr)
        assert orders[0] == (stream.ptr, [1, stream.ptr])
    comm.quantized_allreduce(x)
    x.orders.clear()
    comm.quantized_allreduce(x)
    assert x.orders == [1, 1]


@on_gpus(1)
def test_a_tensor_that_changed(comm, current, cupy):
    x, out, other = Tensor(array()), array(), fake_cuda.array(values(0, COUNT))
    first = x._array
    calls = (
        lambda: comm.quantized_allreduce(x, out, codec="none"),
        lambda: comm.quantized_allreduce_coalesced([x], [out], codec="none"),
    )
    for call in calls:
        call()
        x._array = other  # x.data = other
        call()
        comm.check()
        assert (out.get() == other.get()).all()
        x.negated = True
        with pytest.raises(InvalidBufferError, match=r"resolve_neg"):
            call()
        x.negated = False
        x.untyped_storage = lambda: SimpleNamespace(data_ptr=x.data_ptr, nbytes=lambda: 4)
        with pytest.raises(InvalidBufferError, match="its storage has 4 bytes"):
            call()
        del x.untyped_storage
        x._array = first
        call()
        comm.check()
        assert (out.get() == 1).all()
    work = comm.quantized_allreduce(x, out, codec="none", async_op=True)
    work = comm.quantized_allreduce(x, out, codec="none", async_op=True)
    work.synchronize()
    # moved between the description and the call
    x.untyped_storage = lambda: SimpleNamespace(data_ptr=lambda: other.data.ptr, nbytes=lambda: 4 * COUNT)
    with pytest.raises(InvalidBufferError, match="x needs 400 bytes, but its storage"):
        comm.quantized_allreduce(x, out, codec="none", async_op=True)


@on_gpus(1)
def test_an_array_that_changed(comm, cupy):
    """Its shape, order and element type, and whether it may be written."""
    x, kept = array(COUNT), []  # calls look into what was exported until they have ended

    def shown_as(content, code=FLOAT, **how):
        kept.append(x._producer)
        x._producer = Producer(content, code, device=(2, 0), **how)

    for call in (lambda: comm.quantized_allreduce(x), lambda: comm.quantized_allreduce_coalesced([x])):
        shown_as(x.values)
        for _ in range(2):
            call()
        shown_as(x.values, readonly=True)
        with pytest.raises(InvalidBufferError, match="read-only"):
            call()
        shown_as(x.values.reshape(4, 25).T[::2])
        with pytest.raises(InvalidBufferError, match="not contiguous"):
            call()
        shown_as(x.values.view(np.int32), 0)
        with pytest.raises(InvalidBufferError, match="element type int32"):
            call()
        shown_as(x.values.view(np.float16))
        call()
        shown_as(x.values[:10])
        call()
        with pytest.raises(ArgumentError, match=r"lie differently|must be equal"):
            comm.quantized_allreduce(x, array())
    comm.check()


@on_gpus(1)
def test_other_memory(comm, cupy):
    """Other arrays of the same forms, arrays that overlap, in place or not."""
    memory = array(3 * COUNT)
    x, y, across = memory[:COUNT], memory[COUNT : 2 * COUNT], memory[COUNT // 2 : COUNT // 2 + COUNT]
    for i in range(3):
        source, target = fake_cuda.array(values(i, COUNT)), array()
        comm.quantized_allreduce(source, target, codec="none")
        many, outs = [fake_cuda.array(values(i, COUNT, seed)) for seed in (1, 2)], [array(), array()]
        comm.quantized_allreduce_coalesced(many, outs, codec="none")
        comm.check()
        assert (target.get() == source.get()).all()
        assert all((out.get() == each.get()).all() for each, out in zip(many, outs, strict=True))
    with pytest.raises(InvalidBufferError, match="overlap in part"):
        comm.quantized_allreduce(x, across, codec="none")
    with pytest.raises(InvalidBufferError, match=r"outs\[0\] and outs\[1\] overlap"):
        comm.quantized_allreduce_coalesced([array(), array()], [x, across], codec="none")
    with pytest.raises(ArgumentError, match="in place or none"):
        comm.quantized_allreduce_coalesced([x, y], [x, array()], codec="none")
    before = y.get()
    assert comm.quantized_allreduce(y, y, codec="none") is y
    comm.quantized_allreduce(x, y, codec="none")
    comm.check()
    assert (y.get() == before).all() and (y.get() == x.get()).all()


@on_gpus(1)
def test_arrays_live_until_their_call_has_ended(comm, world, cupy):
    for _ in range(3):
        arrays = [array(), array()]
        dropped = [weakref.ref(each) for each in arrays]
        world.frozen = True
        comm.quantized_allreduce_coalesced(arrays)
        del arrays
        gc.collect()
        assert all(each() is not None for each in dropped)
        world.frozen = False
        comm.check()
        for each in dropped:  # freed by the thread for garbage where the watchdog has seen the end of the call first
            patience.wait_until(lambda each=each: gc.collect() >= 0 and each() is None)


@on_gpus(2)
def test_the_ranks_compare_a_repeated_call_again_after_their_numbers_changed(comm, cupy):
    codec, x = "minmax4:rounding=stochastic", array(1000, comm.rank)
    for _ in range(2):
        comm.quantized_allreduce(x, codec=codec)
    comm.check()
    comm.load_state_dict(comm.state_dict() | {"calls": 7 + comm.rank})
    with pytest.raises(qccl.MismatchError, match=r"\+5 calls"):
        comm.quantized_allreduce(x, codec=codec)


@on_gpus(1)
def test_a_repeated_call_in_a_graph(comm, cupy):
    """The call is known from outside the graph, with the same stream."""
    x, out = pair()
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(2):
        comm.quantized_allreduce(x, out, stream=stream.ptr)
    comm.check()
    with stream:
        stream.begin_capture()
        comm.quantized_allreduce(x, out, stream=stream.ptr)
        graph = stream.end_capture()
    for seed in range(3):
        x.set(values(7, COUNT, seed))
        graph.launch(stream)
        comm.check(stream.ptr)
        assert (out.get() == x.get()).all()
    _, other = captured(cupy, comm, lambda s: comm.quantized_allreduce(x, out, stream=s))
    assert len(other.nodes) == len(graph.nodes)
