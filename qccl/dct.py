"""The discrete cosine transform of tiles, and the signs of its inverse with the same bits on every processor.

The DCT-II with an orthonormal basis: row k of the basis of n elements is ``sqrt(2/n) cos(pi (2j + 1) k / (2n))`` for
element j, and ``sqrt(1/n)`` for k = 0 (Ahmed, Natarajan and Rao 1974, "Discrete Cosine Transform").
"""

from __future__ import annotations

import math
from typing import Any

from qccl import parameters

__all__ = ["LONGEST", "CosineTransform", "basis"]

#: the longest side of a tile for which sums are exact
LONGEST = 128
#: elements of the basis are integers over 2**24, and so are coefficients over the greatest of their tile
_BITS = 24


def basis(n: int) -> list[int]:
    """The basis of ``n`` elements, row by row, times 2**24 and rounded to integers."""
    size = [math.sqrt((1 if k == 0 else 2) / n) for k in range(n)]
    return [
        round(2**_BITS * size[k] * math.cos(math.pi * (2 * j + 1) * k / (2 * n))) for k in range(n) for j in range(n)
    ]


class CosineTransform:
    """Transforms tiles, which have elements, in their library and memory; it keeps the bases there."""

    def __init__(self) -> None:
        self._bases: dict[int, Any] = {}

    def forward(self, tiles: Any) -> Any:
        """The coefficients of tiles (number, height, width), in float32; their last bits depend on the processor.

        Those of a tile that is not finite are not finite.
        """
        import numpy as np

        rows, columns = (parameters.converted(self._basis(n, tiles), "float32") * 2.0**-_BITS for n in tiles.shape[1:])
        with np.errstate(all="ignore"):
            return rows @ parameters.converted(tiles, "float32") @ columns.T

    def inverse_signs(self, coefficients: Any) -> Any:
        """The signs of the values with these coefficients: -1, 0 or 1, in float32, of the same shape.

        Equal coefficients give equal signs on all processors, whatever the order in which a product adds: all terms are
        integers, and all sums stay below 2**53, so double precision adds exactly. A coefficient is at most 2**24. The
        elements of a row or a column of the basis have sums of magnitudes of at most sqrt(128) 2**24 < 2**27.5. So the
        first sums are below 2**51.5; over 2**27, and rounded, below 2**24.5; and the second ones below 2**52.

        A coefficient, in float32, is rounded to 2**-25 of the greatest of its tile.
        """
        signs = parameters.zeros_like(coefficients)
        for slab in parameters.slabs(coefficients):
            signs[slab] = self._signs(coefficients[slab])
        return signs

    def _signs(self, coefficients: Any) -> Any:
        number, height, width = coefficients.shape
        precise = parameters.converted(coefficients, "float64")
        most = parameters.row_maxima(abs(precise).reshape(number, height * width)).reshape(number, 1, 1)
        precise /= (most + (most == 0)) * 2.0**-_BITS
        _round(precise)
        halfway = self._basis(height, precise).T @ precise
        halfway *= 2.0**-27
        _round(halfway)
        values = halfway @ self._basis(width, precise)
        return parameters.converted(values > 0, "float32") - parameters.converted(values < 0, "float32")

    def _basis(self, n: int, like: Any) -> Any:
        """The basis of integers as a matrix of float64."""
        if n not in self._bases:
            self._bases[n] = parameters.vector(like, basis(n), "float64").reshape(n, n)
        return self._bases[n]


def _round(array: Any) -> None:
    """Round in place to integers, halves to even ones: float64 has none but integers from 2**52 to 2**53.

    The magnitudes are below 2**51.
    """
    array += 1.5 * 2.0**52
    array -= 1.5 * 2.0**52
