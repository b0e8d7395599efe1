"""``qccl-bench doctor``: the time of a training step with each codec, before anything is changed."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from qccl.base import __version__
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError, QcclError
from qccl.base.scalars import parse_seconds
from qccl.bench.doctor.speed import CodecSpeed, measure_speed
from qccl.bench.doctor.steps import FP16, FP32, Step, StepCost, constants_of, cost_of, rate_of
from qccl.bench.doctor.training import estimated
from qccl.bench.lab.network import parse_delay
from qccl.bench.params import (
    PositiveNumber,
    codec_list,
    codec_of,
    imported,
    option,
    output_file,
    parse_link,
    write_json,
)
from qccl.bench.start.launched import LaunchedCommand
from qccl.communicator.launch import init
from qccl.meeting.launchers import detect

__all__ = ["SHOWN", "doctor", "recommendation"]

_NAMES = {FP32: "none (fp32)", FP16: "cast (fp16)"}
#: the codecs that the doctor may recommend: in every training of docs/results.md they reached fp32's quality in at most
#: 1.1 times its steps
SHOWN = (FP32, FP16, "minmax8", "minmax4+ef", "minmax2:bucket=256+ef")
_DEFAULT_CODECS = "minmax8,minmax4+ef,minmax2:bucket=256+ef,trellis2+ef,onebit:reconstruct=mean+ef,topk:k=0.01+ef"
#: the least gain that is worth a change, or a larger error
_WORTH = 0.05
#: measurements are doubtful if their median is more than _SPREAD times the least one, or if the machine had more than
#: _LOAD busy processes for each processor
_SPREAD, _LOAD = 1.5, 0.5
#: bytes of values whose encoding is timed: more than caches hold, like a training's gradients and states
_TIMED_NBYTES = 16 << 20
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
#: elements of each array into which --parameters are assumed to be divided
_ARRAY = 1 << 20
#: a network's calls are timed _TIMES times, in bursts of _BURST. The bytes of a large call grow fourfold, from the
#: first number to the last, until the call takes _ENOUGH_SECONDS
_TIMES, _BURST, _FIRST_NBYTES, _LAST_NBYTES, _ENOUGH_SECONDS = 5, 4, 16 << 10, 16 << 20, 0.1
#: the most messages, one after the other, that a call in two rounds waits for
_LATE = 3

_MODEL_HELP = "A function of yours that returns a PyTorch module."
_MEASURE_HELP = (
    "Measure the network by calls among the ranks of a launcher, such as mpiexec -n 4 qccl-bench doctor --measure ..."
)
_DELAY_HELP = "With --link: the time of a packet from one rank to another, e.g. 25ms."
_STEP_HELP = "Time of a step on one rank, without communication, e.g. 250ms."
_PROCESSORS_HELP = "Processors of each rank; 0.5 if two ranks share one [all of this machine]."
_BUCKET_HELP = "bucket_cap_mb of DistributedDataParallel, in MiB [25]."
_CODEC_HELP = f"Codecs to compare with fp32 and fp16 [{_DEFAULT_CODECS}]."


def parse_count(text: str) -> int:
    """Parse a number of parameters: "124M", "7B", "1500" (powers of 1000). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip(), re.IGNORECASE)
    count = round(float(match[1]) * _DECIMAL[match[2].upper()]) if match else 0
    if count < 1:
        raise ValueError(f"{text!r} is not a number of parameters; give one with K, M or B, such as 124M")
    return count


def parse_model(text: str) -> list[tuple[int, ...]]:
    """List the shapes of the gradients of the module that ``module:function`` returns. Raises ValueError."""
    module, colon, name = text.partition(":")
    try:
        given: Any = imported(module, name)() if colon else None
    except TypeError as error:
        raise ValueError(f"{text!r} cannot be called without arguments ({error}); name one without any") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{text!r} cannot be imported ({error}); give a module in this folder or on PYTHONPATH"
        ) from error
    if not hasattr(given, "parameters"):
        raise ValueError(
            f"{text!r} gives no PyTorch module; write module:function, and let it return the module alone. Steps are "
            f"not run any more: time one on one rank, and give --step"
        )
    return [tuple(p.shape) for p in given.parameters() if p.requires_grad]


@dataclass(frozen=True)
class TrainingNetwork:
    """The network of a training.

    Attributes:
        rate: bytes per second of each rank's link, in each direction.
        delay: seconds from one rank to another, beyond the seconds in one room.
        ranks, rank: the number of ranks, and this rank.
        source: a text that says where the figures come from.
        spread: the median of the measured calls' times divided by the least one.
    """

    rate: float
    delay: float
    ranks: int
    rank: int
    source: str = "--link"
    spread: float = 1.0


@click.command(cls=LaunchedCommand, short_help="Compute what a training step would cost with each codec.")
@option("--parameters", parse_count, "N", "The number of parameters, e.g. 124M.")
@option("--model", parse_model, "MODULE:FUNCTION", f"Or: {_MODEL_HELP}")
@option("--ranks", click.IntRange(min=2), "N", "Ranks of the training [2; with --measure those of the launcher].")
@option("--link", lambda text: parse_link(text).name, "RATE", "Rate of each rank's link, e.g. 100mbit or 1gbit.")
@option("--delay", parse_delay, "TIME", _DELAY_HELP)
@click.option("--measure", is_flag=True, help=_MEASURE_HELP)
@option("--step", parse_seconds, "TIME", _STEP_HELP)
@option("--processors", PositiveNumber(), "N", _PROCESSORS_HELP)
@option("--bucket-cap-mb", PositiveNumber(), "N", _BUCKET_HELP, 25.0)
@option("--codec specs", codec_list, "LIST", _CODEC_HELP, _DEFAULT_CODECS)
@option("-J --json path", output_file, "FILE", "Write the figures.")
def doctor(
    parameters: int | None,
    model: Sequence[tuple[int, ...]] | None,
    ranks: int | None,
    link: str | None,
    delay: float | None,
    measure: bool,
    step: float | None,
    processors: float | None,
    bucket_cap_mb: float,
    specs: Sequence[str],
    path: str | None,
) -> None:
    """Compute what a data-parallel training step would cost with each codec, and recommend one, or none.

    For example: qccl-bench doctor --parameters 124M --ranks 4 --link 1gbit --step 250ms

    The step is one of DistributedDataParallel: gradients become ready one after the other, and calls encode, send and
    decode them beside the backward pass. The simulator times the calls on the network of --link and --delay, or on the
    network that --measure finds by calls of qccl among the ranks, which losses slow down like the calls of a training.
    Encoding and decoding are measured on one core of this machine. The parts of a step, and the times at which
    gradients are ready, are estimated.

    Recommended are codecs whose quality was shown in docs/results.md.
    """
    wanted: dict[str, object] = {
        "give the gradients once: --parameters or --model": (parameters is None) != (model is None),
        "give the network once: --link RATE, or --measure under a launcher": (link is None) == measure,
        "--step is missing: the time of a training step on one rank, such as --step 250ms": step,
        "--delay is for --link, whose network it describes: --link 100mbit --delay ...": not delay or bool(link),
    }
    if missing := [text for text, is_there in wanted.items() if not is_there]:
        raise click.UsageError("; ".join(missing))
    launcher, load = detect(), os.getloadavg()[0]
    if measure and (launcher is None or launcher.size < 2):
        raise click.UsageError("--measure needs several ranks: mpiexec -n 4 qccl-bench doctor --measure ...")
    if measure and ranks not in (None, launcher and launcher.size):
        raise click.UsageError(f"--ranks {ranks}, but the launcher has started others; leave --ranks out")
    of_launcher, rank = (launcher.local_size, launcher.rank) if launcher else (0, 0)
    share = processors or len(os.sched_getaffinity(0)) / max(1, of_launcher)
    network = (
        TrainingNetwork(parse_link(link).rate, delay or 0.0, ranks or 2, rank) if link else _measured_network(share)
    )
    if network.rank == 0 and step is not None:
        whole, rest = divmod(parameters or 0, _ARRAY)
        shapes = model if model is not None else [(1, _ARRAY)] * whole + [(1, rest)] * (rest > 0)
        computation = estimated(shapes, step, int(bucket_cap_mb * (1 << 20)))
        try:
            _report(Step(computation, network.ranks, network.rate, share, network.delay), network, specs, load, path)
        except ArgumentError as error:
            raise click.UsageError(str(error)) from error


def _measured_network(processors: float) -> TrainingNetwork:
    """Collective: find the rate and the delay that explain the measured times of calls without a codec.

    Calls of one element give the time of a message. Larger calls give the rate: they grow until they take 0.1 s, to
    16 MiB at most. The least of several times counts, and of these the mean over the ranks, because the ranks begin a
    call at different times.
    """
    try:
        with init("host") as comm:
            x = np.zeros(_LAST_NBYTES // FLOAT32.itemsize, np.float32)

            def timed(nbytes: int, algorithm: str, times: int) -> tuple[float, float]:
                """The least and the median time of a call, from bursts of calls."""
                found = []
                for _ in range(times):
                    begin = time.perf_counter()
                    for _ in range(_BURST):
                        comm.quantized_allreduce(x[: nbytes // FLOAT32.itemsize], codec=FP32, algorithm=algorithm)
                    found.append((time.perf_counter() - begin) / _BURST)
                text = f"{min(found)!r} {statistics.median(found)!r}".encode()
                both = [each.decode().split() for each in comm.allgather(text)]
                return statistics.fmean(float(each[0]) for each in both), statistics.fmean(
                    float(each[1]) for each in both
                )

            timed(FLOAT32.itemsize, "one_shot", 1)
            message, _ = timed(FLOAT32.itemsize, "one_shot", _TIMES)
            nbytes = _FIRST_NBYTES
            while nbytes < _LAST_NBYTES and timed(nbytes, "two_round", 1)[0] < _ENOUGH_SECONDS + _LATE * message:
                nbytes *= 4
            whole, median = timed(nbytes, "two_round", _TIMES)
            delay = max(0.0, message - constants_of(processors).latency)
            rate = rate_of(whole, nbytes, comm.size, processors, delay) if comm.rank == 0 else 0.0
            source = f"measured by calls of {nbytes >> 10} KiB"
            return TrainingNetwork(rate, delay, comm.size, comm.rank, source, median / whole)
    except QcclError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _report(step: Step, network: TrainingNetwork, specs: Sequence[str], load: float, path: str | None) -> None:
    """Print the table and the recommendation, and write the figures; ``load``: the load before the measurements."""
    count = _TIMED_NBYTES // FLOAT32.itemsize
    speeds = {spec: measure_speed(codec_of(spec), count) for spec in dict.fromkeys([FP32, FP16, *specs])}
    costs = [cost_of(step, spec, speed) for spec, speed in speeds.items()]
    doubts = list(_doubts(load, network, speeds))
    for line in (
        *_head(step, network),
        *_table(costs),
        f"# Recommendation: {recommendation(costs)}",
        *(f"# Doubtful: {doubt}" for doubt in doubts),
    ):
        click.echo(line)
    if path is not None:
        about = {"qccl_version": __version__, "step": asdict(step), "network": asdict(network)}
        found = {"recommendation": recommendation(costs), "costs": [asdict(cost) for cost in costs], "doubts": doubts}
        write_json(path, about | found)
        click.echo(f"# Wrote {path}")


def _doubts(load: float, network: TrainingNetwork, speeds: Mapping[str, CodecSpeed]) -> Iterator[str]:
    """Yield signs that other programs disturbed the measurements, although the least of several times counts."""
    processors = os.cpu_count() or 1
    if load > _LOAD * processors:
        yield (
            f"a load of {load:.1f} on {processors} processors before the measurements; the times of codecs and of the "
            f"network may be too long: measure again on an idle machine"
        )
    spreads = {"the network": network.spread}
    spreads |= {_NAMES.get(spec, spec): speed.spread for spec, speed in speeds.items()}
    what, spread = max(spreads.items(), key=lambda each: each[1])
    if spread > _SPREAD:
        yield (
            f"the measurements of {what} have a median of {spread:.1f} times the least time, which counts; "
            f"measure again on an idle machine"
        )


def recommendation(costs: Sequence[StepCost]) -> str:
    """Recommend the codec with the least error among the codecs that are about as fast as the fastest, with reasons.

    Only fp32, fp16 and codecs whose quality was shown count. The first of ``costs`` is the cost of fp32.
    """
    plain, shown = costs[0], [cost for cost in costs if cost.codec in SHOWN]
    fastest = min(shown, key=lambda cost: cost.overlapped)
    limit = fastest.overlapped * (1 + _WORTH)
    if plain.overlapped <= limit:
        saved = 1 - fastest.overlapped / plain.overlapped
        return (
            f"do nothing, because compression does not pay here: a step of fp32 takes {_ms(plain.overlapped)} ms, and "
            f"no codec would save more than {saved:.0%} of it"
        )
    limit = min(limit, plain.overlapped / (1 + _WORTH))  # a codec that is hardly faster than fp32 is not worth a change
    best = min((cost for cost in shown if cost.overlapped <= limit), key=lambda cost: cost.error)
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
            f". {first.codec} would take {_ms(first.overlapped)} ms, but docs/results.md does not show that "
            f"it trains as well as fp32: try it on your training first"
        )
    return text


def _head(step: Step, network: TrainingNetwork) -> Iterator[str]:
    own = step.computation
    total, arrays = sum(g.count for g in own.gradients), len(own.gradients)
    yield (
        f"# qccl-bench {__version__} doctor: {total} gradients in {arrays} array{'s' if arrays > 1 else ''} "
        f"({total * FLOAT32.itemsize / 1e6:.1f} MB as float32), {step.ranks} ranks"
    )
    link = f"{step.rate * 8e-6:.4g} Mbit/s in each direction of a rank"
    yield f"# link: {link}, {step.delay * 1e3:.3g} ms from one rank to another ({network.source})"
    parts = f"forward {_ms(own.forward)}, backward {_ms(own.backward)}, optimiser {_ms(own.optimiser)} ms"
    yield f"# computation of a step: {_ms(own.seconds)} ms: {parts} (estimated, and when each gradient is ready)"
    yield f"# processors of a rank: {step.processors:g}"
    yield "# measured: the codecs on one core of this machine; error: relative L2 error of one encoding of Gaussian"
    yield "#           values (+ef adds it to the next step)"
    yield "# computed: sent, link: the bytes of a step's calls, and their time on the link; calls: time of a processor"
    yield "#           for them; step: the time with communication after the backward pass, and beside it, as"
    yield "#           DistributedDataParallel runs it"
    yield "# shown:    whether it reached fp32's quality in about as many steps in docs/results.md"
    yield "#"
    yield f"#{'':>9} {'':>9} {'':>9} {'step without overlap':^25} {'step with overlap':^25}"
    columns = f"{'ms':>9} {'vs fp32':>7} {'vs fp16':>7}"
    yield f"#{'sent MB':>9} {'link ms':>9} {'calls ms':>9} {columns} {columns} {'error':>9} {'shown':>5}  codec"


def _table(costs: Sequence[StepCost]) -> Iterator[str]:
    fp32, fp16 = costs[:2]
    for cost in costs:
        columns = [f"{cost.sent / 1e6:>10.3f}", f"{_ms(cost.link):>9}", f"{_ms(cost.processor):>9}"]
        for name in ("alone", "overlapped"):
            own, plain, half = (getattr(each, name) for each in (cost, fp32, fp16))
            columns += [f"{_ms(own):>9}", f"{plain / own:>7.2f}", f"{half / own:>7.2f}"]
        shown = "yes" if cost.codec in SHOWN else "no"
        yield " ".join(columns) + f" {cost.error:>9.2e} {shown:>5}  {_NAMES.get(cost.codec, cost.codec)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
