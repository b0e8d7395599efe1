"""Measures the host engine: ``python bench/host.py`` (takes minutes; needs root and an idle machine).

Sections: "lab" behind slow links, compared with MPI's own all-reduce and a plain transfer of the same bytes; "shared"
in shared memory, compared with MPI's; "overlap" of an asynchronous call with a caller that sleeps or computes. The
timed calls are those that programs make, out of place (a sum) and in place (the mean, which stays finite), and in
shared memory also a bound plan. The calls over all transports, and MPI's, take turns within one run of the same
processes, in blocks of back-to-back calls. A figure is the median of the blocks' means; the spread is the slowest block
less the fastest, divided by the median.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from runs import machine, report, run_ranks, run_undisturbed, save, start_script

import qccl
from qccl.bench.lab.lab import Lab, shaped_nbytes
from qccl.bench.params import parse_link, parse_size
from qccl.bench.sweep.plain import load_mpi, plain_allreduce

sys.path.append(str(Path(__file__).parent.parent / "docs"))
from results_tables import tables

Call = Callable[[], object]
#: a transport ("": MPI's own all-reduce) and a way to call
Side = tuple[str, str]


@click.command()
@click.option("--sections", default="lab,shared,overlap", show_default=True)
@click.option("--links", default="100mbit,1gbit,5gbit,10gbit", show_default=True)
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--transports", default="ucx,mpi", show_default=True)
@click.option("--codecs", default="minmax8,minmax4", show_default=True)
@click.option("--sizes", default="4K,64K,1M,16M", show_default=True, help="Sizes in shared memory.")
@click.option("--calls", default=20, show_default=True, help="Minimum number of calls of each side.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--save", is_flag=True, help="Write docs/results/host-<date>.json, or replace these rows in it.")
def main(**given: Any) -> None:
    """Measure and print tables."""
    document: dict[str, Any] = {"machine": machine(), "lab": [], "shared": [], "overlap": []}
    until = time.monotonic() + given["patience"]
    ranks = [int(n) for n in given["ranks"].split(",")]
    shared = {"calls": given["calls"], "transports": given["transports"].split(",")}
    for section in given["sections"].split(","):
        for task in _tasks(section, given):
            for n in ranks:
                document[section] += run_undisturbed(partial(_run, n, task | shared), until)
    document["machine"]["load after"] = os.getloadavg()
    print("\n".join(tables(document)))
    if given["save"]:
        save(document)


def _tasks(section: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    links, sizes, codecs = (given[name].split(",") for name in ("links", "sizes", "codecs"))
    cases = {
        "lab": itertools.product(links, ["16M"], codecs),
        "shared": itertools.product([None], sizes, codecs),
        "overlap": [("1gbit", "16M", "minmax8")],
    }
    for link, size, codec in cases[section]:
        yield {"measure": section, "link": link, "codec": codec, "count": parse_size(size) // 4}


def _run(ranks: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    lab = Lab(ranks, parse_link(task["link"])) if task["link"] else None
    return run_ranks(__file__, ranks, task, task["transports"][0], lab)


# -- one rank --------------------------------------------------------------------------------------------------------


def rank(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 prints the results."""
    measure = {"lab": _measure_lab, "shared": _measure_shared, "overlap": _measure_overlap}[task["measure"]]
    load_mpi()  # before UCX: a process cannot load a second UCX beside MPI's own
    with contextlib.ExitStack() as stack:
        comms: dict[str, qccl.Communicator] = {}
        for name in task["transports"]:
            comms[name] = stack.enter_context(qccl.init("host", 120, transport=name))
        number, size = comms[name].rank, comms[name].size
        x = np.random.default_rng(number).standard_normal(task["count"]).astype(np.float32)
        found = measure(comms, x, np.empty_like(x), task)
        if number == 0:
            rows = [{"ranks": size, "transport": name} | found[name] for name in comms]
            report(rows)


def _bound(comm: qccl.Communicator, x: Any, y: Any, task: dict[str, Any]) -> qccl.Plan:
    return comm.plan("allreduce", len(x), codec=task["codec"]).bind(x, y)


def _both_ways(comms: dict[str, qccl.Communicator], x: Any, y: Any, task: dict[str, Any]) -> dict[Side, Call]:
    """The calls that programs make, over each transport, and MPI's, out of place and in place."""
    z, first = x.copy(), next(iter(comms.values()))
    calls: dict[Side, Call] = {}
    for name, comm in comms.items():
        calls[name, "qccl"] = partial(comm.quantized_allreduce, x, y, codec=task["codec"])
        calls[name, "qccl in place"] = partial(comm.quantized_allreduce, z, op="avg", codec=task["codec"])
    return calls | {("", "mpi"): _plain(first, x, y), ("", "mpi in place"): _plain(first, z, z)}


def _by_transport(comms: dict[str, qccl.Communicator], times: dict[Side, list[float]]) -> dict[str, dict[str, Any]]:
    """For each transport, the medians and the blocks of its own calls and of MPI's."""
    sides = {name: {side: each for (of, side), each in times.items() if of in ("", name)} for name in comms}
    return {name: _medians(each) for name, each in sides.items()}


def _plain(comm: qccl.Communicator, x: Any, y: Any) -> Call:
    """A function that calls MPI's all-reduce."""
    allreduce = plain_allreduce(comm.transport, "mpi")
    return lambda: allreduce(x.ctypes.data, y.ctypes.data, len(x), "float32", "sum")


def _transfer(comm: qccl.Communicator, nbytes: int) -> Call:
    """A plain transfer in which each rank sends ``nbytes``, in equal parts to all others at once."""
    t: Any = comm.transport.split(0, comm.rank, comm.timeout)  # the engine polls comm.transport
    peers, each = [(t.rank + i) % t.size for i in range(1, t.size)], -(-nbytes // (t.size - 1))
    out, inbox = np.ones(each, np.uint8), np.empty((t.size, each), np.uint8)

    def transfer() -> None:
        for peer in peers:
            t.receive(peer, 20_000, inbox[peer].ctypes.data, each, peer)
        for peer in peers:
            t.send(peer, 20_000, out.ctypes.data, each, peer)
        left, idle = 2 * len(peers), 0
        while left:
            completed = len(t.poll(idle=idle))
            left, idle = left - completed, 0 if completed else idle + 1

    return transfer


def _seconds(comm: qccl.Communicator, call: Callable[[], object], calls: int) -> float:
    """Seconds per call on the slowest rank, of back-to-back calls after one warm-up call."""
    comm.barrier()
    call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    mine = (time.perf_counter() - begin) / calls
    return max(float(item) for item in comm.allgather(repr(mine).encode()))


def _turns(comm: qccl.Communicator, sides: dict[Any, tuple[Call, int]], blocks: int) -> dict[Any, list[float]]:
    """Time the sides (a call, and the number of calls in a block) in turns; returns the means of their blocks."""
    times: dict[Any, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        for name, (call, calls) in sides.items():
            times[name].append(_seconds(comm, call, calls))
    return times


def _medians(blocks: dict[str, list[float]]) -> dict[str, Any]:
    """The median of each side's blocks, and the blocks."""
    return {name: statistics.median(each) for name, each in blocks.items()} | {"blocks": blocks}


def _cpu_seconds(comm: qccl.Communicator, call: Callable[[], object], calls: int) -> float:
    """CPU seconds per call, the mean of the ranks."""
    comm.barrier()
    begin = time.process_time()
    for _ in range(calls):
        call()
    mine = (time.process_time() - begin) / calls
    return statistics.fmean(float(item) for item in comm.allgather(repr(mine).encode()))


def _measure_lab(
    comms: dict[str, qccl.Communicator], x: Any, y: Any, task: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    blocks, costs = 5, {}
    calls = _both_ways(comms, x, y, task)
    for name, comm in comms.items():
        sent = _bound(comm, x, y, task).schedule(in_place=False).sent_nbytes()
        most = max(int(item) for item in comm.allgather(str(sent).encode()))
        run = calls[name, "qccl"]
        calls[name, "bulk"] = _transfer(comm, most)
        before, counted = shaped_nbytes(), 5
        for _ in range(counted):
            run()
        comm.barrier()
        crossed = (shaped_nbytes() - before) / (sent * counted)
        floor = most / parse_link(task["link"]).rate
        costs[name] = {"floor": floor, "crossed": crossed, "cpu": _cpu_seconds(comm, run, 5)}
    each = max(4, -(-task["calls"] // blocks), min(40, round(0.2 / floor)))  # TCP is slow after a pause
    sides = {(of, side): (call, each if of else 4) for (of, side), call in calls.items()}
    found = _by_transport(comms, _turns(comm, sides, blocks))
    return {name: found[name] | costs[name] for name in comms}


def _measure_shared(
    comms: dict[str, qccl.Communicator], x: Any, y: Any, task: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    each = max(10, min(500, (16 << 20) // x.nbytes))
    calls = _both_ways(comms, x, y, task)
    for name, comm in comms.items():
        calls[name, "plan"] = _bound(comm, x, y, task).run
    return _by_transport(comms, _turns(comm, {side: (call, each) for side, call in calls.items()}, 15))


# -- overlap ---------------------------------------------------------------------------------------------------------


def _measure_overlap(
    comms: dict[str, qccl.Communicator], x: Any, y: Any, task: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    return {name: _overlap(comm, x, y, task) for name, comm in comms.items()}


def _overlap(comm: qccl.Communicator, x: Any, y: Any, task: dict[str, Any]) -> dict[str, Any]:
    def call() -> None:
        comm.quantized_allreduce(x, out=y, codec=task["codec"])

    def beside(other: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            work = comm.quantized_allreduce(x, out=y, codec=task["codec"], async_op=True)
            other()
            work.wait()

        return both

    blocks, each = 5, max(4, -(-task["calls"] // 5))
    alone = statistics.median(_turns(comm, {"call": (call, each)}, blocks)["call"])
    cpu = _cpu_seconds(comm, call, each)
    cores = min(len(os.sched_getaffinity(0)), comm.size)
    sides = {}
    for name, other in {
        "sleep": lambda: time.sleep(alone),
        "NumPy": _busy(alone, _in_numpy()),
        "Python": _busy(alone, _in_python),
    }.items():
        times = _medians(_turns(comm, {"other": (other, each), "both": (beside(other), each)}, blocks))
        shared = 0.0 if name == "sleep" else (cpu + _cpu_seconds(comm, other, each)) * comm.size / cores
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
    """Make a function that repeats ``work`` for about ``seconds`` of processor time."""
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
    start_script(main, rank)
