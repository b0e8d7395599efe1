"""Finds the constants of the codec ``levels`` (kernels/codecs/blocks/codec.h): ``python bench/fit_levels.py``.

Level ``c`` of ``2**bits`` is ``u * (slope + (1 - slope) * u**2)`` with ``u`` from -1 to 1. The program finds the slope,
the reach, which is the scale that a block starts with over its greatest magnitude, and the polynomials for scales. It
prints the errors that they reach.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from frontier import SAMPLES

#: the type checker cannot follow NumPy's arithmetic
Values = Any
NAMES = ("Gaussian", "Laplace", "Student t(3)")
#: by the number of bits: elements that share a scale, and the largest relative L2 errors wanted, in the order of NAMES
WANTED = {2: (64, (0.338, 0.42, 0.53)), 3: (32, (0.18, 0.22, 0.29)), 4: (32, (0.084, 0.092, 0.11))}
BUCKET, COUNT = 1024, 1 << 17


def levels(bits: int, slope: float) -> Values:
    """The positive levels."""
    u = np.arange(1, 2**bits, 2) / (2**bits - 1)
    return u * (slope + (1 - slope) * u * u)


def decoded(x: Values, bits: int, slope: float, reach: float, block: int) -> Values:
    """``x`` after encoding and decoding."""
    blocks = x.reshape(-1, BUCKET // block, block).astype(np.float64)
    size = np.abs(blocks).max(axis=2, keepdims=True)
    scale = reach * size
    positive = levels(bits, slope)
    edges = (positive[1:] + positive[:-1]) / 2

    def code(scale: Values) -> Values:
        return np.searchsorted(edges, np.abs(blocks) / scale, "right")

    if bits < 4:
        level = positive[code(scale)]
        scale = (np.abs(blocks) * level).sum(axis=2, keepdims=True) / (level * level).sum(axis=2, keepdims=True)
    most = size.max(axis=1, keepdims=True)
    scale = most * 2 ** -(np.rint(16 * np.log2(most / scale)).clip(0, 253) / 16)
    return (np.sign(blocks) * positive[code(scale)] * scale).reshape(-1)


def errors(bits: int, slope: float, reach: float, draw: int = 0) -> list[float]:
    """Relative L2 errors, in the order of NAMES."""
    found = []
    for name in NAMES:
        x = SAMPLES[name](COUNT, draw)
        found.append(float(np.linalg.norm(decoded(x, bits, slope, reach, WANTED[bits][0]) - x) / np.linalg.norm(x)))
    return found


def fit(x: Values, y: Values, terms: Values) -> tuple[Values, float]:
    """Coefficients of the terms, and the largest error."""
    found = np.linalg.lstsq(terms, y, rcond=None)[0]
    return found, float(np.abs(terms @ found - y).max())


def main() -> None:
    """Search, and print what is found."""
    for bits, (_, wanted) in WANTED.items():
        slopes, reaches = np.arange(0.55, 0.9, 0.03), (0.6, 0.76, 0.84, 0.92, 0.984)
        found = {}
        for slope, reach in itertools.product(slopes, reaches):
            found[slope, reach] = max(e / w for e, w in zip(errors(bits, slope, reach), wanted, strict=True))
        slope, reach = min(found, key=lambda each: found[each])
        print(f"{bits} bits: slope {slope:.2f}, reach {reach}")
        medians = np.median([errors(bits, slope, reach, draw) for draw in range(10)], axis=0)
        print("  medians of 10 draws:", ", ".join(f"{n} {e:.4f}" for n, e in zip(NAMES, medians, strict=True)))
    x = np.linspace(0, 1, 1001)
    bend = (x * (1 - x))[:, None] * x[:, None] ** np.arange(2)
    print("log2(1 + x) - x, over x (1 - x):", *fit(x, np.log2(1 + x) - x, bend))
    t = np.arange(17) / 16
    cubic = t[:, None] ** np.arange(1, 4)
    print("2**-t - 1:", *fit(t, 2.0**-t - 1, cubic))


if __name__ == "__main__":
    main()
