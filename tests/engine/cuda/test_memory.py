"""Arrays on a fake GPU: the stream of each library's arrays, and arrays that are refused."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import fake_cuda
import fake_device
import numpy as np
import pytest
from cuda_ranks import on_gpus, values
from dlpack import FLOAT, Producer
from fake_arrays import Interface, OnlyDLPack, Tensor

import qccl
from qccl.engine.cuda.memory import CudaMemory


@pytest.mark.parametrize("library", ["given", "cupy", "torch"])
def test_a_capture_is_seen_on_the_given_or_a_current_stream(library, cupy, monkeypatch):
    mine = cupy.cuda.Stream()
    current = SimpleNamespace(cuda_stream=mine.ptr if library == "torch" else 0)
    cuda = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda device: current)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    memory, given = CudaMemory(0), mine if library == "given" else None
    with mine if library == "cupy" else contextlib.nullcontext():
        assert not memory.is_capturing(given)
        mine.begin_capture()
        assert memory.is_capturing(given) and not memory.is_capturing(cupy.cuda.Stream())
        mine.end_capture()


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


def test_two_arrays_of_the_same_memory(world, cupy, monkeypatch):
    """The work of both libraries is waited for, and the call is on the stream of the one that made x."""
    mine = cupy.cuda.Stream()
    torch = SimpleNamespace(
        Tensor=Tensor, cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=mine.ptr))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    out = fake_cuda.array(values(0, 100))
    x = Tensor(out)
    assert CudaMemory(0).streams(None, (x, out)) == (mine.ptr, 0)


# -- buffers ---------------------------------------------------------------------------------------------------------


@on_gpus(1)
def test_arrays_that_are_refused(comm, world, cupy):
    """Also in place of the array of an earlier call, and as its other arguments."""
    x = fake_cuda.array(values(0, 100))
    for _ in range(2):
        comm.quantized_allreduce(x)
        comm.quantized_allreduce(OnlyDLPack(x))
        comm.quantized_allreduce(x, fake_cuda.array(values(0, 100)))
        comm.quantized_allreduce_coalesced([x, fake_cuda.array(values(0, 100))])
    comm.check()
    before = len(world.calls)
    host = np.zeros(100, np.float32)
    pinned = OnlyDLPack(fake_cuda.array(values(0, 100)))
    pinned._array._producer = Producer(pinned._array.values, FLOAT, device=(3, 0))
    elsewhere = fake_cuda.array(values(0, 100), device=3)
    for wrong, message in (
        (host, "host memory"),
        (pinned, "pinned host memory"),
        (elsewhere, "GPU 3"),
        (Interface(elsewhere), "GPU 3"),
        ([1.0], "neither __dlpack__ nor __cuda_array_interface__"),
        (Interface(x, mask=object()), "mask"),
        (Interface(x, data=(x.data.ptr, True)), "read-only"),
        (Interface(x, strides=(8,)), "not contiguous"),
        (Interface(x, strides=(6,), shape=(50,)), "not multiples of the 4 bytes"),
        (Interface(x, typestr="<f8"), "<f8"),
        (Interface(x, typestr="<M8[ns]", strides=(8,)), "element type <M8"),
        (Interface(x, shape=(10_000_000,)), "allocation"),
        (Interface(x, data=(host.ctypes.data, False)), "host memory"),
    ):
        with pytest.raises(qccl.InvalidBufferError, match=rf"^x\b.*{message}"):
            comm.quantized_allreduce(wrong)
        with pytest.raises(qccl.InvalidBufferError, match=rf"^out\b.*{message}"):
            comm.quantized_allreduce(x, wrong)
        with pytest.raises(qccl.InvalidBufferError, match=rf"^xs\[1\].*{message}"):
            comm.quantized_allreduce_coalesced([x, wrong])
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


@on_gpus(1)
def test_nonfinite(comm, cupy):
    x = fake_cuda.array(values(0, 100))
    assert comm.quantized_allreduce(x, op="avg", nonfinite="error") is x
    spoilt = values(0, 100)
    spoilt[7] = np.inf
    with pytest.raises(qccl.ArgumentError, match="element 7"):
        comm.quantized_allreduce(fake_cuda.array(spoilt), op="avg", nonfinite="error")


@on_gpus(1)
def test_a_pointer_is_looked_up_once_for_each_allocation(comm, world, cupy):
    """One short question remains in a repeated call: whether it is the same allocation still."""
    x, out = (cupy.cuda.memory.Memory(4000) for _ in range(2))
    found = []
    for _ in range(3):
        world.asked.clear()
        qccl.quantized_allreduce(x.ptr, out.ptr, 1000, "float32", "sum", comm)
        found.append([*world.asked])
    assert found[1] == found[2] == [1, 1] and found[0].count(6) == 2
    comm.check()
    block, address = world.memory[x.ptr], x.ptr
    world.memory[address] = again = fake_device.Block(2000)  # freed, and allocated anew at the same address
    with pytest.raises(qccl.InvalidBufferError, match="the allocation has 2000 bytes"):
        qccl.quantized_allreduce(address, out.ptr, 1000, "float32", "sum", comm)
    del world.memory[address]  # freed
    with pytest.raises(qccl.InvalidBufferError, match="unknown to CUDA"):
        qccl.quantized_allreduce(address, out.ptr, 1000, "float32", "sum", comm)
    world.memory[address] = block
    qccl.quantized_allreduce(address, out.ptr, 1000, "float32", "sum", comm)
    comm.check()  # before the memory goes
    assert again.number != block.number
