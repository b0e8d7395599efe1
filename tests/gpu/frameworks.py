"""Arrays of PyTorch and of JAX: their element types, streams and graphs, and from_torch() with NCCL."""

from __future__ import annotations

import gc
import importlib
import os
import time
from typing import Any

import numpy as np
from calls import _expected as _expected_of
from calls import _same, _values
from device import DeviceArray, Kernels, _known, mirrored
from reports import Missing, each_of

import qccl
from qccl.engine.cuda.libraries import cuda_libraries

COUNT = 100_003
_ARGUMENTS = {"codec": "minmax8", "algorithm": "one_shot"}


def torch_checks() -> dict[str, Any]:
    """The whole section "torch"."""
    torch = _imported("torch")
    return each_of(
        {
            "types": lambda: _tensors(torch),
            "host_seconds": lambda: _current_stream(torch),
            "replays": lambda: _graph(torch),
            "from_torch": lambda: _from_torch(torch),
        }
    )


def jax_checks() -> dict[str, Any]:
    """The whole section "jax"."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # otherwise JAX takes three quarters of the memory
    jax = _imported("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        raise Missing(f"JAX has no GPU here ({error})") from error
    return each_of({"types": lambda: _jax_arrays(jax, device), "host_seconds": lambda: _jax_order(jax, device)})


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} cannot be imported ({error})") from error


def _expected(values: np.ndarray, size: int = 2, dtype: str | None = None) -> np.ndarray:
    """The host's result where all ranks have the same values."""
    return _expected_of([values], size, dtype=dtype, **_ARGUMENTS)[0]


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def _tensors(torch: Any) -> list[str]:
    """Each element type with a call's own order, and a permuted tensor in the order of its memory."""
    values = _values(1, COUNT)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    cases: dict[str, tuple[np.ndarray, str | None, Any]] = {
        "float32": (values, None, lambda x: x),
        "float16": (values.astype(np.float16), None, lambda x: x),
        "bfloat16": (bits, "bfloat16", lambda x: x.view(torch.bfloat16)),
        "transposed": (values[:60_000], None, lambda x: x.view(200, 300).t()),
    }
    with mirrored() as comm:
        for what, (given, dtype, form) in cases.items():
            memory = torch.from_numpy(given.view(np.int16) if dtype else given).cuda()
            x = form(memory)
            assert comm.quantized_allreduce(x, **_ARGUMENTS) is x
            comm.check()
            _same(memory.cpu().numpy(), _expected(given, dtype=dtype), what)
    return [*cases]


def _current_stream(torch: Any, delay: float = 0.2) -> float:
    """Without stream= a call belongs to torch's current stream: between a slow producer and a consumer."""
    kernels, stream = Kernels(), torch.cuda.Stream()
    with mirrored() as comm, torch.cuda.stream(stream):
        source, x, seen = (torch.from_numpy(_values(seed, COUNT)).cuda() for seed in (1, 2, 3))
        comm.quantized_allreduce(x, **_ARGUMENTS)  # now it is compiled
        comm.check()
        begin = time.perf_counter()
        kernels.spin(_known(stream.cuda_stream), delay)
        x.copy_(source)
        comm.quantized_allreduce(x, **_ARGUMENTS)
        seen.copy_(x)
        host = time.perf_counter() - begin
        stream.synchronize()
        _same(seen.cpu().numpy(), _expected(_values(1, COUNT)), "on torch's current stream")
    assert host < delay / 2, f"the host waited {host:.3f} s in calls that were to be put on a stream"
    return host


def _graph(torch: Any) -> int:
    """A call between copies in a torch.cuda.graph; each replay reads new values."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with mirrored() as comm:
        source, x, seen = (torch.from_numpy(_values(seed, COUNT)).cuda() for seed in (1, 2, 3))
        comm.quantized_allreduce(x, **_ARGUMENTS)  # makes the plan, which a capture must not
        comm.check()
        with torch.cuda.graph(graph, stream=stream):
            x.copy_(source)
            comm.quantized_allreduce(x, **_ARGUMENTS)
            seen.copy_(x)
        seeds = (4, 5, 6)
        for seed in seeds:
            source.copy_(torch.from_numpy(_values(seed, COUNT)))
            graph.replay()
            comm.check(torch.cuda.current_stream().cuda_stream)
            _same(seen.cpu().numpy(), _expected(_values(seed, COUNT)), "a replay of torch.cuda.graph")
        del graph  # before the communicator, for NCCL waits for graphs that use it
        gc.collect()
    return len(seeds)


def _from_torch(torch: Any) -> str:
    """The only rank of a process group with NCCL; the group still works afterwards."""
    dist = importlib.import_module("torch.distributed")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with qccl.Communicator.from_torch() as comm:
            assert (comm.rank, comm.size) == (0, 1)
            x = torch.from_numpy(_values(1, COUNT)).cuda()
            comm.quantized_allreduce(x, **_ARGUMENTS)
            comm.check()
            _same(x.cpu().numpy(), _expected(_values(1, COUNT), size=1), "one rank of torch's NCCL group")
            y = torch.from_numpy(_values(2, COUNT)).cuda()
            dist.all_reduce(y)
            _same(y.cpu().numpy(), _values(2, COUNT), "torch's own all-reduce beside the communicator")
    finally:
        dist.destroy_process_group()
    return "one rank"


# -- JAX -------------------------------------------------------------------------------------------------------------


def _jax_arrays(jax: Any, device: Any) -> list[str]:
    """A JAX array is read, and memory that is no JAX array is written, because JAX arrays are immutable."""
    types = []
    with mirrored() as comm:
        for dtype in (np.float32, np.float16):
            values = _values(1, COUNT).astype(dtype)
            x, out = jax.device_put(values, device), DeviceArray(np.zeros(COUNT, dtype))
            comm.quantized_allreduce(x, out, **_ARGUMENTS)
            comm.check()
            _same(out.get(), _expected(values), f"a JAX array of {out.dtype}")
            _same(np.asarray(x), values, f"a JAX array of {out.dtype} that was only read")
            types.append(out.dtype.name)
    return types


def _jax_order(jax: Any, device: Any) -> float:
    """The call waits for what JAX still computes: a loop over all values. Returns the host's time in the call."""
    values = _values(2, 1 << 20)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda i, y: -y, x))
    x = jax.device_put(values, device)
    slow(x).block_until_ready()  # now it is compiled
    stream = cuda_libraries().cupy.cuda.Stream(non_blocking=True)
    with mirrored() as comm:
        out = DeviceArray(np.zeros(values.size, np.float32))
        comm.quantized_allreduce(x, out, stream=stream, **_ARGUMENTS)
        comm.check()
        begin = time.perf_counter()
        comm.quantized_allreduce(slow(x), out, stream=stream, **_ARGUMENTS)
        host = time.perf_counter() - begin
        comm.check()
        _same(out.get(), _expected(values), "the result of a function that JAX still computes")
    return host
