"""``qccl-bench doctor``: what a training step would cost with each codec, before anything is changed."""

from __future__ import annotations

import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

import qccl
from qccl.bench.codec import time_operations
from qccl.bench.data import empty, gaussian
from qccl.bench.files import write_json
from qccl.bench.launched import LaunchedCommand, check_other_ranks
from qccl.bench.params import codec_list, codec_of, option, output_file
from qccl.bench.sizes import parse_link, parse_seconds, parse_size
from qccl.codecs.base import Codec
from qccl.codecs.feedback import momentum_of
from qccl.dtypes import FLOAT32
from qccl.errors import QcclError
from qccl.launchers import detect

__all__ = ["Cost", "Speed", "Step", "cost_of", "doctor", "measure_speed", "recommendation"]

#: what a step costs without a codec, and with 16 bits, which any library can send
FP32, FP16 = "none", "cast"
_NAMES = {FP32: "none (fp32)", FP16: "cast (fp16)"}
_DEFAULT_CODECS = "minmax8,minmax4+ef,trellis4+ef,onebit:reconstruct=mean+ef,topk:k=0.01+ef"
#: the part of the computation in which gradients become ready, so that communication can run beside it
_BACKWARD = 2 / 3
#: a gain of less than this is not worth a change, nor a larger error
_WORTH = 0.05
#: bytes of values whose encoding is timed, and of the call that measures the link
_TIMED_NBYTES, _CALL_NBYTES = 4 << 20, 16 << 20
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}

_SIZES_HELP = "Bytes of the float32 gradients, array by array, e.g. 4M,1M,64K."
_MODEL_HELP = "A function of yours that returns a PyTorch module, whose gradients are counted."
_MEASURE_HELP = "Measure the link with the ranks of a launcher, such as mpiexec -n 4 qccl-bench doctor --measure ..."
_CODEC_HELP = f"Codecs to compare with fp32 and fp16 [{_DEFAULT_CODECS}]."


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        counts: elements of each gradient.
        ranks: their number.
        rate: bytes per second of each rank's link, in each direction.
        computation: seconds of a step without communication.
    """

    counts: tuple[int, ...]
    ranks: int
    rate: float
    computation: float


@dataclass(frozen=True)
class Speed:
    """A codec on one core: seconds to encode and to decode an element, and the relative L2 error of Gaussian values."""

    encode: float
    decode: float
    error: float


@dataclass(frozen=True)
class Cost:
    """A step with one codec; all times are seconds.

    Attributes:
        codec: its specification.
        sent: bytes that each rank sends, computed.
        link: time of these bytes at the link's rate, computed.
        processor: time to encode and decode, from speeds that were measured on one core.
        alone: the step if communication follows computation.
        overlapped: the step if communication runs beside the backward pass.
        error: relative L2 error of one encoding of Gaussian values, measured.
    """

    codec: str
    sent: float
    link: float
    processor: float
    alone: float
    overlapped: float
    error: float


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


def parse_model(text: str) -> tuple[int, ...]:
    """The numbers of elements of the gradients of the model that ``module:function`` returns. Raises ValueError."""
    module, colon, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        model: Any = getattr(importlib.import_module(module), name)() if colon else None
    except TypeError as error:
        raise ValueError(f"{text!r} cannot be called without arguments ({error}); name a function of none") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{text!r} cannot be imported ({error}); give a module in this folder or on PYTHONPATH"
        ) from error
    if not hasattr(model, "parameters"):
        raise ValueError(f"{text!r} gives no PyTorch module; write module:function, and let it return the module")
    return tuple(p.numel() for p in model.parameters() if p.requires_grad)


@click.command(cls=LaunchedCommand, short_help="Compute what a training step would cost with each codec.")
@option("--sizes", parse_sizes, "LIST", _SIZES_HELP)
@option("--parameters", parse_count, "N", "Or the number of parameters, e.g. 124M.")
@option("--model", parse_model, "MODULE:FUNCTION", f"Or: {_MODEL_HELP}")
@option("--ranks", click.IntRange(min=2), "N", "Ranks of the training [2; with --measure those of the launcher].")
@option("--link", lambda text: parse_link(text).name, "RATE", "Rate of each rank's link, e.g. 100mbit or 1gbit.")
@click.option("--measure", is_flag=True, help=_MEASURE_HELP)
@option("--step", parse_seconds, "TIME", "Time of a step on one rank, without communication, e.g. 250ms.")
@option("--codec specs", codec_list, "LIST", _CODEC_HELP, _DEFAULT_CODECS)
@option("-J --json path", output_file, "FILE", "Write the figures.")
def doctor(
    sizes: tuple[int, ...] | None,
    parameters: int | None,
    model: tuple[int, ...] | None,
    ranks: int | None,
    link: str | None,
    measure: bool,
    step: float | None,
    specs: Sequence[str],
    path: str | None,
) -> None:
    """Compute what a data-parallel training step would cost with each codec, and recommend one, or none.

    For example: qccl-bench doctor --parameters 124M --ranks 4 --link 1gbit --step 250ms

    Communication is the time of an all-reduce's bytes at the link's rate, or of encoding and decoding if that is
    longer. The rate is --link's or measured; encoding and decoding are measured on one core of this machine.
    """
    given = [each for each in (sizes, None if parameters is None else (parameters,), model) if each is not None]
    wanted = {
        "give the gradients once: --sizes, --parameters or --model": len(given) == 1,
        "give the network once: --link RATE, or --measure under a launcher": (link is None) == measure,
        "--step is missing: the time of a training step on one rank, such as --step 250ms": step is not None,
    }
    if missing := [text for text, is_there in wanted.items() if not is_there]:
        raise click.UsageError("; ".join(missing))
    assert step is not None
    launcher = detect()
    if measure and (launcher is None or launcher.size < 2):
        raise click.UsageError("--measure needs several ranks: mpiexec -n 4 qccl-bench doctor --measure ...")
    if measure and ranks not in (None, launcher and launcher.size):
        raise click.UsageError(f"--ranks {ranks}, but the launcher has started others; leave --ranks out")
    if launcher is not None:
        check_other_ranks(launcher)
    rate, size, rank, source = 0.0, ranks or 2, launcher.rank if launcher else 0, "--link"
    if link is not None:
        rate = parse_link(link).rate
    else:
        rate, size, rank = _measured(sum(given[0]))
        source = "measured: a plain all-reduce among these ranks"
    if rank == 0:
        _report(Step(given[0], size, rate, step), specs, source, path)


def _measured(elements: int) -> tuple[float, int, int]:
    """Collective: the rate of the link by a plain all-reduce, the number of ranks, and this rank."""
    try:
        with qccl.init("host") as comm:
            x = np.zeros(min(elements, _CALL_NBYTES // FLOAT32.itemsize), np.float32)
            times = []
            for _ in range(6):
                comm.barrier()
                begin = time.perf_counter()
                comm.quantized_allreduce(x, codec=FP32, algorithm="two_round")
                times.append(time.perf_counter() - begin)
            mine = statistics.median(times[1:])
            slowest = max(float(each) for each in comm.allgather(repr(mine).encode()))
            return _sent(x.nbytes, comm.size) / slowest, comm.size, comm.rank
    except QcclError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _report(step: Step, specs: Sequence[str], source: str, path: str | None) -> None:
    """Print the table and the recommendation, and write the figures."""
    named = dict.fromkeys([FP32, FP16, *specs])
    count = min(sum(step.counts), _TIMED_NBYTES // FLOAT32.itemsize)
    costs = [cost_of(step, spec, measure_speed(codec_of(spec), count)) for spec in named]
    for line in (*_head(step, source), *_table(costs), "#", f"# Recommendation: {recommendation(costs)}"):
        click.echo(line)
    if path is not None:
        found = {"recommendation": recommendation(costs), "costs": [asdict(cost) for cost in costs]}
        write_json(path, {"qccl_version": qccl.__version__, "step": asdict(step), **found})
        click.echo(f"# Wrote {path}")


def cost_of(step: Step, spec: str, speed: Speed) -> Cost:
    """The cost of a step with a codec of this speed."""
    codec = codec_of(spec)
    encoded = sum(codec.encoded_nbytes(count, FLOAT32) for count in step.counts)
    sent = _sent(encoded, step.ranks)
    # a rank encodes its values for the others and the sum of its shard; it decodes what it receives, and its own sum
    processor = sum(step.counts) * (speed.encode + (2 * step.ranks - 1) / step.ranks * speed.decode)
    communication = max(sent / step.rate, processor)  # chunks let the link and the processor work at the same time
    beyond = max(0.0, communication - _BACKWARD * step.computation)
    alone, overlapped = step.computation + communication, step.computation + beyond
    return Cost(spec, sent, sent / step.rate, processor, alone, overlapped, speed.error)


def _sent(encoded: float, ranks: int) -> float:
    """Bytes that a rank sends in a two-round all-reduce of a vector that takes ``encoded`` bytes."""
    return 2 * (ranks - 1) / ranks * encoded


def measure_speed(codec: Codec, count: int) -> Speed:
    """Time the codec's kernels on ``count`` values; an encoder with state updates it."""
    from qccl import _host

    values, decoded = gaussian(0, 0, count, FLOAT32, seed=0), empty(count, FLOAT32)
    state = [np.zeros(count, np.float32) for _ in range(4)]  # old and new residual, old and new momentum
    wire = np.empty(codec.encoded_nbytes(count, FLOAT32), np.uint8)
    memory = _host.Memory(7)
    for i, array in enumerate((values, decoded, wire, *state)):
        memory[i] = array.ctypes.data
    kernel, code = codec.host(), FLOAT32.code
    decode = _host.Decode(memory, kernel, code, (2, 0), (1, 0), count, False)
    encode: _host.Operation = _host.Encode(memory, kernel, code, (0, 0), (2, 0), count, 0, 0, 0)
    encode()
    decode()
    error = float(np.linalg.norm(decoded - values) / np.linalg.norm(values))
    if codec.state_names:
        residual = ((3, 0), (4, 0)) if "residual" in codec.state_names else None
        momentum = ((5, 0), (6, 0)) if "momentum" in codec.state_names else None
        encode = _host.Reduce(
            *(memory, kernel, code, [], (0, 0), 0, (2, 0), None, count, 0, 1.0, 0, 0, 0),
            residual=residual,
            momentum=momentum,
            mu=momentum_of(codec),
        )
    times = time_operations({"encode": encode, "decode": decode}, 5, 1)
    return Speed(statistics.median(times["encode"]) / count, statistics.median(times["decode"]) / count, error)


def recommendation(costs: Sequence[Cost]) -> str:
    """The codec with the least error among those that are about as fast as the fastest, with the reason.

    ``costs`` begin with that of fp32.
    """
    plain, fastest = costs[0], min(costs, key=lambda cost: cost.overlapped)
    limit = fastest.overlapped * (1 + _WORTH)
    if plain.overlapped <= limit:
        saved = 1 - fastest.overlapped / plain.overlapped
        return (
            f"do nothing, because communication is no bottleneck: with overlap a step of fp32 takes "
            f"{_ms(plain.overlapped)} ms, and no codec would save more than {saved:.0%} of it"
        )
    best = min((cost for cost in costs if cost.overlapped <= limit), key=lambda cost: cost.error)
    text = (
        f"{_NAMES.get(best.codec, best.codec)}, because with overlap a step takes {_ms(best.overlapped)} ms instead of "
        f"{_ms(plain.overlapped)} with fp32 ({plain.overlapped / best.overlapped:.1f} times as fast)"
    )
    if best is fastest:
        return f"{text}; every codec with a smaller error takes at least {_WORTH:.0%} longer"
    return f"{text}; {fastest.codec}, the fastest, takes {_ms(fastest.overlapped)} ms and has a larger error"


def _head(step: Step, source: str) -> Iterator[str]:
    total, arrays = sum(step.counts), len(step.counts)
    yield (
        f"# qccl-bench {qccl.__version__} doctor: {total} gradients in {arrays} array{'s' if arrays > 1 else ''} "
        f"({total * FLOAT32.itemsize / 1e6:.1f} MB as float32), {step.ranks} ranks"
    )
    yield f"# link: {step.rate * 8 / 1e6:.0f} Mbit/s in each direction of a rank ({source})"
    yield f"# computation of a step: {_ms(step.computation)} ms (--step)"
    yield "# measured: codec: encoding and decoding, on one core of this machine; error: relative L2 error of one"
    yield "#           encoding of Gaussian values (+ef adds it to the next step; check the accuracy of your training)"
    yield "# computed: sent, link: the bytes of an all-reduce, and their time at the link's rate; step: the computation"
    yield "#           plus the longer of link and codec; with overlap these two run beside the backward pass, which is"
    yield "#           taken as two thirds of the computation"
    yield "#"
    yield f"#{'':>9} {'':>9} {'':>9} {'step without overlap':^25} {'step with overlap':^25}"
    columns = f"{'ms':>9} {'vs fp32':>7} {'vs fp16':>7}"
    yield f"#{'sent MB':>9} {'link ms':>9} {'codec ms':>9} {columns} {columns} {'error':>9}  codec"


def _table(costs: Sequence[Cost]) -> Iterator[str]:
    fp32, fp16 = costs[:2]
    for cost in costs:
        columns = [f"{cost.sent / 1e6:>10.3f}", f"{_ms(cost.link):>9}", f"{_ms(cost.processor):>9}"]
        for name in ("alone", "overlapped"):
            own, plain, half = (getattr(each, name) for each in (cost, fp32, fp16))
            columns += [f"{_ms(own):>9}", f"{plain / own:>7.2f}", f"{half / own:>7.2f}"]
        yield " ".join(columns) + f" {cost.error:>9.2e}  {_NAMES.get(cost.codec, cost.codec)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
