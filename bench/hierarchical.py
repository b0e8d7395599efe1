"""All-reduce in two levels, 2 nodes of 2 ranks: ``python bench/hierarchical.py`` (as root, on an idle machine).

With one link per node: the share of the line, and MPI's own all-reduce beside it. With one per rank: what it gains that
each rank has its own (sharded), and not only the leaders use theirs. All sides take turns within one run, in blocks of
back-to-back calls; a figure is the median of the blocks' means.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import numpy as np
from host import cpu_seconds, plain, run_plan, turns
from runs import MARK, machine, print_table, run_ranks, run_undisturbed, save

import qccl
from qccl.bench.lab import Lab, shaped_nbytes
from qccl.bench.sizes import parse_link, parse_size
from qccl.schedule import Exchange, Schedule
from qccl.signatures import LAYOUTS

_RANKS, _NODES = 4, 2


@click.command()
@click.option("--links", default="1gbit", show_default=True, help="One per node.")
@click.option("--rank-links", default="500mbit,1gbit", show_default=True, help="One per rank.")
@click.option("--size", default="16M", show_default=True)
@click.option("--codec", default="minmax8", show_default=True)
@click.option("--chunk", type=int, help="Elements.")
@click.option("--blocks", default=7, show_default=True, help="Of 10 calls of each side.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--save", "keep", is_flag=True, help="Write docs/results/host-<date>.json, or renew these rows in it.")
def main(**given: Any) -> None:
    """Measure and print a table."""
    document: dict[str, Any] = {"machine": machine(), "hierarchical": []}
    until = time.monotonic() + given["patience"]
    places = [(link, False) for link in given["links"].split(",") if link]
    places += [(link, True) for link in given["rank_links"].split(",") if link]
    for link, per_rank in places:
        task = {
            **{"link": link, "link_per_rank": per_rank, "nodes": _NODES, "count": parse_size(given["size"]) // 4},
            **{key: given[key] for key in ("codec", "chunk", "blocks")},
        }
        document["hierarchical"].append(run_undisturbed(partial(_run, task), until))
    _print(document["hierarchical"])
    document["machine"]["load after"] = os.getloadavg()
    if given["keep"]:
        save(document)


def _run(task: dict[str, Any]) -> dict[str, Any]:
    lab = Lab(_RANKS, parse_link(task["link"]), _NODES, link_per_rank=task["link_per_rank"])
    return run_ranks(__file__, _RANKS, task, lab)


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("link", "of each", "layout", "", "ms", "floor", "of the line", "MPI ms", "gain", "leader / this", "crossed",
         "CPU ms per rank", "others"),
        [
            (r["link"], "rank" if r["link_per_rank"] else "node", layout, mode, f"{side['time'] * 1e3:.2f}",
             f"{side['floor'] * 1e3:.2f}", f"{side['floor'] / side['time']:.1%}", f"{r['mpi'] * 1e3:.1f}",
             f"{r['mpi'] / side['time']:.2f}", f"{r['sides']['leader'][mode]['time'] / side['time']:.2f}",
             f"{side['crossed']:.3f}", f"{side['cpu'] * 1e3:.1f}", f"{r['others']:.0%}")
            for r in rows
            for layout, modes in r["sides"].items()
            for mode, side in modes.items()
        ],
    )  # fmt: skip


def rank(task: dict[str, Any]) -> None:
    """What each rank does; rank 0 prints what was found."""
    with qccl.init(backend="host", timeout=120) as comm:
        x = np.random.default_rng(comm.rank).standard_normal(task["count"]).astype(np.float32)
        y = np.empty_like(x)
        nodes = [r % task["nodes"] for r in range(comm.size)]  # as in the lab; with a link each all seem to be alone
        calls: dict[tuple[str, str], tuple[Callable[[], object], int]] = {}
        for layout in LAYOUTS:
            plan = comm.plan(
                "hierarchical_allreduce",
                len(x),
                codec=task["codec"],
                op="avg",  # which stays finite in place
                chunk=task["chunk"],
                layout=layout,
                node_ids=nodes,
            )
            for mode, source in (("out of place", x), ("in place", y)):
                sent = _sent_between(plan.schedule(in_place=source is y), nodes)
                calls[layout, mode] = run_plan(plan.bind(source, y)), sent
        sides = {f"{layout} {mode}": (call, 10) for (layout, mode), (call, _) in calls.items()}
        times = turns(comm, {"mpi": (plain(comm, x, y), 4)} | sides, task["blocks"])
        found: dict[str, dict[str, Any]] = {layout: {} for layout in LAYOUTS}
        for (layout, mode), (call, sent) in calls.items():
            costs = _costs(comm, call, sent, parse_link(task["link"]).rate)
            found[layout][mode] = {"time": times[f"{layout} {mode}"]} | costs
        if comm.rank == 0:
            print(MARK + json.dumps({"ranks": comm.size, "mpi": times["mpi"], "sides": found}), flush=True)


def _sent_between(schedule: Schedule, nodes: Sequence[int]) -> int:
    """The bytes that the rank sends to other nodes."""
    legs = (leg for op in schedule.ops if isinstance(op, Exchange) for leg in op.sends)
    return sum(len(leg.span) for leg in legs if nodes[leg.peer] != nodes[schedule.rank])


def _costs(comm: qccl.Communicator, call: Callable[[], object], sent: int, rate: float) -> dict[str, float]:
    """The least time that the busiest link needs, what passes the limiters per byte sent, the processor's time."""
    counted = 5
    before = shaped_nbytes()
    comm.barrier()
    for _ in range(counted):
        call()
    comm.barrier()
    mine = os.stat("/proc/self/ns/net").st_ino, sent, shaped_nbytes() - before
    gathered = [json.loads(item) for item in comm.allgather(json.dumps(mine).encode())]
    of_link: dict[int, int] = {}
    for network, nbytes, _ in gathered:
        of_link[network] = of_link.get(network, 0) + nbytes
    passed = sum({network: crossed for network, _, crossed in gathered}.values())
    return {
        "floor": max(of_link.values()) / rate,
        "crossed": passed / (counted * sum(of_link.values())),
        "cpu": cpu_seconds(comm, call, 5),
    }


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]))
    else:
        main()
