"""Compares codecs' errors and bytes with other systems' formulas and Shannon's bound: ``python bench/frontier.py``.

A point is one encode and decode of reproducible samples of several distributions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click
import numpy as np
from runs import print_table, rewrite_table, save_figure, table

from qccl import codecs

__all__ = ["PEERS", "SAMPLES", "SPECS", "Peer", "Point", "cells", "draw", "measure", "relative_error", "shannon"]

f32 = np.float32
#: an array of float32; the type checker cannot follow NumPy's arithmetic
Values = Any
#: elements of a sample: whole buckets of every codec
COUNT = 1 << 20
_OFFSET = 100.0
#: options with which a codec with a number of bits is compared a second time
_VARIANTS = {"trellis": (":block=512,outliers=1",), "minmax": (":bucket=64",), "levels": (":block=64",)}
_BITS = {"levels": range(2, 5)}  # otherwise 1 to 8


def _specs() -> Iterator[str]:
    """Every lossy codec: with each number of bits, or its examples."""
    for name, kind in codecs.CODECS.items():
        if hasattr(kind, "bits") and not isinstance(kind.bits, property):
            numbers = _BITS.get(name, range(1, 9))
            yield from (f"{name}{bits}{more}" for more in ("", *_VARIANTS.get(name, ())) for bits in numbers)
        elif name != "none":
            yield from kind.examples or (name,)


SPECS = tuple(_specs())

# -- samples -----------------------------------------------------------------------------------------------------------


def _gauss(count: int, draw: int = 0) -> Values:
    return np.random.default_rng(draw).standard_normal(count, f32)


def _outliers(count: int, draw: int = 0) -> Values:
    """Each value is independently multiplied by 1000 with a probability of 1e-4."""
    x = _gauss(count, draw)
    x[np.random.default_rng([1, draw]).random(count) < 1e-4] *= 1000
    return x


def _gradient(count: int, draw: int = 0) -> Values:
    """Gradients of a small network's weights, from consecutive steps of its training.

    A network with two hidden ReLU layers learns to classify eight clusters of points; the first 20 steps are left out.
    """
    rng = np.random.default_rng(draw)
    sizes = (32, 128, 128, 8)
    weights = [rng.standard_normal((a, b)) * np.sqrt(2 / a) for a, b in pairwise(sizes)]
    centres = rng.standard_normal((8, 32))
    found = []
    for step in range(20 + -(-count // sum(w.size for w in weights))):
        label = rng.integers(0, 8, 64)
        inputs = [centres[label] + 1.5 * rng.standard_normal((64, 32))]
        for w in weights[:-1]:
            inputs.append(np.maximum(inputs[-1] @ w, 0))
        score = inputs[-1] @ weights[-1]
        chance = np.exp(score - score.max(axis=1, keepdims=True))
        back = (chance / chance.sum(axis=1, keepdims=True) - np.eye(8)[label]) / 64
        for layer in reversed(range(len(weights))):
            gradient = inputs[layer].T @ back
            back = (back @ weights[layer].T) * (inputs[layer] > 0)
            weights[layer] = weights[layer] - 0.1 * gradient
            if step >= 20:
                found.append(gradient.reshape(-1))
    return np.concatenate(found)[:count].astype(f32)


#: name -> function of (count, draw); another draw has other values
SAMPLES: Mapping[str, Callable[..., Values]] = {
    "Gaussian": _gauss,
    "Laplace": lambda count, draw=0: np.asarray(np.random.default_rng(draw).laplace(size=count), f32),
    "Student t(3)": lambda count, draw=0: np.asarray(np.random.default_rng(draw).standard_t(3, size=count), f32),
    f"Gaussian + {_OFFSET:.0f}": lambda count, draw=0: _gauss(count, draw) + f32(_OFFSET),
    "1e-4 of them x1000": _outliers,
    "gradient": _gradient,
}


def relative_error(decoded: Values, x: Values) -> float:
    """L2 norm of the error over the L2 norm of ``x``.

    If the mean of ``x`` is much larger than its deviation, the norm is that of ``x`` less its mean. Otherwise a large
    offset would hide the error.
    """
    exact = x.astype(np.float64)
    mean = float(exact.mean())
    centred = exact - mean if abs(mean) > 10 * float(exact.std()) else exact
    return float(np.linalg.norm(decoded - exact) / np.linalg.norm(centred))


# -- other systems' compressors by their published formulas, rounding to nearest ---------------------------------------


@dataclass(frozen=True)
class Peer:
    """A system's compressor.

    Attributes:
        bits: bits per element.
        bucket: elements that share a header; 0: all elements.
        header: bytes of a header.
        run: maps float32 values to decoded values; both have an axis of buckets and an axis of elements.
    """

    name: str
    bits: int
    bucket: int
    header: int
    run: Callable[[Values], Values]

    def decode(self, x: Values) -> Values:
        """``x`` after encoding and decoding; whole buckets only."""
        return self.run(x.reshape(-1, self.bucket or x.size)).reshape(-1)

    def density(self, count: int) -> float:
        """Bytes per element of ``count`` elements."""
        return self.bits / 8 + self.header / (self.bucket or count)


def _ends(x: Values) -> tuple[Values, Values]:
    return x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)


def _largest(x: Values) -> Values:
    return np.abs(x).max(axis=1, keepdims=True)


def _over(a: Values, b: Values) -> Values:
    """The quotient, or 0 where the divisor is 0."""
    return np.divide(a, b, out=np.zeros_like(b), where=b > 0)


def _cgx(bits: int) -> Callable[[Values], Values]:
    """``unit = (max - min) / (2^b - 1)``, codes ``floor((x - min) / unit + 1/2)``; a range of 0 decodes to ``min``."""

    def run(x: Values) -> Values:
        low, high = _ends(x)
        unit = (high - low) / f32(2**bits - 1)
        codes = np.minimum(np.floor(_over(f32(1), unit) * (x - low) + f32(0.5)), f32(2**bits - 1))
        return np.where(unit < f32(1e-10), low, low + codes * unit)

    return run


def _fbgemm(x: Values) -> Values:
    """FBGEMM's rows: codes of eight bits, scale and bias in fp32 behind each row."""
    low, high = _ends(x)
    scale = (high - low) / f32(255)
    return np.rint((x - low) * _over(f32(1), scale)) * scale + low


def _absmax(x: Values) -> Values:
    """Signed bytes, scaled by the largest magnitude."""
    scale = _largest(x) / f32(127)
    return np.rint(x * _over(f32(1), scale)) * scale


def _bagua(x: Values) -> Values:
    """``s = 255 / (max - min + 1e-7)``; codes ``min(rint(x s), rint(max s))``, less ``rint(max s) - 255``."""
    low, high = _ends(x)
    s = f32(255) / (high - low + f32(1e-7))
    return np.minimum(np.rint(x * s), np.rint(high * s)) / s


def _hivemind(x: Values) -> Values:
    """256 cells of six standard deviations around the mean; each decodes to the mean of its values."""
    centre = x.mean()
    step = f32(6) * x.std() / f32(256)
    codes = np.clip(np.rint((x - centre) / step) + f32(128), 0, 255).astype(np.int64)
    number = np.bincount(codes.reshape(-1), minlength=256)
    total = np.bincount(codes.reshape(-1), weights=x.reshape(-1), minlength=256)
    return (total / np.maximum(number, 1)).astype(f32)[codes]


def _pccl(x: Values) -> Values:
    """One range for all values, in 255 steps; codes are truncated, not rounded."""
    low, high = _ends(x)
    scale = (high - low) / f32(255)
    return np.trunc((x - low) / scale) * scale + low


def _torchft(x: Values) -> Values:
    """float8 e4m3, each row scaled to a largest magnitude of 448."""
    scale = _over(f32(448), _largest(x))
    mantissa, exponent = np.frexp(x * scale)
    place = np.ldexp(f32(1), np.maximum(exponent, -5) - 4)  # three bits of mantissa; subnormals below 2^-6
    rounded = np.rint(np.ldexp(mantissa, exponent) / place) * place
    return _over(f32(1), scale) * np.clip(rounded, -448, 448)


def _deepspeed4(x: Values) -> Values:
    """Sixteen steps over twice the largest magnitude, codes -8 to 7."""
    scale = f32(16) / (f32(2) * _largest(x) + f32(1e-5))
    return np.clip(np.rint(x * scale), -8, 7) / scale


def _cntk(x: Values) -> Values:
    """One bit; each side of zero decodes to its mean."""

    def mean(chosen: Values) -> Values:
        return np.where(chosen, x, 0).sum(axis=1, keepdims=True) / np.maximum(chosen.sum(axis=1, keepdims=True), 1)

    return np.where(x < 0, mean(x < 0), mean(x >= 0)).astype(f32)


def _plus_minus(scale: Values, x: Values) -> Values:
    return np.where(x < 0, -scale, scale)


#: all compressors, with the bucket sizes that their systems use
PEERS = (
    Peer("FBGEMM row 32", 8, 32, 8, _fbgemm),
    Peer("CGX 8 bit / 512", 8, 512, 8, _cgx(8)),
    Peer("int8 absmax / 1024", 8, 1024, 4, _absmax),
    Peer("Bagua", 8, 0, 32, _bagua),
    Peer("hivemind uniform8", 8, 0, 1024, _hivemind),
    Peer("PCCL min-max", 8, 0, 8, _pccl),
    Peer("torchft fp8 / 1024", 8, 1024, 4, _torchft),
    Peer("CGX 4 bit / 1024", 4, 1024, 8, _cgx(4)),
    Peer("DeepSpeed int4 / 2048", 4, 2048, 4, _deepspeed4),
    Peer("CGX 2 bit / 1024", 2, 1024, 8, _cgx(2)),
    Peer("CNTK 1 bit / 1024", 1, 1024, 8, _cntk),
    Peer("BytePS 1 bit", 1, 0, 4, lambda x: _plus_minus(np.abs(x).mean(axis=1, keepdims=True), x)),
    Peer("DeepSpeed 1 bit", 1, 0, 4, lambda x: _plus_minus(np.sqrt(np.square(x).mean(axis=1, keepdims=True)), x)),
)

# -- points ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A codec, of qccl (``ours``) or another system: its bytes per element and, by sample, its errors in all draws."""

    name: str
    ours: bool
    density: float
    errors: dict[str, list[float]]

    @property
    def family(self) -> str:
        """The name of the line in the chart: the specification without the bits, or the system."""
        name, colon, options = self.name.partition(":")
        return name.rstrip("0123456789") + colon + options if self.ours else self.name.split()[0]

    def median(self, sample: str) -> float:
        """The median of the draws' errors."""
        return statistics.median(self.errors[sample])


def shannon(density: float) -> float:
    """Shannon's bound: the smallest possible relative L2 error on Gaussian values at ``density`` bytes per element.

    The distortion-rate function of a Gaussian source (Cover and Thomas 2006, theorem 10.3.2).
    """
    return float(2.0 ** (-8 * density))


def measure(specs: Sequence[str] = SPECS, count: int = COUNT, draws: int = 5) -> list[Point]:
    """Measure the codecs and other systems' formulas on all samples; the points are ordered by bytes."""
    coders: list[tuple[Point, Callable[[Values], Values]]] = []
    for codec in map(codecs.get, specs):
        through = lambda x, codec=codec: codec.decode(codec.encode(x), x.size, "float32")  # noqa: E731
        coders.append((Point(codec.spec(), True, codec.encoded_nbytes(count, "float32") / count, {}), through))
    coders += [(Point(peer.name, False, peer.density(count), {}), peer.decode) for peer in PEERS]
    for name, make in SAMPLES.items():
        for x in (make(count, draw) for draw in range(draws)):
            for point, decoded in coders:
                point.errors.setdefault(name, []).append(relative_error(decoded(x), x))
    return sorted((point for point, _ in coders), key=lambda p: (p.density, p.name))


def cells(p: Point) -> list[str]:
    """A row of the table: medians, and ranges if draws differ by over 10%. Other systems' names are in parentheses."""
    errors = []
    for sample, draws in p.errors.items():
        alike = max(draws) <= 1.1 * min(draws)
        between = "" if alike else f" ({_rounded(min(draws), 2)} to {_rounded(max(draws), 2)})"
        errors.append(_rounded(p.median(sample), 3 if alike else 2) + between)
    return [f"`{p.name}`" if p.ours else f"({p.name})", f"{p.density:.4f}", f"{shannon(p.density):.5f}", *errors]


def _rounded(error: float, digits: int) -> str:
    return np.format_float_positional(error, digits, unique=False, fractional=False, trim="-")


# -- the chart ---------------------------------------------------------------------------------------------------------

#: colours of codecs, the best first; markers of codecs and of other systems
_COLOURS = ("#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00")
_MARKS = ("o", "s", "^", "D", "v", "P")
#: the bytes per element that the chart shows; casts to 16 bits have more
_SHOWN = (0.0, 1.3)
_OTHERS = ("x", "+", "s", "^", "D", "v", "P", "*", "<", ">")


def draw(path: str, points: Sequence[Point]) -> None:
    """Draw errors over bytes as a PNG, in one panel for each sample."""
    from matplotlib.figure import Figure

    families: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        if _SHOWN[0] <= point.density <= _SHOWN[1]:
            families.setdefault((point.ours, point.family), []).append(point)
    # single points last, and lines that are nearer to Shannon's bound first
    best = {f: min(p.median("Gaussian") / shannon(p.density) for p in families[f]) for f in families}
    ours = sorted((f for f in families if f[0]), key=lambda f: (len(families[f]) == 1, best[f]))
    styles = {f: (_COLOURS[i % 6], f"{_MARKS[i // 6 % 6]}-", 4) for i, f in enumerate(ours)}
    others = sorted(f for f in families if not f[0])
    styles |= {f: ("#555555", _OTHERS[i % len(_OTHERS)], 7) for i, f in enumerate(others)}
    figure = Figure(figsize=(7.2, 10.6), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, sample in zip(figure.subplots(3, 2, sharex=True).reshape(-1), SAMPLES, strict=True):
        for family, (colour, style, size) in styles.items():
            x, y = [p.density for p in families[family]], [p.median(sample) for p in families[family]]
            given: dict[str, Any] = {"color": colour, "markersize": size}
            (handles[family[1]],) = axes.plot(x, y, style, linewidth=1.4, markerfacecolor="none", **given)
        if sample.startswith("Gaussian"):
            densities = [i / 50 for i in range(3, 66)]
            (handles["Shannon's bound"],) = axes.plot(densities, [*map(shannon, densities)], "k--", linewidth=1)
        axes.set_title(sample, fontsize=10)
        axes.set_yscale("log")
        axes.set_xlim(*_SHOWN)
        axes.set_ylim(top=min(axes.get_ylim()[1], 15))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.tick_params(labelsize=9)
        axes.grid(True, which="major", alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("bytes per element")
    figure.supylabel("relative L2 error of one encode and decode", fontsize=10)
    save_figure(figure, path)


@click.command()
@click.option("--draws", default=5, show_default=True, help="Draws of each sample.")
@click.option("--plot", help="A picture to write.")
@click.option("--write", help="The page whose table is to be rewritten.")
def main(draws: int, plot: str | None, write: str | None) -> None:
    """Print the median errors of all codecs, and their ranges if draws differ by more than 10%."""
    points = measure(draws=draws)
    head, rows = ("codec", "B/element", "Shannon", *SAMPLES), [*map(cells, points)]
    print_table(head, rows)
    if plot:
        draw(plot, points)
    if write:
        rewrite_table(write, "python bench/frontier.py", "\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
