"""Transfers through pinned memory: ranks are threads that share this GPU, each on its own node, over loopback.

That several ranks share a process, and so a context, is for this check alone: memory and kernels must be there before
the first call, because getting them can make the device wait, and it needs a queue of the hardware for each stream.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from device import Apart, DeviceArray, Kernels
from reports import each_of

import qccl
from qccl.communicator.communicator import Communicator
from qccl.engine.cuda import CudaBackend
from qccl.engine.cuda.libraries import cuda_libraries
from qccl.transports.loopback import LoopbackGroup

#: before the first use of CUDA in a process
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
#: codec, algorithm, elements, and elements in a chunk
CALLS = (
    ("minmax8", "one_shot", 100_003, 4096),
    ("minmax8", "two_round", 100_003, None),
    ("minmax4:rounding=stochastic,seed=3", "two_round", 70_000, 8192),
    ("none", "one_shot", 20_000, 2048),
    ("minmax8", "two_round", 4_000_000, 262_144),
)
_RUNS = 3


def _values(seed: int, rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(count, dtype=np.float32)


def _calls(comm: qccl.Communicator) -> list[tuple[qccl.Plan, np.ndarray]]:
    """The plans in the order of their calls, with the values of each call."""
    found, nodes = [], {"node_ids": list(range(comm.size)), "inter": "host"}
    for seed, (codec, algorithm, count, chunk) in enumerate(CALLS):
        plan = comm.plan("hierarchical_allreduce", count, codec=codec, algorithm=algorithm, chunk=chunk, **nodes)
        found += [(plan, _values(seed, comm.rank, count))] * _RUNS
    return found


def _together(size: int, run: Any, timeout: float = 60.0) -> list[Any]:
    """The results of ``run(comm)``, by rank."""
    group = LoopbackGroup(size)

    def rank(number: int) -> Any:
        with Communicator._from_transport(Apart(group.transport(number)), timeout, CudaBackend) as comm:
            return run(comm)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def check(size: int, delay: float = 0.2) -> dict[str, Any]:
    """A slow producer, consecutive calls, consumers: the host enqueues all at once, and the host's bytes come out."""
    [expected, *_] = qccl.run_ranks(size, lambda comm: [plan(x.copy()).tobytes() for plan, x in _calls(comm)])
    kernels, one_at_a_time = Kernels(), threading.Lock()

    def run(comm: qccl.Communicator) -> tuple[list[bytes], float, float]:
        stream = cuda_libraries().cupy.cuda.Stream(non_blocking=True)
        plans, inputs = zip(*_calls(comm), strict=True)
        sources, xs, seen = ([DeviceArray(values * factor) for values in inputs] for factor in (1, 0, 0))
        for plan, x in zip(plans, xs, strict=True):
            plan.bind(x)
        with one_at_a_time:  # loads the kernel
            kernels.copy(stream, xs[0].ptr, xs[0].ptr, 4)
            stream.synchronize()
        comm.barrier()
        begin, put = time.perf_counter(), list[float]()
        kernels.spin(stream, delay)
        for plan, source, x, after in zip(plans, sources, xs, seen, strict=True):
            kernels.copy(stream, source.ptr, x.ptr, x.nbytes)
            plan.bind(x).start(stream=stream).wait()
            kernels.copy(stream, x.ptr, after.ptr, x.nbytes)
            put.append(time.perf_counter() - begin)
        comm.check(stream.ptr)
        comm.barrier()  # no stream waits any more
        return [after.get().tobytes() for after in seen], put[0], put[-1]

    found = _together(size, run)
    for rank, (mine, first, _) in enumerate(found):
        for number, (one, wanted) in enumerate(zip(mine, expected, strict=True)):
            assert one == wanted, f"rank {rank} of {size}: {CALLS[number // _RUNS]} differs from the host's bytes"
        assert first < delay / 2, f"the host waited {first:.3f} s in a call that was to be put on a stream"
    return {"first_call_ms": [1e3 * each for _, each, _ in found], "all_ms": [1e3 * each for *_, each in found]}


def check_away(timeout: float = 2.0, away: float = 4.0) -> dict[str, Any]:
    """A rank stays away: the call and the streams that wait for its messages end in time."""
    count = 100_003

    def run(comm: qccl.Communicator) -> float:
        x = DeviceArray(_values(0, comm.rank, count))
        plan = comm.plan("hierarchical_allreduce", count, node_ids=[0, 1], inter="host", chunk=16_384).bind(x)
        plan.start().synchronize()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(away)
            comm.abort("it was away")
            return 0.0
        begin = time.perf_counter()
        work = plan.start(timeout=timeout)
        try:
            work.synchronize()
        except qccl.CollectiveTimeout:
            cuda_libraries().runtime.deviceSynchronize()
            return time.perf_counter() - begin
        raise AssertionError("a call ended well without the other rank")

    seconds = _together(2, run)[0]
    assert timeout <= seconds < away, f"{seconds:.2f} s until the device was idle again"
    return {"seconds": seconds}


def all_checks() -> dict[str, Any]:
    """The whole section."""
    os.environ |= ENVIRONMENT
    sizes = {f"{size} ranks": partial(check, size) for size in (2, 3)}
    return each_of({**sizes, "away": check_away})
