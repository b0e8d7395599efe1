"""Measures all-reduce in two levels, on 2 nodes of 2 ranks: ``python bench/hierarchical.py``.

Needs root and an idle machine. With one link per node it shows the share of the link's rate, compared with MPI's own
all-reduce; with one link per rank, what the layout "sharded" gains, which uses the links of all ranks and not only the
leaders'. The calls are those that programs make, in and out of place. The side "by default" is one call of many
arrays, with no word about nodes; with one link per rank it takes each rank for a node. The side "compress" is a
backward pass of a DistributedDataParallel model with as many gradients, which compress() reduces, also without a word
about nodes. The side "its backward" is the same pass without communication: autograd's copy of the gradients to DDP's
buckets, and the calls of its hook. All calls, and plain transfers of the same bytes, take turns within
one run, in blocks of back-to-back calls; a figure is the median of the blocks' means.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import numpy as np
from host import cpu_seconds, medians, plain, spread, turns
from runs import machine, print_table, report, run_ranks, run_undisturbed, save, start_script

import qccl
from qccl.bench.bulk import Bulk
from qccl.bench.calls import Wiring
from qccl.bench.lab import Lab, shaped_nbytes
from qccl.bench.params import parse_link, parse_size
from qccl.collectives.hierarchical import LAYOUTS

_RANKS, _NODES = 4, 2
#: arrays of the call by default, as the parameters of one bucket
_ARRAYS = 16
#: the key of MPI's all-reduce in the results, by mode
_MPI = {"out of place": "mpi", "in place": "mpi in place"}
_DEFAULT = {"out of place": "by default", "in place": "by default in place"}
_COMPRESS = ("compress", "its backward")


@click.command()
@click.option("--links", default="1gbit", show_default=True, help="Rates, with one link per node.")
@click.option("--rank-links", default="500mbit,1gbit", show_default=True, help="Rates, with one link per rank.")
@click.option("--size", default="16M", show_default=True)
@click.option("--codec", default="minmax8", show_default=True)
@click.option("--transport", default="mpi", show_default=True)
@click.option("--chunk", type=int, help="Elements.")
@click.option("--blocks", default=7, show_default=True, help="Blocks, of 10 calls of each side.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--save", "keep", is_flag=True, help="Write docs/results/host-<date>.json, or replace these rows in it.")
def main(**given: Any) -> None:
    """Measure and print a table."""
    document: dict[str, Any] = {"machine": machine(), "hierarchical": []}
    until = time.monotonic() + given["patience"]
    places = [(link, False) for link in given["links"].split(",") if link]
    places += [(link, True) for link in given["rank_links"].split(",") if link]
    for link, per_rank in places:
        task = {
            **{"link": link, "link_per_rank": per_rank, "nodes": _NODES, "count": parse_size(given["size"]) // 4},
            **{key: given[key] for key in ("transport", "codec", "chunk", "blocks")},
        }
        document["hierarchical"] += run_undisturbed(partial(_run, task), until)
    _print(document["hierarchical"])
    document["machine"]["load after"] = os.getloadavg()
    if given["keep"]:
        save(document)


def _run(task: dict[str, Any]) -> list[dict[str, Any]]:
    lab = Lab(_RANKS, parse_link(task["link"]), _NODES, link_per_rank=task["link_per_rank"])
    return run_ranks(__file__, _RANKS, task, task["transport"], lab)


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("link", "of each", "layout", "", "ms", "floor", "of the line", "of a plain transfer", "MPI ms", "gain",
         "leader / this", "by default ms", "compress ms", "its backward ms", "spread", "crossed", "CPU ms per rank",
         "others"),
        [
            (r["link"], "rank" if r["link_per_rank"] else "node", layout, mode, f"{side['time'] * 1e3:.2f}",
             f"{side['floor'] * 1e3:.2f}", f"{side['floor'] / side['time']:.1%}",
             f"{side['bulk'] / side['time']:.1%}", f"{r[_MPI[mode]] * 1e3:.1f}",
             f"{r[_MPI[mode]] / side['time']:.2f}", f"{r['sides']['leader'][mode]['time'] / side['time']:.2f}",
             f"{r[_DEFAULT[mode]] * 1e3:.2f}", *(f"{r[name] * 1e3:.2f}" for name in _COMPRESS),
             f"{spread(r['blocks']):.0%}", f"{side['crossed']:.3f}",
             f"{side['cpu'] * 1e3:.1f}", f"{r['others']:.0%}")
            for r in rows
            for layout, modes in r["sides"].items()
            for mode, side in modes.items()
        ],
    )  # fmt: skip


def rank(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 prints the results."""
    with qccl.init(backend="host", timeout=120) as comm:
        x = np.random.default_rng(comm.rank).standard_normal(task["count"]).astype(np.float32)
        y = np.empty_like(x)
        nodes = [
            r % task["nodes"] for r in range(comm.size)
        ]  # as in the lab; with a link per rank MPI sees one rank per node
        wiring = Wiring(tuple(nodes), tuple(range(comm.size) if task["link_per_rank"] else nodes))
        bulk = Bulk(comm, wiring)
        z, sides = y.copy(), {"mpi": (plain(comm, x, y), 4)}
        sides["mpi in place"] = plain(comm, z, z), 4
        xs, ys = (np.array_split(whole, _ARRAYS) for whole in (x, y))
        given: dict[str, Any] = {"codec": task["codec"], "chunk": task["chunk"]}
        given["op"] = "avg"  # stays finite in place
        for mode, sources, targets in (("out of place", xs, ys), ("in place", ys, None)):
            sides[_DEFAULT[mode]] = partial(comm.quantized_allreduce_coalesced, sources, targets, **given), 10
        sides |= zip(_COMPRESS, ((step, 10) for step in _backward_passes(comm, xs, task["codec"])), strict=True)
        calls: dict[tuple[str, str], tuple[Callable[[], object], int]] = {}
        for layout in LAYOUTS:
            given |= {"layout": layout, "node_ids": nodes}
            plan = comm.plan("hierarchical_allreduce", len(x), **given)
            for mode, source, target in (("out of place", x, y), ("in place", y, None)):
                call = partial(comm.hierarchical_allreduce, source, target, **given)
                sent = wiring.crossing(plan.schedule(in_place=target is None))
                calls[layout, mode] = call, sent
                most = max(wiring.by_link([int(item) for item in comm.allgather(str(sent).encode())]))
                sides[f"{layout} {mode}"] = call, 10
                sides[f"{layout} {mode} bulk"] = bulk.bind(most), 10
        times = medians(turns(comm, sides, task["blocks"]))
        found: dict[str, dict[str, Any]] = {layout: {} for layout in LAYOUTS}
        for (layout, mode), (call, sent) in calls.items():
            side = f"{layout} {mode}"
            costs = _costs(comm, call, sent, parse_link(task["link"]).rate)
            found[layout][mode] = {"time": times[side], "bulk": times[f"{side} bulk"]} | costs
        if comm.rank == 0:
            kept = {key: times[key] for key in (*_MPI.values(), *_DEFAULT.values(), *_COMPRESS, "blocks")}
            report([{"ranks": comm.size, "sides": found} | kept])


def _backward_passes(
    comm: qccl.Communicator, gradients: list[np.ndarray], codec: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Backward passes of two models with these gradients: one that compress() reduces, one that sends nothing."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import qccl.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    found = [torch.from_numpy(each.copy()).reshape(2, -1) for each in gradients]

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return gradient, *found

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros_like(each) for each in found)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Given.apply(x, *self.weights)

    def unsent(bucket: Any) -> Any:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    models = [DistributedDataParallel(Model(), bucket_cap_mb=4, gradient_as_bucket_view=True) for _ in range(2)]
    own = comm.split(0)
    assert own is not None
    qccl.torch.compress(models[0], codec, comm=own)
    models[1].register_comm_hook(None, lambda state, bucket: unsent(bucket))

    def step(model: Any) -> None:
        model.zero_grad()
        model(torch.zeros(1, requires_grad=True)).backward()

    for model in models:
        for _ in range(2):  # DDP rebuilds its buckets after the first
            step(model)
    return partial(step, models[0]), partial(step, models[1])


def _costs(comm: qccl.Communicator, call: Callable[[], object], sent: int, rate: float) -> dict[str, float]:
    """The time that the busiest link needs at least, the bytes through the limiters per byte sent, and the CPU time."""
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
    start_script(main, rank)
