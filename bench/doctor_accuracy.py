"""Compares steps predicted by ``qccl-bench doctor`` with measured ones: ``python bench/doctor_accuracy.py`` (as root).

It trains the models of doctor_models.py for some steps on 2 and 4 ranks, with PyTorch's DistributedDataParallel, its
own hooks and qccl's codecs, each rank behind a link. The ranks compute, encode and decode on the processors of this
machine, which several ranks may share. The doctor predicts the same steps from the time of a step of one rank, measured
alone, and from the speeds of the codecs. It takes about ten minutes; with ``--resume`` it measures only what today's
file lacks.

``--save`` writes docs/results/doctor-<date>.json after each model, ``--write bench/README.md`` that page's table.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from runs import begun, measured_on, report, rewrite_table, run_ranks, start_script, store, table, todays

from qccl.bench.doctor.speed import CodecSpeed, measure_speed
from qccl.bench.doctor.steps import FP16, FP32, Step, cost_of
from qccl.bench.doctor.training import StepComputation, estimated
from qccl.bench.lab.lab import Lab
from qccl.bench.lab.namespaces import congestion_control
from qccl.bench.params import codec_of, parse_link

MODELS = "byte_model,word_gpt,conv_net"
METHODS = f"{FP32},{FP16},minmax8,minmax4+ef,minmax2:bucket=256+ef,trellis2+ef,onebit:reconstruct=mean+ef"
#: megabytes of DDP's buckets, and bytes
BUCKET_MB = 0.5
_BUCKET_NBYTES = int(BUCKET_MB * (1 << 20))
#: warm-up steps; the fewest and the most timed steps, and about how many seconds they take
_WARM, _LEAST, _MOST, _SECONDS = 4, 6, 60, 2.0
#: steps of one rank alone; the fastest counts
_ALONE = 40
#: TCP's congestion control: Linux's default. bbr loses some milliseconds a step on links without delay
TCP = "cubic"
#: elements of an encoding that is timed: as many as in the doctor
_TIMED = 4 << 20
COLUMNS = ("model", "ranks", "link", "median error", "largest error", "of", "fp32 ms", "predicted", "minmax4+ef ms")
COLUMNS += ("predicted",)


@click.command()
@click.option("--models", default=MODELS, show_default=True)
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--links", default="100mbit,1gbit", show_default=True)
@click.option("--methods", default=METHODS, show_default=True)
@click.option("--resume", is_flag=True, help="Keep the rows of today's file.")
@click.option("--save", is_flag=True, help="Write the results file.")
@click.option("--write", help="A page whose table is to be replaced: bench/README.md.")
def main(**given: Any) -> None:
    """Measure, predict, and print both."""
    path = todays("doctor")
    document = begun(path, resume=given["resume"])
    if (tcp := congestion_control()) != TCP:
        print(f"TCP's algorithm is {tcp}; the doctor assumes {TCP} (docs/howto/starting.md)", file=sys.stderr)
    for _ in _measured(document, given):
        if given["save"]:
            store(path, document)
    rows = list(predicted(document))
    for line in table(("model", "ranks", "link", "method", "ms", "predicted", "error"), map(_shown, rows)):
        print(line)
    text = "\n".join(table(COLUMNS, summary(rows))) + "\n\n" + measured_on(document["machine"])
    print(f"\n{text}")
    if given["write"]:
        rewrite_table(given["write"], "python bench/doctor_accuracy.py", text)


def _measured(document: dict[str, Any], given: dict[str, Any]) -> Iterator[None]:
    """Add to the document what it lacks: speeds of codecs, profiles of models, and times of steps."""
    models, methods = given["models"].split(","), given["methods"].split(",")
    for model, what in (*((model, "profile") for model in models), ("", "speeds")):
        name = f"profile of {model}" if model else what
        if name not in document:
            document[name] = _run(1, {"measure": what, "model": model, "methods": methods}, None)[0]["found"]
            yield
    for ranks, link, model in itertools.product(given["ranks"].split(","), given["links"].split(","), models):
        place = {"model": model, "ranks": int(ranks), "link": link}
        have = [row["method"] for row in document["rows"] if place.items() <= row.items()]
        if missing := [method for method in methods if method not in have]:
            task = {"measure": "steps", "model": model, "methods": missing}
            document["rows"] += [place | row["found"] for row in _run(int(ranks), task, link)]
            yield


def _run(ranks: int, task: dict[str, Any], link: str | None) -> list[dict[str, Any]]:
    lab = Lab(ranks, parse_link(link)) if link else None
    return run_ranks(__file__, ranks, task, "ucx", lab, plain=None)


# -- the predictions ---------------------------------------------------------------------------------------------------


def predicted(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows with the doctor's prediction and its relative error."""
    speeds = {method: CodecSpeed(**speed) for method, speed in document["speeds"].items()}
    for row in (each for each in document["rows"] if each["method"] in speeds):  # older files have PowerSGD, too
        own = _computation(document[f"profile of {row['model']}"])
        step = Step(own, row["ranks"], parse_link(row["link"]).rate, document["machine"]["cores"] / row["ranks"])
        seconds = cost_of(step, row["method"], speeds[row["method"]]).overlapped
        yield row | {"predicted": seconds, "error": seconds / row["seconds"] - 1}


def _computation(found: dict[str, Any]) -> StepComputation:
    """The computation of a step as the doctor estimates it. In older files its parts were measured."""
    seconds = found["forward"] + found["backward"] + found["optimiser"]
    return estimated([tuple(g["shape"]) for g in found["gradients"]], seconds, _BUCKET_NBYTES)


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The errors of each model, number of ranks and link, and two codecs as examples."""
    for key, each in itertools.groupby(rows, lambda row: (row["model"], row["ranks"], row["link"])):
        group = {row["method"]: row for row in each}
        worst = max(group.values(), key=lambda row: abs(row["error"]))
        median = statistics.median(abs(row["error"]) for row in group.values())
        examples = [_shown(group[method])[4:6] if method in group else ("", "") for method in (FP32, "minmax4+ef")]
        yield *map(str, key), f"{median:.0%}", f"{worst['error']:+.0%}", worst["method"], *itertools.chain(*examples)


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    times = f"{row['seconds'] * 1e3:.1f}", f"{row['predicted'] * 1e3:.1f}"
    return row["model"], str(row["ranks"]), row["link"], row["method"], *times, f"{row['error']:+.0%}"


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 reports its results."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if task["measure"] == "speeds":
        report([{"found": {each: vars(measure_speed(codec_of(each), _TIMED)) for each in task["methods"]}}])
        return
    if task["measure"] == "profile":
        report([{"found": asdict(_alone(task["model"]))}])
        return
    dist.init_process_group("gloo")
    found = [{"found": {"method": each, "seconds": _step(task["model"], each)}} for each in task["methods"]]
    if dist.get_rank() == 0:
        report(found)
    gc.collect()  # DistributedDataParallel holds the group, whose threads must end before the interpreter
    dist.destroy_process_group()


def _alone(name: str) -> StepComputation:
    """Estimate the computation of a step as the doctor does, from the fastest of some steps of one rank."""
    from doctor_models import MODELS as makers

    module, loss, optimizer = makers[name]()
    times = []
    for _ in range(_WARM + _ALONE):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    shapes = [tuple(p.shape) for p in module.parameters() if p.requires_grad]
    return estimated(shapes, min(times[_WARM:]), _BUCKET_NBYTES)


def _step(name: str, method: str) -> float:
    """The median time of a step on the slowest rank."""
    import torch
    import torch.distributed as dist
    from doctor_models import MODELS as makers

    def largest(value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    torch.manual_seed(dist.get_rank())
    module, loss, optimizer = makers[name]()
    with _reduced_by(module, method) as wrapped:

        def steps(number: int) -> float:
            times = []
            for _ in range(number):
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss(wrapped).backward()
                optimizer.step()
                times.append(time.perf_counter() - begin)
            return largest(statistics.median(times))

        each = steps(_WARM)
        return steps(max(_LEAST, min(_MOST, int(_SECONDS / each))))


@contextlib.contextmanager
def _reduced_by(module: Any, method: str) -> Iterator[Any]:
    """Wrap the module in DistributedDataParallel, and let ``method`` reduce the gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import qccl.torch

    wrapped = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    with contextlib.ExitStack() as stack:
        if method == FP16:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method != FP32:
            stack.enter_context(qccl.torch.compress(wrapped, method))
        yield wrapped


if __name__ == "__main__":
    start_script(main, rank)
