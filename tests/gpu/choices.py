"""What codec="auto" chooses on two NCCL ranks, beside the times of the fixed choices.

``one_rank()`` runs in the processes that ranks.py starts.
"""

from __future__ import annotations

import statistics
import time
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import ranks
from device import DeviceArray

import qccl
from qccl.cuda import libraries

#: bytes of the all-reduces, and the ways to make them without "auto"
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_WAYS = [(codec, algorithm) for codec in ("none", "minmax8") for algorithm in ("one_shot", "two_round")]
#: rounds, and calls in a row in each
_ROUNDS, _BURST = 9, 5
#: with a GPU for each rank, the fixed choice that "auto" takes is at most so many times as long as the fastest
MOST = 1.25


def check() -> dict[str, Any]:
    """Ranks choose alike, and so that no fixed choice is much faster, unless they take turns on one GPU."""
    reports, status = ranks._start(2, "auto")
    assert not any(status), f"exit statuses {status}: {reports}"
    first, second = reports
    chosen = {size: row["chosen"] for size, row in first["sizes"].items()}
    assert chosen == {size: row["chosen"] for size, row in second["sizes"].items()}, "the ranks choose differently"
    figures: dict[str, Any] = {name: first[name] for name in ("hardware", "measured_s", "free_before", "free_after")}
    for size, row in first["sizes"].items():
        ms = {way: (row["ms"][way] + second["sizes"][size]["ms"][way]) / 2 for way in row["ms"]}
        best = min(time for way, time in ms.items() if way != "auto")
        figures[size] = {"chosen": chosen[size], "beside_best": ms[chosen[size]] / best, "ms": ms, "why": row["why"]}
    slow = {
        size: each["beside_best"] for size, each in figures.items() if size in chosen and each["beside_best"] > MOST
    }
    if libraries.device_count() >= 2 and slow:
        raise AssertionError(f"a fixed choice is much faster than auto's at {slow}", figures)
    return figures


def one_rank() -> dict[str, Any]:
    """A rank's times, in milliseconds, and what it has chosen."""
    gpu = libraries.cuda_libraries()
    stream, device = gpu.cupy.cuda.Stream(non_blocking=True), gpu.runtime.getDevice()
    with qccl.init(backend="cuda", device=device, timeout=25.0) as comm:
        before, begin = gpu.runtime.memGetInfo()[0], time.monotonic()
        comm.profile()
        found: dict[str, Any] = {"hardware": comm.transport.hardware, "measured_s": time.monotonic() - begin}
        found |= {"free_before": before, "free_after": gpu.runtime.memGetInfo()[0]}
        sizes = {str(size): _times(comm, size // 4, stream) for size in SIZES}
    return found | {"sizes": sizes}


def _times(comm: qccl.Communicator, count: int, stream: Any) -> dict[str, Any]:
    """The median times of all ways, which take turns."""
    x, out = DeviceArray(np.full(count, 1.5, np.float32)), DeviceArray(np.zeros(count, np.float32))
    plans = {f"{codec} {way}": comm.plan("allreduce", count, codec=codec, algorithm=way) for codec, way in _WAYS}
    plans["auto"] = comm.plan("allreduce", count, codec="auto")
    seconds: dict[str, list[float]] = {way: [] for way in plans}
    for plan in plans.values():
        plan.bind(x, out)
    for way, plan in reduce(add, [[*plans.items()]] * (_ROUNDS + 1)):  # the first round is not counted
        plan.start(stream=stream).wait()
        comm.check(stream.ptr)
        begin = time.perf_counter()
        for _ in range(_BURST):
            plan.start(stream=stream).wait()
        comm.check(stream.ptr)
        seconds[way].append((time.perf_counter() - begin) / _BURST)
    auto = plans["auto"]
    return {
        "ms": {way: 1e3 * statistics.median(each[1:]) for way, each in seconds.items()},
        "chosen": f"{auto.codec} {auto.spec.algorithm}",  # type: ignore[attr-defined]
        "why": auto.explain().splitlines()[1],
    }
