"""Times calls of a few elements, by their kind: ``python bench/small_calls.py``.

Two ranks on this machine repeat each kind of call. The table has the fastest and the median round of each kind, and the
median divided by that of all-reduce. Over MPI it also has mpi4py's ``Allreduce`` on the same ranks. ``--write
docs/architecture/small-calls.md`` replaces that page's table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
from runs import NOT_MEASURED, document_table, machine, print_table, report, rewrite_table, run_ranks, start_script

import qccl

COUNT = 64
_WARM, _CALLS, _ROUNDS = 100, 500, 15
_MANY, _MANY_COUNT = 200, 50_000
COLUMNS = ("call", "over MPI: fastest", "median", "of all-reduce", "over UCX: fastest", "median", "of all-reduce")


@click.command()
@click.option("--write", help="A page whose table is to be replaced.")
def main(write: str | None) -> None:
    """Measure over MPI and UCX, and print the table."""
    found = {name: run_ranks(__file__, 2, {}, name, None) for name in ("mpi", "ucx")}
    by_kind = {name: {row["kind"]: row["us"] for row in rows} for name, rows in found.items()}
    rows = [[kind, *(cell for name in found for cell in _cells(by_kind[name], kind))] for kind in by_kind["mpi"]]
    print_table(COLUMNS, rows)
    if write:
        rewrite_table(write, "python bench/small_calls.py", document_table(COLUMNS, rows, machine()))


def _cells(found: dict[str, list[float]], kind: str) -> list[str]:
    if kind not in found:
        return [NOT_MEASURED] * 3
    own, first = statistics.median(found[kind]), statistics.median(found["all-reduce"])
    ratio = "not compared" if kind.startswith(str(_MANY)) else f"{own / first:.2f}"
    return [f"{min(found[kind]):.1f} us", f"{own:.1f} us", ratio]


def calls(comm: qccl.Communicator) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """The kinds of call, with the number of calls in a round."""
    n = COUNT
    x, y, part = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n // comm.size, np.float32)
    sent, received = x.ctypes.data, y.ctypes.data
    yield "all-reduce", _CALLS, lambda: comm.quantized_allreduce(x)
    yield "reduce-scatter", _CALLS, lambda: comm.quantized_reduce_scatter(x, part)
    yield "all-gather", _CALLS, lambda: comm.quantized_all_gather(part, y)
    yield "pointers", _CALLS, lambda: qccl.quantized_allreduce(sent, received, n, "float32", "sum", comm)
    yield "minmax8+ef", _CALLS, lambda: comm.quantized_allreduce(x, codec="minmax8+ef", key="x")
    plan = comm.plan("allreduce", n).bind(x)
    yield "plan.run()", _CALLS, plan.run
    yield "plan.start().wait()", _CALLS, lambda: plan.start().wait()
    yield "async_op=True, wait()", _CALLS, lambda: comm.quantized_allreduce(x, async_op=True).wait()
    if comm.transport.name == "mpi":
        from mpi4py import MPI

        out = np.zeros_like(x)
        yield "mpi4py's Allreduce", _CALLS, lambda: MPI.COMM_WORLD.Allreduce(x, out)
    many = [np.zeros(_MANY_COUNT, np.float32) for _ in range(_MANY)]

    def in_sequence() -> None:
        for each in many:
            comm.quantized_allreduce(each)

    def at_once() -> None:
        for work in [comm.quantized_allreduce(each, async_op=True) for each in many]:
            work.wait()

    text = f"{_MANY} calls of {_MANY_COUNT:,} elements"
    yield f"{text}, one after the other", 1, in_sequence
    yield f"{text}, async_op=True", 1, at_once
    yield f"{text}, coalesced", 1, lambda: comm.quantized_allreduce_coalesced(many)


def measure(comm: qccl.Communicator) -> list[dict[str, Any]]:
    """Microseconds of a call in each round, by kind; the rounds of the kinds take turns."""
    every = list(calls(comm))
    times: dict[str, list[float]] = {kind: [] for kind, _, _ in every}
    for number in range(1 + _ROUNDS):
        for kind, repeats, call in every:
            for _ in range(_WARM if repeats > 1 else 1):
                call()
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            if number:
                times[kind].append((time.perf_counter() - begin) / repeats * 1e6)
    return [{"kind": kind, "us": found} for kind, found in times.items()]


def _as_rank(task: dict[str, Any]) -> None:
    with qccl.init("host") as comm:
        rows = measure(comm)
        if comm.rank == 0:
            report(rows)


if __name__ == "__main__":
    start_script(main, _as_rank)
