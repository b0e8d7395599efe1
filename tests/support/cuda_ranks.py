"""Ranks on fake GPUs, each a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import fake_cuda
import numpy as np
import thread_ranks

import qccl

CALLS = [
    ("minmax8", 5000, {"algorithm": "two_round", "chunk": 1024}),
    ("minmax4:rounding=stochastic,bucket=64,seed=3", 20_000, {"algorithm": "two_round", "chunk": 1024}),
    ("minmax4:rounding=stochastic,bucket=64,seed=3", 20_000, {"algorithm": "one_shot", "chunk": 2048}),
    ("minmax3:bucket=shard", 3001, {"op": "avg"}),
    ("minmax4:bucket=16384", 70_000, {"algorithm": "two_round", "chunk": 16_384}),
    ("none", 3, {"op": "max"}),
    ("minmax2", 0, {}),
]


def values(rank: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32)


def ranks(
    n: int,
    fn: Callable[[qccl.Communicator], Any],
    *,
    timeout: float = 60.0,
    make: Callable[[int], qccl.Communicator] | None = None,
) -> list[Any]:
    """What ``fn(comm)`` returned or raised on each of ``n`` GPUs. ``make(rank)`` may make the communicators."""
    unique_id = qccl.get_unique_id()

    def run(rank: int) -> Any:
        try:
            with make(rank) if make else qccl.Communicator(unique_id, rank, n, device=rank, timeout=timeout) as comm:
                return fn(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def pair(rank: int = 0, count: int = 100) -> tuple[fake_cuda.Array, fake_cuda.Array]:
    """x and out. (One rank alone has something to do only out of place: a copy.)"""
    return fake_cuda.array(values(rank, count), rank), fake_cuda.array(np.zeros(count, np.float32), rank)


def called(comm: qccl.Communicator) -> tuple[fake_cuda.Array, fake_cuda.Array]:
    """The arrays of a call that has ended."""
    x, out = pair()
    comm.quantized_allreduce(x, out)
    comm.check()
    return x, out


def summed(comm: qccl.Communicator, count: int = 100) -> fake_cuda.Array:
    """This rank's array after a call that has ended on all ranks."""
    x = fake_cuda.array(values(comm.rank, count), comm.rank)
    comm.quantized_allreduce(x)
    comm.check()
    comm.barrier()
    return x


def on_gpus(size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that each of ``size`` fake GPUs' ranks runs, as thread_ranks.on_ranks()."""
    return thread_ranks.on_ranks(size, runner=returned, **options)


def returned(n: int, fn: Callable[[qccl.Communicator], Any], **arguments: Any) -> list[Any]:
    """What ``fn(comm)`` returned on each of ``n`` GPUs; what it raised is raised."""
    found = ranks(n, fn, **arguments)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def one(fn: Callable[[qccl.Communicator], Any], **arguments: Any) -> Any:
    return returned(1, fn, **arguments)[0]


def alike(n: int, calls: Callable[..., Any]) -> None:
    """Assert that ``calls(comm, array)`` returns the same on ``n`` fake GPUs as on the host.

    ``array(x)`` is an array with a copy of the values, on the rank's GPU or on the host; arrays that are returned, also
    in lists, count as their bytes.
    """

    def on_gpu(comm: qccl.Communicator) -> Any:
        def array(x: np.ndarray, **how: Any) -> fake_cuda.Array:
            return fake_cuda.array(x, comm.rank, **how)

        found = calls(comm, array)
        comm.check()
        return contents(found)

    def on_host(comm: qccl.Communicator) -> Any:
        return contents(calls(comm, lambda x, **how: x.copy()))

    assert ranks(n, on_gpu) == qccl.run_ranks(n, on_host)


def contents(found: Any) -> Any:
    """Bytes in place of arrays."""
    if isinstance(found, list):
        return [contents(each) for each in found]
    return found.values.tobytes() if isinstance(found, fake_cuda.Array) else found.tobytes()


def all_calls(comm: qccl.Communicator, array: Callable[[np.ndarray], Any]) -> list[Any]:
    found = []
    for number, (codec, count, arguments) in enumerate(CALLS):
        x, out = array(values(comm.rank, count, number)), array(np.full(count, np.nan, np.float32))
        comm.quantized_allreduce(x, out, codec=codec, **arguments)
        comm.quantized_allreduce(x, codec=codec, **arguments)
        found += [x, out]  # nothing has been waited for
    return found


def captured(cupy: ModuleType, comm: qccl.Communicator, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    try:
        call(stream)
    finally:
        graph = stream.end_capture()
    return stream, graph


class Captures:
    """Captures of ranks that are threads, one by one: the fake refuses what a capture of any thread forbids."""

    def __init__(self, cupy: ModuleType, size: int) -> None:
        self._cupy, self._lock = cupy, threading.Lock()
        self._begin, self._end = threading.Barrier(size), threading.Barrier(size)

    def __call__(self, comm: qccl.Communicator, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The stream and the graph of a call."""
        comm.check()
        comm.barrier()
        self._begin.wait(20)  # a rank may still poll for the barrier, which allocates
        with self._lock:
            found = captured(self._cupy, comm, call)
        self._end.wait(20)
        comm.barrier()
        return found
