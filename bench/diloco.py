"""DiLoCo behind slow links: ``python bench/diloco.py`` (about 90 minutes; needs root for the section "steps").

Four ranks train a model of docs/examples with its own optimiser, and take outer steps every H local steps. "plain"
stops for each outer step. "streaming" has two fragments, and applies an outer step ``--delay`` local steps after its
all-reduce began. Sections:

- "curves": the quality of the common parameters after ``--steps`` local steps, for several seeds, without a link: the
  results do not depend on it. Other programs may run meanwhile.
- "steps": the time of a local step behind each link, outer steps included, and of the same step without
  communication; the two take turns. Four ranks do not fit on two cores, so each rank sleeps instead of computing, as
  long as a step takes one rank alone on this machine. Only encoding and decoding share the cores. The machine must be
  idle.

``--write docs/results.md`` replaces that page's table of each section that ran.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from runs import document_table, machine, print_table, report, rewrite_table, run_ranks, start_script
from training_rank import EXAMPLES, POSITIONS, sent_nbytes_behind
from training_report import MODELS, computation, network_of
from without_ddp import local_recipe, outer_of, replayed_local_step

import qccl
from qccl.bench.params import split_codecs

_RANKS = 4
_SPARSE = "topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef"
_BLOCKS = 5
CURVES = ("H", "outer steps", "codec", "{}", "spread over seeds", "more than plain fp32")
STEPS = ("H", "outer steps", "codec", "link", "ms a step", "of it without communication", "spread", "kB a step")


@click.command()
@click.option("--model", default="word_gpt", type=click.Choice(list(MODELS)), show_default=True)
@click.option("--sections", default="curves,steps", show_default=True)
@click.option("--periods", default="15,30,100", show_default=True, help="Local steps between two outer steps (H).")
@click.option("--codecs", default=f"none,trellis2+ef,{_SPARSE}", show_default=True, help='"none" is fp32.')
@click.option("--links", default="100mbit,100mbit 25ms 0.1% bbr", show_default=True)
@click.option("--delay", default=3, show_default=True, help="Of streaming, in local steps.")
@click.option("--seeds", default=5, show_default=True)
@click.option("--steps", default=600, show_default=True, help="Local steps of a training.")
@click.option("--write", type=click.Path(exists=True, dir_okay=False), help="Replace the tables of this page.")
def main(**given: Any) -> None:
    """Measure, and print tables."""
    of, codecs = machine(), split_codecs(given["codecs"])
    periods = [int(each) for each in given["periods"].split(",")]
    ways = list(itertools.product(periods, ("plain", "streaming"), codecs))
    for section in given["sections"].split(","):
        rows = list({"curves": _curves, "steps": _steps}[section](given, ways))
        head = [name.format(MODELS[given["model"]][3]) for name in {"curves": CURVES, "steps": STEPS}[section]]
        print_table(head, rows)
        if given["write"]:
            command = f"python bench/diloco.py --sections {section}"
            rewrite_table(given["write"], command, document_table(head, rows, of))


def _curves(given: dict[str, Any], ways: list[tuple[int, str, str]]) -> Iterator[tuple[object, ...]]:
    """Train each way with each seed."""
    found: dict[tuple[int, str, str], list[float]] = {}
    for seed, way in itertools.product(range(given["seeds"]), ways):
        task = {"measure": "curve", "model": given["model"], "way": way, "delay": given["delay"], "seed": seed}
        (row,) = run_ranks(__file__, _RANKS, task | {"steps": given["steps"]}, "ucx", None, None)
        print(f"seed {seed}, {way}: {row['quality']:.4f}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        found.setdefault(way, []).append(row["quality"])
    for (period, kind, codec), each in found.items():
        base = found.get((period, "plain", "none"), [])
        more = [own - other for own, other in zip(each, base, strict=False)]
        spread = f"{statistics.stdev(each):.3f}" if len(each) > 1 else ""
        more_than_plain = f"{statistics.mean(more):+.3f}" if more else ""
        yield period, kind, f"`{codec}`", f"{statistics.mean(each):.3f}", spread, more_than_plain


def _steps(given: dict[str, Any], ways: list[tuple[int, str, str]]) -> Iterator[tuple[object, ...]]:
    """Time the steps of each way behind each link."""
    script = str(Path(__file__).with_name("training_rank.py"))
    (compute,) = run_ranks(script, 1, {"measure": "compute", "model": given["model"]}, "ucx", None, None)
    seconds = computation({"compute": compute})
    print(f"A step computes for {seconds * 1e3:.1f} ms.", flush=True)
    for link, way in itertools.product(given["links"].split(","), ways):
        network, (period, kind, codec) = network_of(link), way
        task = {"measure": "step", "way": way, "delay": given["delay"], "link": link, "compute": seconds}
        task["shapes"] = [shape for shape, _ in reversed(compute["ready"])]
        transport = "wan" if network.is_far else "ucx"
        (row,) = run_ranks(__file__, _RANKS, task, transport, network.lab(_RANKS), None)
        ratios = [own / other for own, other in zip(row["blocks"], row["alone"], strict=True)]
        print(f"{link}, {way}: {statistics.median(ratios):.3f}", file=sys.stderr, flush=True)
        cells = f"{statistics.median(row['blocks']) * 1e3:.1f}", f"{statistics.median(ratios):.1%}"
        spread = f"{max(ratios) - min(ratios):.1%}"
        yield period, kind, f"`{codec}`", link, *cells, spread, f"{row['nbytes'] / 1e3:.0f}"


def _as_rank(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 reports its results."""
    with qccl.init("host") as comm:
        found = {"curve": _train, "step": _time}[task["measure"]](task, comm)
        comm.barrier()
    if comm.rank == 0:
        report([found])


def _method(task: dict[str, Any]) -> str:
    period, kind, codec = task["way"]
    streaming = f",fragments=2,delay={task['delay']}" if kind == "streaming" else ""
    return f"diloco:period={period}{streaming}:{codec}"


def _train(task: dict[str, Any], comm: qccl.Communicator) -> dict[str, Any]:
    """Train, and return the quality of the common parameters."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    from loop import train

    torch.set_num_threads(1)
    torch.manual_seed(task["seed"])
    recipe, begin = importlib.import_module(task["model"]), time.monotonic()
    model = recipe.make_model()
    outer = outer_of(comm, list(model.parameters()), _method(task))
    train(model, local_recipe(recipe, outer), task["steps"], comm.rank, seed=task["seed"], measures=False)
    outer.step()
    text = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    assert len({*comm.allgather(hashlib.sha256(text).digest())}) == 1, "the ranks have different parameters"
    quality = recipe.quality(model, recipe.corpus()[1], POSITIONS) if comm.rank == 0 else 0.0
    return {"quality": quality, "seconds": time.monotonic() - begin}


def _time(task: dict[str, Any], comm: qccl.Communicator) -> dict[str, Any]:
    """Time local steps with and without outer steps, in turns, in blocks of a period; count the bytes sent."""
    period = task["way"][0]
    params = [np.zeros(shape, np.float32) for shape in task["shapes"]]
    outer = outer_of(comm, params, _method(task))
    step = replayed_local_step(outer, params, task["compute"], comm.rank)

    def block(with_outer_steps: bool) -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(period):
            step(with_outer_steps)
        mine = (time.perf_counter() - begin) / period
        return max(float(each) for each in comm.allgather(repr(mine).encode()))

    for _ in range(2):
        block(True)
    blocks, alone, sent = [], [], []
    for _ in range(_BLOCKS):
        alone.append(block(False))
        before = sent_nbytes_behind(task["link"])
        blocks.append(block(True))
        sent.append((sent_nbytes_behind(task["link"]) - before) / period)
    outer.finish()
    return {"blocks": blocks, "alone": alone, "nbytes": statistics.median(sent)}


if __name__ == "__main__":
    start_script(main, _as_rank)
