"""``qccl-bench codec``: the speed of codecs' kernels on one core compared with memcpy, and the codecs' errors."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click

from qccl import codecs
from qccl.base import __version__, dtypes
from qccl.base.dtypes import DType
from qccl.bench.options import DTYPES
from qccl.bench.params import (
    AT_LEAST_0,
    AT_LEAST_1,
    codec_list,
    codec_of,
    list_of,
    option,
    output_file,
    parse_size,
    write_json,
)
from qccl.codecs import Codec
from qccl.codecs.operations import Operations, copy, instruction_set

__all__ = ["DEFAULT_CODECS", "CodecRow", "codec", "measure_codec", "time_operations"]

#: the default of --codec
DEFAULT_CODECS = ",".join(codecs.examples())
#: encoded inputs that a reduce combines
_SOURCES = 3
_JSON_HELP = "Write the figures, after each row."


@dataclass(frozen=True)
class CodecRow:
    """One line of the table; seconds are medians of passes over ``nbytes`` bytes of values.

    Attributes:
        wire_nbytes: the encoded size.
        error: relative L2 error of one encode and decode of Gaussian values.
        slow: the codec consists of Python functions, which use one thread.
        sources: number of encoded inputs that the reduce combines with the rank's own values.
        copy: seconds of memcpy, measured in turns with the operations.
    """

    codec: str
    dtype: str
    nbytes: int
    wire_nbytes: int
    error: float
    slow: bool
    sources: int
    encode: float
    decode: float
    reduce: float
    copy: float

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that each operation must read and write."""
        both = self.nbytes + self.wire_nbytes
        return {
            "encode": both,
            "decode": both,
            "reduce": self.sources * self.wire_nbytes + self.nbytes + both,  # codes, own; wire and value of the sum
            "copy": 2 * self.nbytes,
        }

    def share(self, operation: str) -> float:
        """The rate at which ``operation`` moves its bytes, divided by memcpy's."""
        seconds: float = getattr(self, operation)
        return self.moved[operation] / seconds / (self.moved["copy"] / self.copy)


@click.command(short_help="Time the kernels of codecs beside memcpy.")
@option("-b --size", parse_size, "SIZE", "Bytes of values [16M].", "16M")
@option("-n --iters", AT_LEAST_1, "N", "Timed passes [20].", 20)
@option("-w --warmup_iters", AT_LEAST_0, "N", "Passes before them [2].", 2)
@option("-d --datatype names", list_of(tuple(DTYPES)), "LIST", f"{', '.join(DTYPES)} or all [all].", "all")
@option("--codec specs", codec_list, "LIST", f"Codecs to measure [{DEFAULT_CODECS}].", DEFAULT_CODECS)
@option("-J --json path", output_file, "FILE", _JSON_HELP)
def codec(
    size: int,
    iters: int,
    warmup_iters: int,
    names: Sequence[str],
    specs: Sequence[str],
    path: str | None,
) -> None:
    """Time encode, decode and the fused reduce of each codec, in turns with memcpy on one core.

    GB/s count the values. "share" is the rate of all bytes that an operation moves, divided by memcpy's rate. A reduce
    combines 3 encoded inputs and the own values, encodes the sum and writes the decoded sum.
    """
    try:
        isa = instruction_set()
    except ImportError as error:
        raise click.ClickException(f"the host extension cannot be loaded ({error}); install qccl again") from error
    if size < 4:
        raise click.UsageError(f"-b {size} has no whole element; give 4 or more")
    click.echo(f"# qccl-bench {__version__} codec, {size} bytes, {iters} passes, kernels for {isa}, one core\n#")
    click.echo("\n".join(_header()))
    results: list[dict[str, Any]] = []
    document = {"qccl_version": __version__, "isa": isa, "threads": 1, "results": results}
    for spec, name in itertools.product(specs, names):
        dtype = dtypes.get(DTYPES[name])
        speed = measure_codec(codec_of(spec), dtype, size, iters, warmup_iters)
        click.echo(_line(speed, name))
        shares = {op: speed.share(op) for op in ("encode", "decode", "reduce")}
        results.append(asdict(speed) | {"share": shares})
        if path is not None:
            write_json(path, document)
    if path is not None:
        click.echo(f"# Wrote {path}")


def measure_codec(codec: Codec, dtype: DType, size: int, iters: int, warmups: int) -> CodecRow:
    """Time the codec's kernels on about ``size`` bytes of Gaussian values."""
    import numpy as np

    from qccl.bench.sweep.data import empty, gaussian
    from qccl.codecs.floats import to_float32

    count = size // dtype.itemsize
    wire_nbytes = codec.encoded_nbytes(count, dtype)
    values, decoded, copied = (gaussian(0, 0, count, dtype, seed=0), empty(count, dtype), empty(count, dtype))
    wires = [np.empty(wire_nbytes, np.uint8) for _ in range(_SOURCES + 1)]
    kernels = Operations(codec, dtype, threads=1)
    for rank, wire in enumerate(wires):
        kernels.encode(values, wire, (0, 0, rank))()
    operations: dict[str, Callable[[], object]] = {
        "encode": kernels.encode(values, wires[0]),
        "decode": kernels.decode(wires[0], decoded),
        "reduce": kernels.reduce(wires[1:], values, wires[0], copied, place=(0, 1, 0)),
        "copy": partial(copy, values, copied),
    }
    seconds = {name: statistics.median(each) for name, each in time_operations(operations, iters, warmups).items()}
    operations["encode"]()
    operations["decode"]()
    exact = to_float32(values, dtype).astype(np.float64)
    error = float(np.linalg.norm(to_float32(decoded, dtype) - exact) / np.linalg.norm(exact))
    nbytes = count * dtype.itemsize
    return CodecRow(codec.spec(), dtype.name, nbytes, wire_nbytes, error, codec.plain.slow, _SOURCES, **seconds)


def time_operations(operations: dict[str, Callable[[], object]], iters: int, warmups: int) -> dict[str, list[float]]:
    """The seconds of each operation's passes.

    The operations take turns, so that a disturbance affects all of them, in random order, so that no operation always
    finds its data in the cache.
    """
    found: dict[str, list[float]] = {name: [] for name in operations}
    order = random.Random(0)
    for turn in range(warmups + iters):
        for name, run in order.sample(list(operations.items()), len(operations)):
            begin = time.perf_counter()
            run()
            if turn >= warmups:
                found[name].append(time.perf_counter() - begin)
    return found


def _header() -> Iterator[str]:
    pair = f"{'GB/s':>7} {'share':>6}"
    yield f"#{'':31} {'encode':^14}  {'decode':^14}  {f'reduce {_SOURCES}':^14}  {'memcpy':>7}"
    yield f"#{'type':>9} {'B/element':>10} {'L2 error':>10}  {pair}  {pair}  {pair}  {'GB/s':>7}  codec"
    yield f"#{'':31}  {'':7} {'':6}  {'':7} {'':6}  {'':7} {'':6}  {'rd+wr':>7}"


def _line(s: CodecRow, name: str) -> str:
    marked = f"{s.codec} (Python, slow)" if s.slow else s.codec
    pairs = "  ".join(
        f"{s.nbytes / getattr(s, op) / 1e9:>7.2f} {s.share(op) * 100:>5.1f}%" for op in ("encode", "decode", "reduce")
    )
    density = s.wire_nbytes / (s.nbytes // dtypes.get(s.dtype).itemsize)
    return f"{name:>10} {density:>10.4f} {s.error:>10.2e}  {pairs}  {s.moved['copy'] / s.copy / 1e9:>7.2f}  {marked}"
