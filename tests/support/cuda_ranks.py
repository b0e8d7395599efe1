"""Ranks on fake GPUs, each a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import fake_cuda
import numpy as np

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


def captured(cupy: ModuleType, comm: qccl.Communicator, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    try:
        call(stream)
    finally:
        graph = stream.end_capture()
    return stream, graph
