"""``qccl-bench codec --frontier``: errors of codecs against their bytes, beside other systems' and Shannon's bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qccl import codecs
from qccl.bench.peers import PEERS
from qccl.bench.samples import SAMPLES, relative_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COUNT", "FRONTIER", "Point", "measure", "shannon", "table"]

#: elements that errors are measured on: whole buckets of every codec that is compared
COUNT = 1 << 20

_FAMILIES = (("trellis", ""), ("trellis", ":block=512,outliers=1"), ("minmax", ""), ("minmax", ":bucket=64"))

#: the codecs that are compared unless others are asked for
FRONTIER = (
    *(f"{family}{bits}{options}" for family, options in _FAMILIES for bits in range(1, 9)),
    "onebit:reconstruct=mean",
)


@dataclass(frozen=True)
class Point:
    """A codec, ours or another system's: bytes per element, and the relative L2 error on each sample."""

    name: str
    ours: bool
    density: float
    errors: dict[str, float]

    @property
    def family(self) -> str:
        """What is drawn as one: the specification without the bits, or the system."""
        if not self.ours:
            return self.name.split()[0]
        name, colon, options = self.name.partition(":")
        return name.rstrip("0123456789") + colon + options


def shannon(density: float) -> float:
    """No code of so many bytes per element has a smaller error on Gaussian values."""
    return float(2.0 ** (-8 * density))


def measure(specs: Sequence[str] = FRONTIER, count: int = COUNT) -> list[Point]:
    """One encode and decode of each sample by the codecs and by other systems' formulas, ordered by bytes."""
    samples = {name: make(count) for name, make in SAMPLES.items()}
    return sorted([*_ours(specs, samples, count), *_peers(samples, count)], key=lambda p: (p.density, p.name))


def _ours(specs: Sequence[str], samples: dict[str, NDArray[np.float32]], count: int) -> Iterator[Point]:
    for spec in specs:
        codec = codecs.get(spec)
        errors = {
            name: relative_error(codec.decode(codec.encode(x), count, "float32"), x) for name, x in samples.items()
        }
        yield Point(codec.spec(), True, codec.encoded_nbytes(count, "float32") / count, errors)


def _peers(samples: dict[str, NDArray[np.float32]], count: int) -> Iterator[Point]:
    for peer in PEERS:
        errors = {name: relative_error(peer.decode(x), x) for name, x in samples.items()}
        yield Point(peer.name, False, peer.nbytes(count) / count, errors)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Lines of text. Other systems' names are in brackets."""
    names = list(SAMPLES)
    widths = [max(len(name), 9) for name in names]
    heads = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    yield f"{'codec':<28} {'B/element':>9} {'Shannon':>8}  {heads}"
    for p in points:
        name = p.name if p.ours else f"[{p.name}]"
        errors = "  ".join(f"{p.errors[n]:>{width}.5f}" for n, width in zip(names, widths, strict=True))
        yield f"{name:<28} {p.density:>9.4f} {shannon(p.density):>8.5f}  {errors}"
