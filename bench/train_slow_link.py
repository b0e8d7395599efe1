"""Time to the same quality behind slow links: ``python bench/train_slow_link.py`` (takes an hour or two; needs root).

It trains the model of docs/examples/byte_model.py on 4 ranks, with PyTorch's DistributedDataParallel, its own hooks
(fp16, PowerSGD) and qccl's codecs. The model, the batch, the schedule and the number of steps are fixed. Sections:

- "curves": validation quality by step, for several seeds, without a link: the results do not depend on it;
- "steps": the time of a step behind each link. Four ranks do not fit on two cores, so that a rank does not compute but
  sleeps, as long as the forward pass, each gradient and the optimiser take one rank alone on this machine; gradients
  of the same sizes go through DistributedDataParallel, the hook, the codec and the link;
- "whole": one run with everything behind one link, whose parameters must equal those of the run without, bit for bit;
- "scaling": the time of a step on 1 to 8 ranks.

The target is the mean quality of fp32 after ``--budget`` steps, plus one standard deviation of its seeds. A method's
time is that of its first step whose quality reaches the target; the learning rate is constant, so that all methods can.
Beside each step's time stands its limit: no link can end before it has carried all the bytes of a gradient that becomes
ready when it does, and nothing can end before the computation. The limit takes encoding and decoding to be free; the
step without a link, in shared memory, shows what they and PyTorch take while four ranks share the processors.
``--save`` writes docs/results/training-<date>.json and docs/training.png, ``--write docs/results.md`` the tables of
that page; with ``--sections "" --save`` it measures nothing and writes them from the file.

With another number of ranks (``--ranks 2 --sections steps``) the file and the place in the page have their own names.
On two cores that shows the step without ranks that share a core. A section without curves has no times to the target.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click
from runs import MARK, machine, measured_on, rewrite_table, run_ranks, run_undisturbed, table

from qccl.bench.lab import Lab, shaped_nbytes
from qccl.bench.sizes import parse_link

__all__ = ["limit"]

_DOCS = Path(__file__).parent.parent / "docs"
#: megabytes of DDP's buckets, as in docs/examples/ddp.py
BUCKET_MB = 0.5
#: steps between two measurements of the quality
EVERY = 25
#: PyTorch's own reduction and hooks, and codecs
THEIRS = ("fp32", "fp16", "powersgd:4", "powersgd:1")
OURS = ("minmax8", "minmax4+ef", "trellis2+ef", "topk:k=0.01+ef", "onebit:reconstruct=mean+ef")
ACCURACY = ("method", "bits per byte at the end", "more than fp32", "steps to the target", "MB a step")
STEP = ("method", "link", "ms a step", "least ms", "least / time", "ms without a link")
TIMES = (*STEP, "s to the target", "times sooner than fp32")
#: default number of ranks; the names of other numbers' files and tables contain the number
RANKS = 4


@click.command()
@click.option("--sections", default="curves,steps,whole,scaling", show_default=True)
@click.option("--ranks", default=RANKS, show_default=True, help="Not of the scaling.")
@click.option("--links", default="100mbit,1gbit", show_default=True)
@click.option("--methods", default=",".join(THEIRS + OURS), show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--steps", default=500, show_default=True, help="Of a training.")
@click.option("--budget", default=350, show_default=True, help="Steps of fp32 whose quality is the target.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--resume", is_flag=True, help="Keep the file's curves and steps, and measure those that it lacks.")
@click.option("--save", is_flag=True, help="Write the results file and the figure; sections that did not run stay.")
@click.option("--write", help="A page whose tables are to be replaced, such as docs/results.md.")
def main(**given: Any) -> None:
    """Measure, and print tables."""
    ranks = given["ranks"]
    name, option = ("training", "") if ranks == RANKS else (f"training-{ranks}-ranks", f" --ranks {ranks}")
    path = _DOCS / "results" / f"{name}-{date.today().isoformat()}.json"
    document = json.loads(path.read_text(encoding="utf-8")) if given["save"] and path.exists() else {}
    document |= {"machine": machine(), "budget": given["budget"]}
    given |= {"until": time.monotonic() + given["patience"]}
    methods, links = given["methods"].split(","), given["links"].split(",")
    for section in filter(None, given["sections"].split(",")):
        document[section] = document.get(section, []) if given["resume"] and section in ("curves", "steps") else []
        for row in _measured(section, methods, links, given, document):
            document[section].append(row)
            if given["save"]:  # after each row, so that an interruption loses little
                path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(_report(document))
    print(f"\n{text}")
    if given["write"]:
        rewrite_table(given["write"], f"python bench/train_slow_link.py{option}", text)
    if given["save"]:
        _figure(document, _DOCS / f"{name}.png")


def _measured(
    section: str, methods: list[str], links: list[str], given: dict[str, Any], document: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure one section."""
    ranks, until = given["ranks"], given["until"]
    match section:
        case "curves":
            for seed, method in itertools.product(range(given["seeds"]), methods):
                task = {"measure": "curve", "method": method, "seed": seed, "steps": given["steps"]}
                if not any(task.items() <= row.items() for row in document["curves"]):
                    yield _run(ranks, task)
        case "steps":
            for link, method in itertools.product([*links, None], methods):
                task = {"measure": "step", "method": method, "link": link}
                if not any(task.items() <= row.items() for row in document["steps"]):
                    yield _step(ranks, method, link, _compute(document, until), until)
        case "whole":
            task = {"measure": "curve", "method": methods[-1], "seed": 0, "steps": given["steps"]}
            yield _run(ranks, task, links[0])
        case "scaling":
            for n, method in itertools.product((1, 2, 4, 8), ("fp32", methods[-1])):
                yield _step(n, method, links[0] if n > 1 else None, _compute(document, until), until)
        case _:
            raise click.BadParameter(f"section {section!r} is none of curves, steps, whole, scaling")


def _compute(document: dict[str, Any], until: float) -> dict[str, Any]:
    """The measured times of the computation of one rank, alone on the machine."""
    if "compute" not in document:
        document["compute"] = _run(1, {"measure": "compute"}, until=until)
    return document["compute"]


def _step(ranks: int, method: str, link: str | None, compute: dict[str, Any], until: float) -> dict[str, Any]:
    """Time a step behind a link, or without one in shared memory."""
    found = _run(ranks, {"measure": "step", "method": method, "compute": compute, "link": link}, link, until)
    del found["compute"]
    found["limit"] = limit(compute, found["nbytes"], parse_link(link).rate if link else math.inf)
    return found


def limit(compute: dict[str, Any], nbytes: float, rate: float) -> float:
    """The least seconds of a step that sends ``nbytes`` bytes at ``rate`` bytes per second.

    ``compute`` has the seconds of "forward" and "optimiser", and in "ready" for each gradient, in the order in which
    they become ready, its elements and the seconds since the beginning of the backward pass. A gradient's share of the
    bytes is its share of the elements.
    """
    total = sum(count for count, _ in compute["ready"])
    left, end = nbytes, compute["ready"][-1][1]
    for count, ready in compute["ready"]:
        end = max(end, ready + left / rate)
        left -= nbytes * count / total
    return float(compute["forward"] + end + compute["optimiser"])


def _run(ranks: int, task: dict[str, Any], link: str | None = None, until: float = 0.0) -> dict[str, Any]:
    """Start this script on ``ranks`` ranks, again until ``until`` if other programs disturb it.

    Returns the task with what rank 0 found.
    """

    def run() -> list[dict[str, Any]]:
        lab = Lab(ranks, parse_link(link)) if link else None
        return run_ranks(__file__, ranks, task, "ucx", lab, plain=None)

    (row,) = run_undisturbed(run, until)
    print(f"{row['measure']} {row.get('method', '')} {link or ''}: {row['summary']}", file=sys.stderr, flush=True)
    return row | {"ranks": ranks}


# -- the report ------------------------------------------------------------------------------------------------------


def _target(document: dict[str, Any]) -> tuple[float, float]:
    """Mean and standard deviation of fp32's quality after the budget's steps."""
    found = [dict(row["curve"])[document["budget"]] for row in document["curves"] if row["method"] == "fp32"]
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def _reached(row: dict[str, Any], target: float) -> int | None:
    """The first step of a curve whose quality reaches the target."""
    return next((step for step, bits in row["curve"] if bits <= target), None)


def _report(document: dict[str, Any]) -> Iterator[str]:
    """Paragraphs and tables in Markdown."""
    if "compute" in document:
        yield f"The computation of one rank alone takes: {document['compute']['summary']}."
    if "curves" in document:
        mean, deviation = _target(document)
        yield (
            f"The target is {mean + deviation:.3f} bits per byte: fp32 has {mean:.3f} +- {deviation:.3f} after "
            f"{document['budget']} steps."
        )
        yield "\n".join(table(ACCURACY, _accuracy(document)))
        yield "\n".join(table(TIMES, _times(document)))
    elif "steps" in document:
        sent = _sent(document)
        rows = ((*_timed(document, row), f"{sent[row['method']]:.2f}") for row in _behind_links(document))
        yield "\n".join(table((*STEP, "MB a step"), rows))
    for row in document.get("whole", []):
        others = [each["digest"] for each in document.get("curves", []) if _same(each, row)]
        equal = "equal" if others == [row["digest"]] else "do not equal"
        yield (
            f"With everything behind one link, {row['steps']} steps with {row['method']} took {row['seconds']:.0f} s; "
            f"the parameters {equal} those of the run without a link."
        )
    if "scaling" in document:
        alone = {row["method"]: row["seconds"] for row in document["scaling"] if row["ranks"] == 1}
        rows = (
            (row["ranks"], row["method"], f"{row['seconds'] * 1e3:.1f}", f"{alone['fp32'] / row['seconds']:.0%}")
            for row in document["scaling"]
        )
        yield "\n".join(table(("ranks", "method", "ms a step", "efficiency"), rows))
    yield measured_on(document["machine"])


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("method", "seed", "steps", "ranks"))


def _accuracy(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Quality at the end, mean and standard deviation over the seeds, and the steps to fp32's quality."""
    ends = {
        method: [row["curve"][-1][1] for row in document["curves"] if row["method"] == method]
        for method in dict.fromkeys(row["method"] for row in document["curves"])
    }
    sent = _sent(document)
    for method, bits in ends.items():
        mean, deviation = statistics.fmean(bits), statistics.stdev(bits) if len(bits) > 1 else 0.0
        steps = _steps(document, method)
        known = [step for step in steps if step is not None]
        yield (
            method,
            f"{mean:.3f} +- {deviation:.3f}",
            f"{mean - statistics.fmean(ends['fp32']):+.3f}",
            f"{statistics.median(known):.0f} ({len(known)} of {len(steps)} seeds)" if known else "not reached",
            f"{sent[method]:.2f}" if method in sent else "",
        )


def _times(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The time of a step behind each link, its limit, and the time to fp32's quality."""
    fp32 = {row["link"]: row for row in _behind_links(document) if row["method"] == "fp32"}
    for row in _behind_links(document):
        seconds, first = (_seconds_to_target(document, each) for each in (row, fp32[row["link"]]))
        yield (
            *_timed(document, row),
            f"{seconds:.0f}" if seconds else "",
            f"{first / seconds:.1f}" if seconds and first else "",
        )


def _timed(document: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """The columns STEP of a row of the section "steps"."""
    alone = {each["method"]: each["seconds"] for each in document["steps"] if each["link"] is None}
    return (
        row["method"],
        row["link"],
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['limit'] * 1e3:.1f}",
        f"{row['limit'] / row['seconds']:.0%}",
        f"{alone[row['method']] * 1e3:.1f}" if row["method"] in alone else "",
    )


def _behind_links(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of steps behind a link."""
    return [row for row in document.get("steps", []) if row["link"]]


def _sent(document: dict[str, Any]) -> dict[str, float]:
    """The megabytes that a rank sends in a step, by method; of the first link."""
    return {row["method"]: row["nbytes"] / 1e6 for row in reversed(_behind_links(document))}


def _seconds_to_target(document: dict[str, Any], row: dict[str, Any]) -> float | None:
    """The median over the seeds; None unless most of them reach the target."""
    steps = _steps(document, row["method"])
    known = [step for step in steps if step is not None]
    return statistics.median(known) * row["seconds"] if len(known) * 2 > len(steps) else None


def _steps(document: dict[str, Any], method: str) -> list[int | None]:
    """The first step of each seed whose quality reaches the target."""
    target = sum(_target(document))
    return [_reached(row, target) for row in document["curves"] if row["method"] == method]


def _figure(document: dict[str, Any], path: Path) -> None:
    """Draw quality by time behind the first link: the mean over the seeds, and the band of their extremes."""
    import matplotlib.pyplot as plt

    if not {"curves", "steps"} <= document.keys():
        return
    link = document["steps"][0]["link"]
    seconds = {row["method"]: row["seconds"] for row in document["steps"] if row["link"] == link}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in document["curves"]):
        curves = [row["curve"] for row in document["curves"] if row["method"] == method]
        at = [step * seconds[method] for step, _ in curves[0]]
        bits = list(zip(*[[b for _, b in curve] for curve in curves], strict=True))
        is_ours = method not in THEIRS
        (line,) = axes.plot(
            at, [statistics.fmean(each) for each in bits],
            linestyle="-" if is_ours else "--", label=f"{'qccl' if is_ours else 'PyTorch'} {method}",
        )  # fmt: skip
        axes.fill_between(at, list(map(min, bits)), list(map(max, bits)), color=line.get_color(), alpha=0.2)
    mean, deviation = _target(document)
    axes.axhline(mean + deviation, color="grey", linestyle=":", label="target")
    ranks = document["steps"][0]["ranks"]
    label = f"seconds of training, {ranks} ranks, {link} per rank"
    axes.set(xscale="log", xlabel=label, ylabel="bits per byte (validation)")
    axes.set_ylim(top=mean + 1.5)  # the first steps, before the learning rate has risen, are of no interest
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set_title("A model of 2 million parameters behind a slow link: lower and further left is better")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


# -- one rank --------------------------------------------------------------------------------------------------------


def rank(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 prints what it found."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(_DOCS / "examples"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"curve": _measure_curve, "compute": _measure_compute, "step": _measure_step}[task["measure"]](task)
    if dist.get_rank() == 0:
        print(MARK + json.dumps([found]), flush=True)
    # DistributedDataParallel holds the group, whose threads must end before the interpreter: otherwise they may abort
    gc.collect()
    dist.destroy_process_group()


def _wrapped(module: Any, method: str) -> Any:
    """The module in DistributedDataParallel, whose gradients go by ``method``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import qccl.torch

    name, _, parameter = method.partition(":")
    if name == "powersgd":  # in one bucket: several block each other in gloo's threads
        model = DistributedDataParallel(module, bucket_cap_mb=100, gradient_as_bucket_view=True)
        state = powerSGD_hook.PowerSGDState(None, int(parameter), start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model
    model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name != "fp32":
        qccl.torch.compress(model, method)
    return model


def _measure_curve(task: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the quality every EVERY steps, and a digest of the parameters."""
    import torch
    import torch.distributed as dist
    from byte_model import ByteModel, train

    torch.manual_seed(task["seed"])
    model, number = _wrapped(ByteModel(), task["method"]), dist.get_rank()
    begin = time.monotonic()
    how = {"seed": task["seed"], "measures": number == 0, "every": EVERY, "positions": 6000}
    curve = train(model, task["steps"], number, **how)
    took = time.monotonic() - begin
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    summary = f"{curve[-1][1]:.4f} bits per byte, {took:.0f} s" if curve else ""
    return {"curve": curve, "digest": digest, "seconds": took, "summary": summary}


def _measure_compute(task: dict[str, Any]) -> dict[str, Any]:
    """The medians of the computation's times: see limit()."""
    import torch
    from byte_model import BATCH, RATE, ByteModel, corpus, random_batch

    model = ByteModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    train, _ = corpus()
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {}

    def note(what: str) -> Callable[[object], None]:
        return lambda _: times.setdefault(what, []).append(time.perf_counter() - begin)

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(note(name))
    for _ in range(60):
        begin = time.perf_counter()
        context, following = random_batch(train, BATCH, generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(context), following)
        note("forward")(None)
        begin = time.perf_counter()
        loss.backward()
        begin = time.perf_counter()
        optimizer.step()
        note("optimiser")(None)
    medians = {name: statistics.median(each[10:]) for name, each in times.items()}
    forward, optimiser = medians.pop("forward"), medians.pop("optimiser")
    counts = {name: p.numel() for name, p in model.named_parameters()}
    ready = sorted(((counts[name], at) for name, at in medians.items()), key=lambda each: each[1])
    summary = (
        f"forward {forward * 1e3:.1f} ms, backward {ready[-1][1] * 1e3:.1f} ms, optimiser {optimiser * 1e3:.1f} ms"
    )
    return {"forward": forward, "ready": ready, "optimiser": optimiser, "summary": summary}


def _measure_step(task: dict[str, Any]) -> dict[str, Any]:
    """The median time of a step whose computation is replaced by sleeping, and the bytes that a rank sends."""
    import torch
    import torch.distributed as dist

    compute = task["compute"]
    model = _wrapped(_replay(compute["ready"]), task["method"])

    def step() -> None:
        model.zero_grad()
        time.sleep(compute["forward"])
        model(torch.zeros(1, requires_grad=True)).backward()
        time.sleep(compute["optimiser"])

    for _ in range(12):  # PowerSGD begins after 10 steps
        step()
    blocks, sent = [], []
    for _ in range(7):
        dist.barrier()
        before = shaped_nbytes() if task["link"] else 0
        begin = time.perf_counter()
        for _ in range(4):
            step()
        mine = torch.tensor((time.perf_counter() - begin) / 4)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        blocks.append(mine.item())
        nbytes = torch.tensor((shaped_nbytes() - before) / 4 if task["link"] else 0.0)
        dist.all_reduce(nbytes, dist.ReduceOp.MAX)
        sent.append(nbytes.item())
    seconds = statistics.median(blocks)
    summary = f"{seconds * 1e3:.1f} ms a step, {statistics.median(sent) / 1e6:.2f} MB"
    return {"seconds": seconds, "blocks": blocks, "nbytes": statistics.median(sent), "summary": summary}


def _replay(ready: list[tuple[int, float]]) -> Any:
    """A module with parameters of given sizes, whose gradients become ready at given times of the backward pass.

    The gradients are normally distributed, as a codec's time may depend on its values.
    """
    import torch
    from torch import nn

    class Replay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [(count // 64, 64) if count >= 1 << 14 else (count,) for count, _ in ready]
            self.begin = 0.0
            self.gradients = [torch.randn(shape) for shape in shapes]
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in reversed(shapes)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, weight in enumerate(self.weights):
                x = Ready.apply(x, weight, len(ready) - 1 - i)
            return Begin.apply(x)

    class Begin(torch.autograd.Function):
        """Notes when the backward pass begins."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            module.begin = time.perf_counter()
            return gradient

    class Ready(torch.autograd.Function):
        """Gives gradient ``number`` at its time."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            own = module.gradients[ctx.number].detach()  # a new tensor of the same memory: PyTorch need not copy it
            time.sleep(max(0.0, module.begin + ready[ctx.number][1] - time.perf_counter()))
            return gradient, own, None

    module = Replay()
    return module


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]))
    else:
        main()
