"""One rank of bench/peers.py, which starts this script: ``python bench/peer_rank.py TASK``.

It runs in the environment of another system, without qccl. Each rank writes what it found to ``rank-N.json`` in the
task's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from peer_systems import SYSTEMS, AllReduce

#: timed blocks of calls
_BLOCKS = 3
#: calls in place between two resets of the values, whose sums would overflow otherwise
_SUMS = 20
#: calls before the timing, besides the one whose result is checked
_WARM_UP = 1
#: calls before a rank is killed, and the most calls from then on
_BEFORE_END, _AFTER_END = 3, 3
#: a result is wrong if its error exceeds the first times the earlier calls' error, plus the second for rounding
_WORSE, _LEAST_ERROR = 2.0, 1e-5


def main(task: dict[str, Any]) -> None:
    """Run the task; an error becomes the result."""
    rank, ranks = _place()
    folder = Path(task["folder"])
    try:
        system = SYSTEMS[task["system"]](rank, ranks, folder)
        if task.get("ends"):
            found: Any = _with_an_end(system, rank, ranks, task)
        else:
            found = [_measured(system, rank, ranks, **case) for case in task["cases"]]
    except BaseException as error:  # any error of another system is a result
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    part = folder / f"part-{rank}.json"
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(folder / f"rank-{rank}.json")


def _place() -> tuple[int, int]:
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def values(rank: int, count: int) -> Any:
    """The values of a rank, standard normal and reproducible."""
    return np.random.default_rng([rank, count]).standard_normal(count, dtype=np.float32)


def _measured(system: AllReduce, rank: int, ranks: int, count: int, calls: int) -> dict[str, Any]:
    """Measure the error of a call, and the time and the bytes of a call in blocks of ``calls`` calls."""
    own = values(rank, count)
    x = own.copy()
    _call(system, x)
    exact = sum(values(each, count).astype(np.float64) for each in range(ranks))
    found = {"count": count, **errors(x, exact), "digest": hashlib.sha256(x.tobytes()).hexdigest()}
    for _ in range(_WARM_UP):
        _call(system, x)
    times, nbytes = [], []
    for _ in range(_BLOCKS):
        x[:] = own
        _call(system, x)  # brings the ranks in step
        sent, seconds = _sent_nbytes(), 0.0
        for number in range(calls):
            if number % _SUMS == 0:
                x[:] = own
            seconds += _call(system, x)
        times.append(seconds / calls)
        nbytes.append((_sent_nbytes() - sent) / calls)
    return found | {"seconds": times, "nbytes": nbytes}


def _call(system: AllReduce, x: Any) -> float:
    """Make a call, and return the seconds that it took."""
    if system.prepare is not None:
        system.prepare(x)
    begin = time.perf_counter()
    system.run(x)
    return time.perf_counter() - begin


def errors(x: Any, exact: Any) -> dict[str, float]:
    """The relative L2 error; and the bias: by how much the result is longer than the exact one (negative: shorter)."""
    square = float(exact @ exact)
    return {
        "error": float(np.linalg.norm(x - exact)) / square**0.5,
        "bias": float(x.astype(np.float64) @ exact) / square - 1,
    }


def _sent_nbytes() -> int:
    """The bytes that this rank's network namespace has sent to others."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(each[8]) for name, each in fields.items() if name != "lo")


def _with_an_end(system: AllReduce, rank: int, ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    """Kill the last rank in the middle of a call; the result says how the calls of the others end."""
    own = values(rank, task["count"])
    exact = sum(values(each, task["count"]).astype(np.float64) for each in range(ranks))
    seconds = error = 0.0
    for _ in range(_BEFORE_END):
        x = own.copy()
        seconds = _call(system, x)
        error = max(error, errors(x, exact)["error"])
    if rank == ranks - 1:
        threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.perf_counter()
    for number in range(_AFTER_END):
        x = own.copy()
        try:
            _call(system, x)
        except Exception as raised:
            text = f"{type(raised).__name__}: {raised}".splitlines()[0]
            return {"seconds": time.perf_counter() - begin, "raised": text, "call": number}
        if not errors(x, exact)["error"] <= _WORSE * error + _LEAST_ERROR:
            return {"seconds": time.perf_counter() - begin, "wrong": True, "call": number}
        if rank == ranks - 1:
            time.sleep(seconds)  # until the signal
    return {"seconds": time.perf_counter() - begin, "returned": True}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
