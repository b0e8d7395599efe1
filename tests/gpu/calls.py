"""Whole calls on one GPU with a simulated peer: stream order, graphs, and the host's time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from device import DeviceArray, Kernels, mirrored

import qccl
from qccl.engine.cuda.libraries import cuda_libraries

COUNT = 200_003


def _values(seed: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def _expected(values: list[np.ndarray], size: int = 2, **arguments: Any) -> list[np.ndarray]:
    """The host's results of consecutive calls in which all ranks have the same values."""

    def run(comm: qccl.Communicator) -> list[np.ndarray]:
        return [comm.quantized_allreduce(x.copy(), **arguments) for x in values]

    return qccl.run_ranks(size, run)[0]


def _same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    bad = np.flatnonzero(found.ravel().view(np.uint8) != expected.view(np.uint8))
    assert not bad.size, f"{what}: {bad.size} of {found.nbytes} bytes differ from the host's, first at {bad[0]}"


def stream_order(delay: float = 0.2) -> dict[str, Any]:
    """A slow producer, the collective, a consumer: the host enqueues all of them while the producer runs."""
    cuda, kernels = cuda_libraries().cupy.cuda, Kernels()
    figures: dict[str, Any] = {}
    [expected] = _expected([_values(1)], algorithm="one_shot")
    for what, chunk in (("one chunk", None), ("chunks", 16_384)):
        for name, stream in (("own stream", cuda.Stream(non_blocking=True)), ("default stream", cuda.Stream.null)):
            with mirrored() as comm:
                source, x, seen = (DeviceArray(v) for v in (_values(1), _values(2), np.zeros(COUNT, np.float32)))
                comm.quantized_allreduce(x, algorithm="one_shot", chunk=chunk, stream=stream)  # now it is compiled
                comm.check()
                x.put(_values(2))
                begin = time.perf_counter()
                kernels.spin(stream, delay)
                kernels.copy(stream, source.ptr, x.ptr, x.nbytes)
                comm.quantized_allreduce(x, algorithm="one_shot", chunk=chunk, stream=stream)
                kernels.copy(stream, x.ptr, seen.ptr, x.nbytes)
                host = time.perf_counter() - begin
                stream.synchronize()
                _same(seen.get(), expected, f"{name}, {what}")
                assert host < delay / 2, f"the host waited {host:.3f} s in calls that were to be put on a stream"
                figures[f"host_seconds {name} {what}"] = host
    figures["asynchronous"] = _async_order(kernels, delay)
    return figures


def _async_order(kernels: Kernels, delay: float) -> str:
    """With async_op the stream continues at once; after wait() it is ordered behind the call."""
    stream = cuda_libraries().cupy.cuda.Stream(non_blocking=True)
    [expected] = _expected([_values(1)], algorithm="one_shot")
    with mirrored() as comm:
        x, seen = DeviceArray(_values(1)), DeviceArray(np.zeros(COUNT, np.float32))
        work = comm.quantized_allreduce(x, algorithm="one_shot", async_op=True, stream=stream)
        kernels.spin(stream, delay)
        assert work.wait() is x
        kernels.copy(stream, x.ptr, seen.ptr, x.nbytes)
        stream.synchronize()
        _same(seen.get(), expected, "async_op")
        assert work.synchronize() is x and work.is_completed()
    return "wait() orders the stream"


def graphs() -> dict[str, Any]:
    """A call in a graph gives the same bytes as outside; each replay draws new random numbers."""
    stream, results = cuda_libraries().cupy.cuda.Stream(non_blocking=True), set()
    inputs = [_values(seed) for seed in (3, 4, 5)]
    for chunk, codec in itertools.product((None, 16_384), ("minmax8", "minmax4:bucket=20000", "none")):
        arguments = {"algorithm": "one_shot", "codec": codec, "chunk": chunk}
        with mirrored() as comm:
            x = DeviceArray(inputs[0])
            call = partial(comm.quantized_allreduce, x, stream=stream, **arguments)
            graph = _captured(stream, comm, call)
            replay = partial(graph.launch, stream)
            for run, values in ((replay, inputs[0]), (replay, inputs[1]), (replay, inputs[2]), (call, inputs[0])):
                x.put(values)
                run()
                comm.check(stream.ptr)
                what = f"{'a graph' if run is replay else 'a call after replays'} of {codec}, chunk {chunk}"
                _same(x.get(), _expected([values], **arguments)[0], what)
    with mirrored() as comm:
        x, out = DeviceArray(inputs[0]), DeviceArray(np.zeros(COUNT, np.float32))
        arguments = {"codec": "minmax2:rounding=stochastic", "algorithm": "one_shot"}
        graph = _captured(stream, comm, partial(comm.quantized_allreduce, x, out, stream=stream, **arguments))
        for _ in range(4):
            graph.launch(stream)
            comm.check(stream.ptr)
            results.add(out.get().tobytes())
    assert len(results) == 4, f"{len(results)} different results of 4 replays with stochastic rounding"
    return {"stochastic_replays_differ": True}


def _captured(stream: Any, comm: qccl.Communicator, call: Callable[[], object]) -> Any:
    call()
    comm.check()
    stream.begin_capture()
    try:
        call()
    finally:
        graph = stream.end_capture()
    return graph


def dispatch(calls: int = 200, burst: int = 20) -> dict[str, Any]:
    """The host's time to enqueue a two-rank call of 1 MiB, and to replay it as a graph."""
    stream = cuda_libraries().cupy.cuda.Stream(non_blocking=True)
    count = (1 << 20) // 4
    figures: dict[str, Any] = {}
    for algorithm in ("one_shot", "two_round"):
        with mirrored() as comm:
            x = DeviceArray(np.zeros(count, np.float32))
            plan = comm.plan("allreduce", count, "float32", codec="minmax8", algorithm=algorithm).bind(x)

            def call(plan: qccl.Plan = plan) -> None:
                plan.start(stream=stream).wait()

            graph = _captured(stream, comm, call)
            for name, run in (("dispatch", call), ("replay", lambda graph=graph: graph.launch(stream))):
                figures[f"{name}_us {algorithm}"] = 1e6 * _host_seconds(run, comm, stream, calls, burst)
    return figures


def _host_seconds(run: Callable[[], object], comm: qccl.Communicator, stream: Any, calls: int, burst: int) -> float:
    """The median time of a call over bursts, each of which starts with an idle GPU."""
    times = []
    for _ in range(calls // burst):
        begin = time.perf_counter()
        for _ in range(burst):
            run()
        times.append((time.perf_counter() - begin) / burst)
        comm.check(stream.ptr)
    return statistics.median(times)
