"""The figures of the host engine: ``python bench/host.py`` (as root, on a machine that does nothing else; minutes).

Sections: "lab" behind slow links, beside a plain transfer of the same bytes by the same transport and MPI's own
all-reduce; "shared" in shared memory beside MPI's; "overlap" of an asynchronous call with a caller who sleeps or
computes. Sides take turns within one run, in blocks of back-to-back calls; a figure is the median of the blocks' means.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import numpy as np
from runs import MARK, machine, print_table, run_ranks, run_undisturbed, save

import qccl
from qccl.bench.lab import Lab, shaped_nbytes
from qccl.bench.sizes import format_size, parse_link, parse_size

__all__ = ["cpu_seconds", "plain", "run_plan", "turns"]

_TAG = 20_000


@click.command()
@click.option("--sections", default="lab,shared,overlap", show_default=True)
@click.option("--links", default="100mbit,1gbit,5gbit,10gbit", show_default=True)
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--codecs", default="minmax8,minmax4", show_default=True)
@click.option("--sizes", default="4K,64K,1M,16M", show_default=True, help="In shared memory.")
@click.option("--calls", default=20, show_default=True, help="Of each side, at least.")
@click.option("--algorithm", default="auto", show_default=True)
@click.option("--chunk", type=int, help="Elements.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--save", is_flag=True, help="Write docs/results/host-<date>.json, or renew in it what was measured.")
def main(**given: Any) -> None:
    """Measure and print tables."""
    document: dict[str, Any] = {"machine": machine(), "lab": [], "shared": [], "overlap": []}
    until = time.monotonic() + given["patience"]
    ranks = [int(n) for n in given["ranks"].split(",")]
    shared = {key: given[key] for key in ("algorithm", "chunk", "calls")}
    for section in given["sections"].split(","):
        rows = document[section]
        tasks = {
            "lab": lambda: _lab_tasks(given["links"].split(","), given["codecs"].split(",")),
            "shared": lambda: _shared_tasks(given["sizes"].split(","), given["codecs"].split(",")),
            "overlap": _overlap_tasks,
        }[section]()
        for task in tasks:
            for n in ranks:
                rows.append(run_undisturbed(partial(_run, n, task | shared), until))
        _print(section, rows)
    document["machine"]["load after"] = os.getloadavg()
    if given["save"]:
        save(document)


def _lab_tasks(links: list[str], codecs: list[str]) -> Iterator[dict[str, Any]]:
    for link in links:
        for codec in codecs:
            yield {"measure": "lab", "link": link, "codec": codec, "count": 4 << 20}


def _shared_tasks(sizes: list[str], codecs: list[str]) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for codec in codecs:
            yield {"measure": "shared", "link": None, "codec": codec, "count": parse_size(size) // 4}


def _overlap_tasks() -> Iterator[dict[str, Any]]:
    yield {"measure": "overlap", "link": "1gbit", "codec": "minmax8", "count": 4 << 20}


def _run(ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    return run_ranks(__file__, ranks, task, Lab(ranks, parse_link(task["link"])) if task["link"] else None)


def _print(section: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{section}")
    match section:
        case "lab":
            print_table(
                ("link", "ranks", "codec", "ms", "plain transfer", "of it", "floor", "of the line", "MPI ms", "gain",
                 "crossed", "CPU ms per rank", "others"),
                [
                    (r["link"], r["ranks"], r["codec"], f"{r['qccl'] * 1e3:.2f}", f"{r['bulk'] * 1e3:.2f}",
                     f"{r['bulk'] / r['qccl']:.1%}", f"{r['floor'] * 1e3:.2f}", f"{r['floor'] / r['qccl']:.1%}",
                     f"{r['mpi'] * 1e3:.1f}", f"{r['mpi'] / r['qccl']:.2f}", f"{r['crossed']:.3f}",
                     f"{r['cpu'] * 1e3:.1f}", f"{r['others']:.0%}")
                    for r in rows
                ],
            )  # fmt: skip
        case "shared":
            print_table(
                ("ranks", "size", "codec", "us", "MPI us", "ratio", "others"),
                [
                    (r["ranks"], format_size(4 * r["count"]), r["codec"], f"{r['qccl'] * 1e6:.1f}",
                     f"{r['mpi'] * 1e6:.1f}", f"{r['qccl'] / r['mpi']:.2f}", f"{r['others']:.0%}")
                    for r in rows
                ],
            )  # fmt: skip
        case "overlap":
            print_table(
                ("link", "ranks", "call ms", "call's CPU ms", "beside", "alone ms", "both ms", "of the larger",
                 "others"),
                [
                    (r["link"], r["ranks"], f"{r['qccl'] * 1e3:.1f}", f"{r['cpu'] * 1e3:.1f}", name,
                     f"{side['alone'] * 1e3:.1f}", f"{side['both'] * 1e3:.1f}",
                     f"{side['both'] / side['least']:.3f}", f"{r['others']:.0%}")
                    for r in rows
                    for name, side in r["beside"].items()
                ],
            )  # fmt: skip


# -- one rank --------------------------------------------------------------------------------------------------------


def rank(task: dict[str, Any]) -> None:
    """What each rank does; rank 0 prints what was found."""
    measure = {"lab": _measure_lab, "shared": _measure_shared, "overlap": _measure_overlap}[task["measure"]]
    with qccl.init(backend="host", timeout=120) as comm:
        x = np.random.default_rng(comm.rank).standard_normal(task["count"]).astype(np.float32)
        y = np.empty_like(x)
        plan = comm.plan(
            "allreduce", len(x), codec=task["codec"], algorithm=task["algorithm"], chunk=task["chunk"]
        ).bind(x, y)
        found = measure(comm, plan, x, y, task)
        if comm.rank == 0:
            print(MARK + json.dumps({"ranks": comm.size} | found), flush=True)


def run_plan(plan: qccl.Plan) -> Callable[[], object]:
    """A call of the plan, to be timed."""
    return lambda: plan.start().wait()


def plain(comm: qccl.Communicator, x: Any, y: Any) -> Callable[[], object]:
    """A call of the library's own all-reduce, to be timed."""
    source, target, allreduce = x.ctypes.data, y.ctypes.data, comm.transport.allreduce
    return lambda: allreduce(source, target, len(x), "float32", "sum")


def _bulk(comm: qccl.Communicator, nbytes: int) -> Callable[[], object]:
    """A plain transfer of ``nbytes`` to each rank and from each, by a transport like the one that qccl uses."""
    t = comm.transport.split(0, comm.rank, 60)  # of its own: the engine polls the other
    out, inbox = np.ones(nbytes, np.uint8), np.zeros((t.size, nbytes), np.uint8)
    sent = t.buffer(out.ctypes.data, nbytes)
    got = [t.buffer(inbox[p].ctypes.data, nbytes) for p in range(t.size)]
    peers = [(t.rank + i) % t.size for i in range(1, t.size)]

    def transfer() -> None:
        for p in peers:
            t.receive(p, _TAG, got[p], p)
        for p in peers:
            t.send(p, _TAG, sent, p)
        left, idle = 2 * len(peers), 0
        while left:
            completed = len(t.poll(idle=idle))
            left -= completed
            idle = 0 if completed else idle + 1

    transfer.memory = out, inbox
    return transfer


def _seconds(comm: qccl.Communicator, call: Callable[[], object], calls: int) -> float:
    """Per call, of back-to-back calls after one that is not timed; the slowest rank's."""
    comm.barrier()
    call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    mine = (time.perf_counter() - begin) / calls
    return max(float(item) for item in comm.allgather(repr(mine).encode()))


def turns(comm: qccl.Communicator, sides: dict[str, tuple[Callable[[], object], int]], blocks: int) -> dict[str, float]:
    """The sides (a call, and the calls in a block) in turn; the medians of their blocks."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        for name, (call, calls) in sides.items():
            times[name].append(_seconds(comm, call, calls))
    return {name: statistics.median(each) for name, each in times.items()}


def cpu_seconds(comm: qccl.Communicator, call: Callable[[], object], calls: int) -> float:
    """The processor's seconds of a call, the mean of the ranks."""
    comm.barrier()
    begin = time.process_time()
    for _ in range(calls):
        call()
    mine = (time.process_time() - begin) / calls
    return statistics.fmean(float(item) for item in comm.allgather(repr(mine).encode()))


def _measure_lab(comm: qccl.Communicator, plan: qccl.Plan, x: Any, y: Any, task: dict[str, Any]) -> dict[str, Any]:
    sent = plan.schedule(in_place=False).sent_nbytes()
    most = max(int(item) for item in comm.allgather(str(sent).encode()))
    run, bulk = run_plan(plan), _bulk(comm, most // (comm.size - 1))
    before, counted = shaped_nbytes(), 5
    for _ in range(counted):
        run()
    comm.barrier()
    crossed = (shaped_nbytes() - before) / (sent * counted)
    blocks = 5
    floor = most / parse_link(task["link"]).rate
    each = max(4, -(-task["calls"] // blocks), min(40, round(0.2 / floor)))  # TCP starts slowly after a pause
    found = turns(comm, {"qccl": (run, each), "bulk": (bulk, each), "mpi": (plain(comm, x, y), 4)}, blocks)
    return found | {
        "floor": floor,
        "crossed": crossed,
        "cpu": cpu_seconds(comm, run, 5),
    }


def _measure_shared(comm: qccl.Communicator, plan: qccl.Plan, x: Any, y: Any, task: dict[str, Any]) -> dict[str, Any]:
    each = max(10, min(500, (16 << 20) // x.nbytes))
    sides = {"qccl": (run_plan(plan), each), "mpi": (plain(comm, x, y), each)}
    return turns(comm, sides, 15)


# -- overlap ---------------------------------------------------------------------------------------------------------


def _measure_overlap(comm: qccl.Communicator, plan: qccl.Plan, x: Any, y: Any, task: dict[str, Any]) -> dict[str, Any]:
    def call() -> None:
        comm.quantized_allreduce(x, out=y, codec=task["codec"])

    def beside(other: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            work = comm.quantized_allreduce(x, out=y, codec=task["codec"], async_op=True)
            other()
            work.wait()

        return both

    blocks, each = 5, max(4, -(-task["calls"] // 5))
    alone = turns(comm, {"call": (call, each)}, blocks)["call"]
    cpu = cpu_seconds(comm, call, each)
    cores = min(len(os.sched_getaffinity(0)), comm.size)
    sides = {}
    for name, other in {
        "sleep": lambda: time.sleep(alone),
        "NumPy": _busy(alone, _in_numpy()),
        "Python": _busy(alone, _in_python),
    }.items():
        times = turns(comm, {"other": (other, each), "both": (beside(other), each)}, blocks)
        shared = 0.0 if name == "sleep" else (cpu + cpu_seconds(comm, other, each)) * comm.size / cores
        sides[name] = {
            "alone": times["other"],
            "both": times["both"],
            "least": max(alone, times["other"], shared),
        }
    return {"qccl": alone, "cpu": cpu, "beside": sides}


def _in_numpy() -> Callable[[], object]:
    a = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    b = np.empty_like(a)
    return lambda: np.sin(a, out=b)


def _in_python() -> int:
    return sum(i * i for i in range(1000))


def _busy(seconds: float, work: Callable[[], object]) -> Callable[[], object]:
    """As much of ``work`` as takes ``seconds`` of the processor."""
    begin, n = time.process_time(), 0
    while time.process_time() - begin < 0.2:
        work()
        n += 1
    rounds = max(1, round(n * seconds / 0.2))

    def compute() -> None:
        for _ in range(rounds):
            work()

    return compute


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]))
    else:
        main()
