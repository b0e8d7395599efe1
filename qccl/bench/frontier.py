"""``qccl-bench codec --frontier``: codecs' errors over bytes, compared with other systems and Shannon's bound."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from qccl import codecs
from qccl.bench.params import codec_of
from qccl.bench.peers import PEERS
from qccl.bench.samples import SAMPLES, relative_error
from qccl.codecs import Codec
from qccl.files import writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COUNT", "DRAWS", "FRONTIER", "Point", "cell", "measure", "shannon", "table", "write_rows"]

#: elements of a sample: whole buckets of every codec
COUNT = 1 << 20

#: the comments around the table in a page
BEGIN, END = "<!-- measured by qccl-bench codec --frontier -->", "<!-- end of qccl-bench codec --frontier -->"

#: default number of draws of each sample
DRAWS = 5

#: options with which a codec of 1 to 8 bits is compared a second time
_VARIANTS = {"trellis": (":block=512,outliers=1",), "minmax": (":bucket=64",)}


def _compared() -> Iterator[str]:
    """The specifications of every lossy codec: with each number of bits, or its examples."""
    for name, kind in codecs.CODECS.items():
        if hasattr(kind, "bits") and not isinstance(kind.bits, property):
            yield from (f"{name}{bits}{more}" for more in ("", *_VARIANTS.get(name, ())) for bits in range(1, 9))
        elif name != "none":
            yield from kind.examples or (name,)


#: compared by default
FRONTIER = tuple(_compared())


@dataclass(frozen=True)
class Point:
    """A codec, of qccl or another system: its bytes per element and relative L2 errors on each sample.

    Attributes:
        errors: the median of all draws, by sample.
        ranges: minimum and maximum, by sample.
    """

    name: str
    ours: bool
    density: float
    errors: dict[str, float]
    ranges: dict[str, tuple[float, float]]

    @property
    def family(self) -> str:
        """The name of the line in the chart: the specification without the bits, or the system."""
        if not self.ours:
            return self.name.split()[0]
        name, colon, options = self.name.partition(":")
        return name.rstrip("0123456789") + colon + options


def shannon(density: float) -> float:
    """Shannon's bound: the smallest possible relative L2 error on Gaussian values at ``density`` bytes per element.

    The distortion-rate function of a Gaussian source (Cover and Thomas 2006, theorem 10.3.2).
    """
    return float(2.0 ** (-8 * density))


def measure(specs: Sequence[str] = FRONTIER, count: int = COUNT, draws: int = DRAWS) -> list[Point]:
    """Measure the codecs and other systems' formulas on all samples; returns points ordered by bytes."""
    coders = [*_ours(specs, count), *_peers(count)]
    found: list[dict[str, list[float]]] = [{name: [] for name in SAMPLES} for _ in coders]
    for name, make in SAMPLES.items():
        for draw in range(draws):
            x = make(count, draw)
            for coder, errors in zip(coders, found, strict=True):
                errors[name].append(relative_error(coder.decoded(x), x))
    points = [coder.point(errors) for coder, errors in zip(coders, found, strict=True)]
    return sorted(points, key=lambda p: (p.density, p.name))


@dataclass(frozen=True)
class _Coder:
    """A function that encodes and decodes, with its name and size."""

    name: str
    ours: bool
    density: float
    decoded: Callable[[NDArray[np.float32]], NDArray[np.float32]]

    def point(self, errors: dict[str, list[float]]) -> Point:
        """The median and range of the errors of all draws."""
        medians = {name: statistics.median(each) for name, each in errors.items()}
        ranges = {name: (min(each), max(each)) for name, each in errors.items()}
        return Point(self.name, self.ours, self.density, medians, ranges)


def _ours(specs: Sequence[str], count: int) -> Iterator[_Coder]:
    def through(codec: Codec, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return codec.decode(codec.encode(x), x.size, "float32")

    for codec in map(codec_of, specs):
        yield _Coder(codec.spec(), True, codec.encoded_nbytes(count, "float32") / count, partial(through, codec))


def _peers(count: int) -> Iterator[_Coder]:
    return (_Coder(peer.name, False, peer.nbytes(count) / count, peer.decode) for peer in PEERS)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Lines of text: medians, and ranges if draws differ by over 10%. Other systems' names are in brackets."""
    rows = [["codec", "B/element", "Shannon", *SAMPLES]]
    for p in points:
        cells = [cell(p.errors[name], *p.ranges[name]) for name in SAMPLES]
        rows.append([p.name if p.ours else f"[{p.name}]", f"{p.density:.4f}", f"{shannon(p.density):.5f}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        aligned = (f"{each:>{width}}" for each, width in zip(others, widths[1:], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *aligned])


def write_rows(page: str, points: Sequence[Point]) -> None:
    """Put the points into the Markdown table of a page, between the comments BEGIN and END, in the order of bytes.

    A row of the same codec is replaced, the others stay. Raises UsageError if the page has no such comments.
    """
    before, old, after = split_page(page)
    head = _markdown(["codec", "B/element", "Shannon", *SAMPLES]), _markdown(["---"] * (3 + len(SAMPLES)))
    rows = {line.split(" | ")[0]: line for line in old.split("\n") if line.startswith("| ") and line not in head}
    rows |= {line.split(" | ")[0]: line for line in map(_markdown, map(_cells, points))}
    ordered = sorted(rows.values(), key=lambda line: (float(line.split(" | ")[1]), line.split(" | ")[0].strip("| `()")))
    table = "\n".join([*head, *ordered])
    with writing(page) as file:
        file.write(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}".encode())


def split_page(page: str) -> tuple[str, str, str]:
    """The text of a page before, between and behind the comments. Raises UsageError if it has none."""
    try:
        text = Path(page).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"--write {page}: the page cannot be read ({error})") from error
    before, found, rest = text.partition(BEGIN)
    between, closed, after = rest.partition(END)
    if not (found and closed):
        raise click.UsageError(
            f"--write {page}: it has no lines {BEGIN!r} and {END!r}; put them around the table's place"
        )
    return before, between, after


def _cells(p: Point) -> list[str]:
    """A row of a page: the errors have as many digits as draws agree in."""
    errors = [cell(p.errors[name], *p.ranges[name]) for name in SAMPLES]
    return [f"`{p.name}`" if p.ours else f"({p.name})", f"{p.density:.4f}", f"{shannon(p.density):.5f}", *errors]


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(median: float, least: float, greatest: float) -> str:
    """An error, rounded to the digits in which draws agree."""
    if greatest <= 1.1 * least:
        return _rounded(median, 3)
    return f"{_rounded(median, 2)} ({_rounded(least, 2)} to {_rounded(greatest, 2)})"


def _rounded(error: float, digits: int) -> str:
    """An error with ``digits`` digits, without an exponent."""
    return np.format_float_positional(error, digits, unique=False, fractional=False, trim="-")
