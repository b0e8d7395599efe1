"""Deadlines, full queues and results after a failure, on one GPU with a simulated peer that is slow."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from calls import stream_order
from device import DeviceArray, Kernels, mirrored
from reports import each_of

import qccl
from qccl.engine.cuda.libraries import cuda_libraries

COUNT = 100_003
_ARGUMENTS = {"codec": "minmax8", "algorithm": "one_shot"}


def full_queue(hang: float = 4.0, timeout: float = 1.0, launches: int = 3000) -> dict[str, Any]:
    """A call hangs, and the caller runs ahead until a launch blocks: the deadline passes, and the consumer sees NaN."""
    stream, kernels = cuda_libraries().cupy.cuda.Stream(non_blocking=True), Kernels()
    x, seen = (DeviceArray(np.ones(COUNT, np.float32)) for _ in range(2))
    rate = hang / qccl.codecs.get("minmax8").encoded_nbytes(COUNT, "float32")
    failed: list[float] = []
    with mirrored(seconds_per_byte=rate) as comm:
        comm.quantized_allreduce(x, stream=stream, **_ARGUMENTS)  # now it is compiled
        comm.check()
        begin = time.monotonic()
        work = comm.quantized_allreduce(x, stream=stream, async_op=True, timeout=timeout, **_ARGUMENTS)
        work.add_done_callback(lambda ended: failed.append(time.monotonic() - begin))
        work.wait()
        kernels.copy(stream, x.ptr, seen.ptr, x.nbytes)
        free = 0
        for _ in range(launches):
            kernels.copy(stream, seen.ptr, seen.ptr, 4)
            free += time.monotonic() - begin < timeout / 2
        values = seen.get()
    assert failed and timeout <= failed[0] < hang, f"the deadline of {timeout} s was reached after {failed} s"
    assert isinstance(work.exception(), qccl.CollectiveTimeout), work.exception()
    assert np.isnan(values).all(), f"{np.isfinite(values).sum()} of {COUNT} results after a failure are no NaN"
    return {"failed_after_seconds": failed[0], "launches_before_one_blocked": free}


def late_start(delay: float = 2.0, timeout: float = 0.5) -> dict[str, Any]:
    """The caller's own work takes longer than the call's timeout, which does not count it."""
    stream, kernels = cuda_libraries().cupy.cuda.Stream(non_blocking=True), Kernels()
    with mirrored() as comm:
        x = DeviceArray(np.ones(COUNT, np.float32))
        comm.quantized_allreduce(x, stream=stream, **_ARGUMENTS)
        comm.check()
        begin = time.monotonic()
        kernels.spin(stream, delay)
        comm.quantized_allreduce(x, stream=stream, async_op=True, timeout=timeout, **_ARGUMENTS).synchronize()
        seconds = time.monotonic() - begin
    assert seconds >= delay, f"the caller's work of {delay} s ended after {seconds:.2f} s"
    return {"seconds": seconds}


def many_calls(calls: int = 2000, delay: float = 1.0) -> dict[str, Any]:
    """Calls that nobody waits for, behind a slow kernel: all end, and the host is stopped before a queue is full."""
    stream, kernels = cuda_libraries().cupy.cuda.Stream(non_blocking=True), Kernels()
    with mirrored() as comm:
        x = DeviceArray(np.zeros(COUNT, np.float32))
        comm.quantized_allreduce(x, stream=stream, **_ARGUMENTS)
        comm.check()
        begin = time.monotonic()
        kernels.spin(stream, delay)
        at_once = 0
        for _ in range(calls):
            comm.quantized_allreduce(x, stream=stream, **_ARGUMENTS)
            at_once += time.monotonic() - begin < delay / 2
        comm.check()
        assert (x.get() == 0).all()
    assert at_once < calls, "the host was not stopped"
    return {"calls_before_the_host_waited": at_once, "us_per_call": 1e6 * (time.monotonic() - begin - delay) / calls}


def all_checks() -> dict[str, Any]:
    """The section "streams": the order of a producer, a collective and a consumer, too."""
    queues = {"full_queue": full_queue, "late_start": late_start, "many_calls": many_calls}
    return each_of({"order": stream_order, "queues": partial(each_of, queues)})
