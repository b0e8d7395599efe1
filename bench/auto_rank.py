"""A rank of bench/auto.py: times all-reduces with each fixed codec and algorithm, and with ``codec="auto"``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from runs import report

import qccl

_ALGORITHMS = ("one_shot", "two_round")
#: of one size: seconds for all rounds, in which the ways take turns, and the fewest and the most rounds
_SECONDS, _FEWEST, _MOST = 1.2, 3, 101
#: short calls are timed in bursts: the most calls of a burst, and the most seconds that they take together
_BURST, _SHORT = 5, 0.1
#: seconds: a way is not timed at a size at which a call would take longer
_TOO_LONG = 2.0
#: from this size in bytes on, a way is dropped if it takes more than so many times as long as the fastest
_LARGE, _HOPELESS = 1 << 22, 2.5


def main(task: dict[str, Any]) -> None:
    """Time all sizes; rank 0 reports a row for each."""
    with qccl.init("host", timeout=120) as comm:
        begin = time.monotonic()
        comm.profile()
        profiled = time.monotonic() - begin
        ways = [(codec, algorithm) for codec in task["codecs"] for algorithm in _ALGORITHMS]
        ways += [(codec, "auto") for codec in task["autos"]]
        rows = []
        for size in task["sizes"]:
            rows.append({"size": size, "profiled": profiled} | _timed(comm, size // 4, ways))
            seconds = {each: rows[-1]["seconds"][" ".join(each)] for each in ways}
            # the next size is four times as large
            slowest = _TOO_LONG / 4 if size < _LARGE else min(_TOO_LONG / 4, _HOPELESS * min(seconds.values()))
            ways = [each for each in ways if seconds[each] < slowest]
            if any((codec, "auto") not in ways for codec in task["autos"]):
                break
        if comm.rank == 0:
            report(rows)


def _timed(comm: qccl.Communicator, count: int, ways: list[tuple[str, str]]) -> dict[str, Any]:
    """Time each way; the row has the median times, and the codec and algorithm that "auto" chose."""
    x = np.random.default_rng(comm.rank).standard_normal(count, np.float32)
    out = np.empty_like(x)
    for _ in range(2):  # the first calls also compile programs
        once = _means(comm, [[_calls(comm, x, out, *each, 1)] for each in ways])
        if sum(once) > _SECONDS:
            break
    bursts = [max(1, min(_BURST, int(_SHORT / seconds))) for seconds in once]
    needed = sum(seconds * (burst + (burst > 1)) for seconds, burst in zip(once, bursts, strict=True))
    rounds = min(_MOST, max(_FEWEST, int(_SECONDS / needed)))
    order, times = np.random.default_rng(0), [[] for _ in ways]  # all ranks have the same order
    for _ in range(rounds):
        for way in order.permutation(len(ways)):
            times[way].append(_calls(comm, x, out, *ways[way], bursts[way]))
    found = _means(comm, times)
    plans = {codec: comm.plan("allreduce", count, codec=codec) for codec, name in ways if name == "auto"}
    return {
        "rounds": rounds,
        "seconds": {" ".join(each): seconds for each, seconds in zip(ways, found, strict=True)},
        "chosen": {codec: f"{plan.codec} {plan.spec.algorithm}" for codec, plan in plans.items()},  # type: ignore[attr-defined]
    }


def _calls(comm: qccl.Communicator, x: np.ndarray, out: np.ndarray, codec: str, algorithm: str, burst: int) -> float:
    """The mean time of ``burst`` calls in a row; several calls follow an untimed one."""
    comm.allgather(b"")  # brings the ranks in step, which leave a call at different times
    begin = time.perf_counter()
    for number in range(burst + (burst > 1)):
        if number == 1 and burst > 1:
            begin = time.perf_counter()
        comm.quantized_allreduce(x, out, op="avg", codec=codec, algorithm=algorithm)
    return (time.perf_counter() - begin) / burst


def _means(comm: qccl.Communicator, times: list[list[float]]) -> list[float]:
    """For each way, the median over the rounds of the ranks' mean: one rank waits longer where another waits less."""
    ranks = [json.loads(each) for each in comm.allgather(json.dumps(times).encode())]
    return [float(np.median(np.mean(each, axis=0))) for each in zip(*ranks, strict=True)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
