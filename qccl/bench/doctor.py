"""``qccl-bench doctor``: what a training step would cost with each codec, before anything is changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import numpy as np

import qccl
from qccl.bench import quality
from qccl.bench.advice import BBR, Advice
from qccl.bench.costs import FP16, FP32, POWERSGD, Cost, cost_of
from qccl.bench.data import gaussian
from qccl.bench.doctor_network import TrainingNetwork, given_network, measured_network, parse_delay, parse_small_loss
from qccl.bench.files import write_json
from qccl.bench.launched import LaunchedCommand, check_other_ranks
from qccl.bench.params import PositiveNumber, codec_list, codec_of, imported, option, output_file
from qccl.bench.profile import measured
from qccl.bench.sizes import parse_link, parse_size
from qccl.codecs import Codec
from qccl.costs.profile import Profile, estimated
from qccl.costs.speed import speed_of
from qccl.costs.step import Speed, Step
from qccl.costs.tcp_model import Tcp
from qccl.dtypes import FLOAT32
from qccl.launchers import detect
from qccl.scalars import parse_seconds

__all__ = ["Training", "doctor", "measure_speed", "recommendation"]

_NAMES = {FP32: "none (fp32)", FP16: "cast (fp16)"}
_DEFAULT_CODECS = (
    "minmax8,minmax4+ef,minmax2:bucket=256+ef,trellis4+ef,trellis2+ef,onebit:reconstruct=mean+ef,topk:k=0.01+ef"
)
#: ranks of PyTorch's PowerSGD that are compared
_POWERSGD_RANKS = (4, 1)
#: a gain of less than this is not worth a change, nor a larger error
_WORTH = 0.05
#: bytes of values whose encoding is timed: more than caches hold, because a training's gradients and states are not
#: there either
_TIMED_NBYTES = 16 << 20
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
#: elements of the arrays in which --parameters are thought to be
_ARRAY = 1 << 20

_SIZES_HELP = "Bytes of the float32 gradients, array by array, e.g. 4M,1M,64K."
_MODEL_HELP = (
    "A function of yours that returns a PyTorch module; or the module, a function without arguments that computes the "
    "loss of a batch by it, and if you like the optimiser: then some steps are run and measured."
)
_MEASURE_HELP = (
    "Measure rate, delay and loss between the ranks of a launcher, such as mpiexec -n 4 qccl-bench doctor --measure ..."
)
_DELAY_HELP = "With --link: each packet is under way this long from one rank to another, e.g. 25ms."
_LOSS_HELP = "With --link: share of the packets that are lost, at random, e.g. 0.1%."
_TCP_HELP = "With --link: TCP's congestion control on the machines of the ranks [this machine's]."
_STEP_HELP = "Time of a step on one rank, without communication, e.g. 250ms [measured, if --model gives a loss]."
_PROCESSORS_HELP = "Processors of each rank; 0.5 if two ranks share one [all of this machine]."
_BUCKET_HELP = "bucket_cap_mb of DistributedDataParallel, in MiB [25]."
_CODEC_HELP = f"Codecs to compare with fp32 and fp16 [{_DEFAULT_CODECS}]."


@dataclass(frozen=True)
class Training:
    """What --model gives.

    Attributes:
        model: a module of PyTorch.
        loss: computes the loss of a batch by ``model``; None: not given.
        optimizer: has step(); None: not given.
    """

    model: Any
    loss: Callable[[], Any] | None = None
    optimizer: Any = None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the gradients."""
        return [tuple(p.shape) for p in self.model.parameters() if p.requires_grad]


def parse_count(text: str) -> int:
    """A number of parameters: "124M", "7B", "1500" (powers of 1000). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip(), re.IGNORECASE)
    count = round(float(match[1]) * _DECIMAL[match[2].upper()]) if match else 0
    if count < 1:
        raise ValueError(f"{text!r} is not a number of parameters; give one with K, M or B, such as 124M")
    return count


def parse_sizes(text: str) -> tuple[int, ...]:
    """The numbers of elements of "4M,1M", which are bytes of float32. Raises ValueError."""
    counts = tuple(parse_size(part) // FLOAT32.itemsize for part in text.split(","))
    if 0 in counts:
        raise ValueError(f"{text!r} has an array of less than 4 bytes; leave it out")
    return counts


def parse_model(text: str) -> Training:
    """The training that ``module:function`` returns. Raises ValueError."""
    module, colon, name = text.partition(":")
    try:
        given: Any = imported(module, name)() if colon else None
    except TypeError as error:
        raise ValueError(f"{text!r} cannot be called without arguments ({error}); name a function of none") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{text!r} cannot be imported ({error}); give a module in this folder or on PYTHONPATH"
        ) from error
    parts = given if isinstance(given, tuple) else (given,)
    if not hasattr(parts[0] if parts else None, "parameters"):
        raise ValueError(f"{text!r} gives no PyTorch module; write module:function, and let it return the module")
    if len(parts) > 3 or (len(parts) > 1 and not callable(parts[1])) or (len(parts) > 2 and not _has_step(parts[2])):
        raise ValueError(
            f"{text!r} must return the module, or (module, loss) or (module, loss, optimizer): loss() computes the "
            f"loss of a batch, and optimizer has step()"
        )
    return Training(*parts)


def _has_step(optimizer: Any) -> bool:
    return optimizer is None or callable(getattr(optimizer, "step", None))


@click.command(cls=LaunchedCommand, short_help="Compute what a training step would cost with each codec.")
@option("--sizes", parse_sizes, "LIST", _SIZES_HELP)
@option("--parameters", parse_count, "N", "Or the number of parameters, e.g. 124M.")
@option("--model", parse_model, "MODULE:FUNCTION", f"Or: {_MODEL_HELP}")
@option("--ranks", click.IntRange(min=2), "N", "Ranks of the training [2; with --measure those of the launcher].")
@option("--link", lambda text: parse_link(text).name, "RATE", "Rate of each rank's link, e.g. 100mbit or 1gbit.")
@option("--delay", parse_delay, "TIME", _DELAY_HELP)
@option("--loss", parse_small_loss, "PERCENT", _LOSS_HELP)
@click.option("--tcp", type=click.Choice(["cubic", BBR]), help=_TCP_HELP)
@click.option("--measure", is_flag=True, help=_MEASURE_HELP)
@option("--step", parse_seconds, "TIME", _STEP_HELP)
@option("--processors", PositiveNumber(), "N", _PROCESSORS_HELP)
@option("--bucket bucket_mb", PositiveNumber(), "N", _BUCKET_HELP, 25.0)
@option("--codec specs", codec_list, "LIST", _CODEC_HELP, _DEFAULT_CODECS)
@option("-J --json path", output_file, "FILE", "Write the figures.")
def doctor(
    sizes: tuple[int, ...] | None,
    parameters: int | None,
    model: Training | None,
    ranks: int | None,
    link: str | None,
    delay: float | None,
    loss: float | None,
    tcp: str | None,
    measure: bool,
    step: float | None,
    processors: float | None,
    bucket_mb: float,
    specs: Sequence[str],
    path: str | None,
) -> None:
    """Compute what a data-parallel training step would cost with each codec, and recommend one, or none.

    For example: qccl-bench doctor --parameters 124M --ranks 4 --link 1gbit --step 250ms

    The step is a timeline of DistributedDataParallel: gradients become ready one after the other, calls encode, send
    and decode them beside the backward pass. The network is that of --link, --delay and --loss, or measured; encoding
    and decoding are measured on one core of this machine, and the times of the gradients by --model, if that gives a
    loss.

    Recommended are codecs whose quality was shown in docs/results.md; and, where delay and loss are known, a transport,
    its connections and TCP's congestion control.
    """
    has_loss = model is not None and model.loss is not None
    wanted: dict[str, object] = {
        "give the gradients once: --sizes, --parameters or --model": [sizes, parameters, model].count(None) == 2,
        "give the network once: --link RATE, or --measure under a launcher": (link is None) == measure,
        "--step is missing: the time of a training step on one rank, such as --step 250ms": step or has_loss,
    }
    for name, given in (("--delay", delay), ("--loss", loss), ("--tcp", tcp)):
        wanted[f"{name} is for --link, whose network it describes: --link 100mbit {name} ..."] = not given or bool(link)
    if missing := [text for text, is_there in wanted.items() if not is_there]:
        raise click.UsageError("; ".join(missing))
    launcher = detect()
    if measure and (launcher is None or launcher.size < 2):
        raise click.UsageError("--measure needs several ranks: mpiexec -n 4 qccl-bench doctor --measure ...")
    if measure and ranks not in (None, launcher and launcher.size):
        raise click.UsageError(f"--ranks {ranks}, but the launcher has started others; leave --ranks out")
    of_launcher, rank = (launcher.local_size, launcher.rank) if launcher else (0, 0)
    network = given_network(link, delay, loss, tcp, ranks or 2, rank) if link else None
    if launcher is not None:
        check_other_ranks(launcher)
    shapes = model.shapes if model else [(1, count) for count in sizes or _arrays(parameters or 0)]
    network = network or measured_network(sum(int(np.prod(shape)) for shape in shapes))
    if network.rank == 0:
        share = processors or len(os.sched_getaffinity(0)) / max(1, of_launcher)
        profile = _profile(shapes, model, step, bucket_mb, max(1, int(share)))
        _report(network.step(profile, share), network, specs, path)


def _arrays(parameters: int) -> list[int]:
    """Arrays of a usual size for so many parameters."""
    whole, rest = divmod(parameters, _ARRAY)
    return [_ARRAY] * whole + ([rest] if rest else [])


def _profile(
    shapes: Sequence[tuple[int, ...]], given: Training | None, step: float | None, bucket_mb: float, threads: int
) -> Profile:
    """The computation: measured if there is a loss, in steps of ``step`` seconds if that is given."""
    if given is None:
        assert step is not None
        return estimated(shapes, step, int(bucket_mb * (1 << 20)))
    found = measured(given.model, given.loss, given.optimizer, bucket_mb, _POWERSGD_RANKS, threads)
    if given.loss is None:
        assert step is not None
        return replace(estimated(shapes, step, int(bucket_mb * (1 << 20))), powersgd=found.powersgd)
    return found if step is None else found.scaled(step)


def _report(step: Step, network: TrainingNetwork, specs: Sequence[str], path: str | None) -> None:
    """Print the table and the recommendations, and write the figures."""
    named = dict.fromkeys([FP32, FP16, *specs])
    count = _TIMED_NBYTES // FLOAT32.itemsize
    costs = [cost_of(step, spec, measure_speed(codec_of(spec), count)) for spec in named]
    costs += [cost_of(step, f"{POWERSGD}{rank}", None) for rank in step.profile.powersgd]
    lines = [*_head(step, network), *_table(costs), "#", *_advice_lines(step, network.advice)]
    for line in (*lines, f"# Recommendation: {recommendation(costs)}"):
        click.echo(line)
    if path is not None:
        found = {"recommendation": recommendation(costs), "costs": [asdict(cost) for cost in costs]}
        about = {"qccl_version": qccl.__version__, "step": asdict(step)}
        write_json(path, about | network.to_json() | found)
        click.echo(f"# Wrote {path}")


def _advice_lines(step: Step, advice: Advice | None) -> Iterator[str]:
    if advice is None:
        return
    yield f"# Transport: {advice.transport}"
    yield f"# Connections: {advice.connections}"
    yield f"# Congestion control: {advice.congestion}"
    if step.gloo_rate < (1 - _WORTH) * step.rate and step.gloo.congestion != BBR:
        with_bbr = replace(step, gloo=Tcp(BBR))
        fp32, fp16 = (_ms(cost_of(with_bbr, each, Speed(0, 0, 0)).overlapped) for each in (FP32, FP16))
        yield f"# With bbr for gloo, too, a step would take {fp32} ms in fp32, and {fp16} ms in fp16, without qccl"


def measure_speed(codec: Codec, count: int) -> Speed:
    """The codec's speed and error on ``count`` Gaussian values."""
    return speed_of(codec, gaussian(0, 0, count, FLOAT32, seed=0))


def recommendation(costs: Sequence[Cost]) -> str:
    """The codec with the least error among those that are about as fast as the fastest, with the reason.

    Only fp32, fp16 and codecs whose quality was shown count. ``costs`` begin with that of fp32.
    """
    plain, shown = costs[0], [cost for cost in costs if cost.codec in (FP32, FP16) or quality.is_shown(cost.codec)]
    fastest = min(shown, key=lambda cost: cost.overlapped)
    limit = fastest.overlapped * (1 + _WORTH)
    if plain.overlapped <= limit:
        saved = 1 - fastest.overlapped / plain.overlapped
        return (
            f"do nothing, because communication is no bottleneck: a step of fp32 takes {_ms(plain.overlapped)} ms, and "
            f"no codec would save more than {saved:.0%} of it"
        )
    best = min((cost for cost in shown if cost.overlapped <= limit), key=lambda cost: cost.error or 0.0)
    text = (
        f"{_NAMES.get(best.codec, best.codec)}, because a step takes {_ms(best.overlapped)} ms instead of "
        f"{_ms(plain.overlapped)} with fp32 ({plain.overlapped / best.overlapped:.1f} times as fast)"
    )
    if best is fastest:
        text += f"; every codec with a smaller error takes at least {_WORTH:.0%} longer"
    else:
        text += f"; {fastest.codec}, the fastest, takes {_ms(fastest.overlapped)} ms and has a larger error"
    if others := [c for c in costs if c not in shown and c.overlapped * (1 + _WORTH) < best.overlapped]:
        first = min(others, key=lambda cost: cost.overlapped)
        text += (
            f". {first.codec} would take {_ms(first.overlapped)} ms, but it was not shown to train as well as fp32 "
            f"({quality.remark(first.codec)}): try it on your training first"
        )
    return text


def _head(step: Step, network: TrainingNetwork) -> Iterator[str]:
    profile = step.profile
    total, arrays = sum(g.count for g in profile.gradients), len(profile.gradients)
    yield (
        f"# qccl-bench {qccl.__version__} doctor: {total} gradients in {arrays} array{'s' if arrays > 1 else ''} "
        f"({total * FLOAT32.itemsize / 1e6:.1f} MB as float32), {step.ranks} ranks"
    )
    yield from (f"# {line}" for line in network.head(step))
    parts = f"forward {_ms(profile.forward)}, backward {_ms(profile.backward)}, optimiser {_ms(profile.optimiser)} ms"
    how = "measured" if profile.is_measured else "--step; estimated: its parts, and when each gradient is ready"
    yield f"# computation of a step: {_ms(profile.computation)} ms: {parts} ({how})"
    yield f"# processors of a rank: {step.processors:g}"
    yield "# measured: codec: encoding and decoding, on one core of this machine, or PowerSGD's computation; error:"
    yield "#           relative L2 error of one encoding of Gaussian values (+ef adds it to the next step)"
    yield "# computed: sent, link: the bytes of an all-reduce, and their time at the link's rate; step: the time with"
    yield "#           communication after the backward pass, and beside it, as DistributedDataParallel runs it"
    yield "# shown:    whether it reached fp32's quality in about as many steps in docs/results.md; -: it is not there"
    yield "#"
    yield f"#{'':>9} {'':>9} {'':>9} {'step without overlap':^25} {'step with overlap':^25}"
    columns = f"{'ms':>9} {'vs fp32':>7} {'vs fp16':>7}"
    yield f"#{'sent MB':>9} {'link ms':>9} {'codec ms':>9} {columns} {columns} {'error':>9} {'shown':>5}  codec"


def _table(costs: Sequence[Cost]) -> Iterator[str]:
    fp32, fp16 = costs[:2]
    for cost in costs:
        columns = [f"{cost.sent / 1e6:>10.3f}", f"{_ms(cost.link):>9}", f"{_ms(cost.processor):>9}"]
        for name in ("alone", "overlapped"):
            own, plain, half = (getattr(each, name) for each in (cost, fp32, fp16))
            columns += [f"{_ms(own):>9}", f"{plain / own:>7.2f}", f"{half / own:>7.2f}"]
        error = f"{'':>9}" if cost.error is None else f"{cost.error:>9.2e}"
        yield " ".join(columns) + f" {error} {_shown(cost.codec):>5}  {_NAMES.get(cost.codec, cost.codec)}"


def _shown(codec: str) -> str:
    return "yes" if quality.is_shown(codec) else "no" if codec in quality.STEPS else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
