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
from qccl.communicator import Communicator
from qccl.cuda import CudaBackend
from qccl.cuda.libraries import cuda_libraries
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


def _plans(comm: qccl.Communicator) -> list[tuple[qccl.Plan, int]]:
    node_ids = list(range(comm.size))
    return [
        (
            comm.plan(
                *("hierarchical_allreduce", count), codec=codec, algorithm=algorithm, chunk=chunk,
                node_ids=node_ids, inter="host",
            ),
            count,
        )
        for codec, algorithm, count, chunk in CALLS
    ]  # fmt: skip


def _on_host(size: int) -> list[bytes]:
    def run(comm: qccl.Communicator) -> list[bytes]:
        plans = _plans(comm)
        return [
            plan(_values(seed, comm.rank, n)).tobytes() for seed, (plan, n) in enumerate(plans) for _ in range(_RUNS)
        ]

    return qccl.run_ranks(size, run)[0]


def _together(size: int, run: Any, timeout: float = 60.0) -> list[Any]:
    """The results of ``run(comm)``, by rank."""
    group = LoopbackGroup(size)

    def rank(number: int) -> Any:
        with Communicator._from_transport(Apart(group.transport(number)), timeout, CudaBackend) as comm:
            return run(comm)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def check(size: int) -> dict[str, Any]:
    """Consecutive calls, all enqueued at once, give the host's bytes on all ranks."""
    expected = _on_host(size)

    def run(comm: qccl.Communicator) -> tuple[list[bytes], float, float]:
        plans = _plans(comm)
        xs = [[DeviceArray(_values(s, comm.rank, n)) for _ in range(_RUNS)] for s, (_, n) in enumerate(plans)]
        for (plan, _), arrays in zip(plans, xs, strict=True):
            plan.bind(arrays[0])
        cuda_libraries().runtime.deviceSynchronize()
        comm.barrier()
        begin = time.perf_counter()
        for (plan, _), arrays in zip(plans, xs, strict=True):
            for x in arrays:
                plan.bind(x).start()
        put = time.perf_counter() - begin
        comm.check()
        done = time.perf_counter() - begin
        comm.barrier()  # no stream waits any more
        return [x.get().tobytes() for arrays in xs for x in arrays], put, done

    found = _together(size, run)
    for rank, (mine, _, _) in enumerate(found):
        for number, (one, wanted) in enumerate(zip(mine, expected, strict=True)):
            assert one == wanted, f"rank {rank} of {size}: {CALLS[number // _RUNS]} differs from the host's bytes"
    return {"enqueue_ms": [1e3 * put for _, put, _ in found], "done_ms": [1e3 * done for _, _, done in found]}


def check_order(delay: float = 0.2) -> dict[str, Any]:
    """A slow producer, the call, a consumer: the host enqueues all of them while the producer runs."""
    count = 100_003
    figures: dict[str, float] = {}
    kernels, one_at_a_time = Kernels(), threading.Lock()

    def plan_of(comm: qccl.Communicator) -> qccl.Plan:
        return comm.plan("hierarchical_allreduce", count, node_ids=list(range(comm.size)), inter="host", chunk=16_384)

    def run(comm: qccl.Communicator) -> bytes:
        stream = cuda_libraries().cupy.cuda.Stream(non_blocking=True)
        source, x, seen = (DeviceArray(_values(seed, comm.rank, count)) for seed in range(3))
        plan = plan_of(comm).bind(x)
        with one_at_a_time:
            kernels.copy(stream, source.ptr, x.ptr, x.nbytes)
            stream.synchronize()
        comm.barrier()
        x.put(_values(1, comm.rank, count))
        comm.barrier()
        begin = time.perf_counter()
        kernels.spin(stream, delay)
        kernels.copy(stream, source.ptr, x.ptr, x.nbytes)
        plan.start(stream=stream).wait()
        kernels.copy(stream, x.ptr, seen.ptr, x.nbytes)
        host = time.perf_counter() - begin
        assert host < delay / 2, f"the host waited {host:.3f} s in a call that was to be put on a stream"
        figures[f"host_seconds rank {comm.rank}"] = host
        stream.synchronize()
        comm.barrier()
        return seen.get().tobytes()

    [expected, *_] = qccl.run_ranks(2, lambda comm: plan_of(comm)(_values(0, comm.rank, count)).tobytes())
    assert _together(2, run) == [expected] * 2, "the consumer did not see the result"
    return figures


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
    return each_of({**sizes, "order": check_order, "away": check_away})
