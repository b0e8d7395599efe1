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
#: the calls of one size are repeated, in turns: seconds in all, and the fewest and the most rounds
_SECONDS, _FEWEST, _MOST = 1.2, 3, 101
#: short calls are timed in bursts: the calls of a burst, and the most seconds of a call that counts as short
_BURST, _SHORT = 5, 0.1
#: seconds of a call beyond which neither it nor larger sizes are timed
_TOO_LONG = 2.0
#: bytes from which on a way is timed no more if it takes more than this many times as long as the fastest
_LARGE, _HOPELESS = 1 << 22, 2.5


def main(task: dict[str, Any]) -> None:
    """Rank 0 prints a row for each size."""
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
            # a way that takes too long with this size takes longer with the next, which is four times as large
            slowest = _TOO_LONG / 4 if size < _LARGE else min(_TOO_LONG / 4, _HOPELESS * min(seconds.values()))
            ways = [each for each in ways if seconds[each] < slowest]
            if any((codec, "auto") not in ways for codec in task["autos"]):
                break
        if comm.rank == 0:
            report(rows)


def _timed(comm: qccl.Communicator, count: int, ways: list[tuple[str, str]]) -> dict[str, Any]:
    """The median time of each, and what "auto" has chosen."""
    x = np.random.default_rng(comm.rank).standard_normal(count, np.float32)
    out = np.empty_like(x)
    for _ in range(2):  # the first ones prepare the calls
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
    """The mean time of ``burst`` calls in a row, after one that is not timed if there are several."""
    comm.allgather(b"")  # ranks that left the calls before at different times would wait for each other
    begin = time.perf_counter()
    for number in range(burst + (burst > 1)):
        if number == 1 and burst > 1:
            begin = time.perf_counter()
        comm.quantized_allreduce(x, out, op="avg", codec=codec, algorithm=algorithm)
    return (time.perf_counter() - begin) / burst


def _means(comm: qccl.Communicator, times: list[list[float]]) -> list[float]:
    """For each way, the median of the rounds of the mean of the ranks; one waits longer by what another waits less."""
    ranks = [json.loads(each) for each in comm.allgather(json.dumps(times).encode())]
    return [float(np.median(np.mean(each, axis=0))) for each in zip(*ranks, strict=True)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
