"""Arrays as lists of tiles: rectangles of a matrix, or parts of a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Tiles"]


class Tiles:
    """The division of arrays of one shape into tiles.

    Each side of a tile is the greatest divisor of the matrix's side that is not above ``side``, as in the programs of
    DeMo (github.com/bloc97/DeMo) and SparseLoCo (github.com/tplr-ai/SparseLoCo). An array with more than two dimensions
    is a matrix whose rows are its first dimension; a vector is a matrix of one row.

    Attributes:
        shape: of the arrays.
        number: how many tiles an array has.
        height, width: rows and columns of a tile.
    """

    def __init__(self, shape: Sequence[int], side: int) -> None:
        self.shape, rows = tuple(shape), shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape[1:] if len(shape) > 1 else shape)
        self.height, self.width = _divisor(rows, side), _divisor(columns, side)
        self._grid = rows // self.height, columns // self.width
        self.number = math.prod(self._grid)

    def split(self, array: Any) -> Any:
        """The tiles of an array, of shape (number, height, width): of NumPy, torch or CuPy."""
        (down, across), height, width = self._grid, self.height, self.width
        cut = array.reshape(down, height, across, width).swapaxes(1, 2)
        return cut.reshape(self.number, height, width)

    def join(self, tiles: Any) -> Any:
        """The array that split() gave these tiles for."""
        cut = tiles.reshape(*self._grid, self.height, self.width).swapaxes(1, 2)
        return cut.reshape(self.shape)


def _divisor(number: int, limit: int) -> int:
    """The greatest divisor of ``number`` from 1 to ``limit``."""
    return next(each for each in range(min(limit, max(number, 1)), 0, -1) if number % each == 0)
