"""An array of more than 2^31 elements on one GPU with a simulated peer: counts and indices that need 64 bits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from device import mirrored
from reports import Missing

import qccl
from qccl.cuda.libraries import DEVICE_TO_HOST, HOST_TO_DEVICE, ON_DEVICE, cuda_libraries

_ARGUMENTS: dict[str, Any] = {"codec": "minmax8", "algorithm": "one_shot"}
#: bytes of memory per element: 2 of the array, and codes sent and received, up to three chunks of each
_BYTES_PER_ELEMENT = 2 + 2 * 3 * 1.1


def check(count: int = (1 << 31) + 12_345, period: int = 1 << 24) -> dict[str, Any]:
    """float16 values that repeat every ``period`` elements, as their results must; in default chunks and in one."""
    runtime = cuda_libraries().runtime
    free, needed = runtime.memGetInfo()[0], int(_BYTES_PER_ELEMENT * count)
    if free < needed:
        raise Missing(f"{count} elements need {needed >> 20} MiB of the GPU's memory, and {free >> 20} MiB are free")
    values = np.random.default_rng(1).standard_normal(period, dtype=np.float32).astype(np.float16)
    expected = qccl.run_ranks(2, lambda comm: comm.quantized_allreduce(values.copy(), **_ARGUMENTS))[0]
    rest = values[: count % period]
    last = qccl.run_ranks(2, lambda comm: comm.quantized_allreduce(rest.copy(), **_ARGUMENTS))[0]
    memory = cuda_libraries().cupy.cuda.alloc(2 * count)
    figures: dict[str, Any] = {"elements": count, "free_gb": free / 1e9}
    for chunk in (None, count):
        _fill(memory.ptr, values, count)
        with mirrored() as comm:
            begin = time.perf_counter()
            qccl.quantized_allreduce(memory.ptr, memory.ptr, count, "float16", "sum", comm, chunk=chunk, **_ARGUMENTS)
            comm.check()
            figures["seconds in one chunk" if chunk else "seconds"] = time.perf_counter() - begin
        _compare(memory.ptr, count, expected, last)
    return figures


def _fill(address: int, values: np.ndarray, count: int) -> None:
    """Copy ``values`` to the device over and over."""
    runtime = cuda_libraries().runtime
    runtime.memcpy(address, values.ctypes.data, values.nbytes, HOST_TO_DEVICE)
    for start in range(values.size, count, values.size):
        runtime.memcpy(address + 2 * start, address, 2 * min(values.size, count - start), ON_DEVICE)
    runtime.deviceSynchronize()


def _compare(address: int, count: int, expected: np.ndarray, last: np.ndarray) -> None:
    found = np.empty_like(expected)
    for start in range(0, count, expected.size):
        wanted = expected if count - start >= expected.size else last
        part = found[: wanted.size]
        cuda_libraries().runtime.memcpy(part.ctypes.data, address + 2 * start, part.nbytes, DEVICE_TO_HOST)
        bad = np.flatnonzero(part.view(np.uint16) != wanted.view(np.uint16))
        assert not bad.size, f"element {start + bad[0]} of {count} differs from the host's"
