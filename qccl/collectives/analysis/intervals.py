"""A map from disjoint intervals of integers to data about them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar

__all__ = ["Cell", "IntervalMap"]


class Cell(Protocol):
    """Data about the integers ``start`` to ``stop``."""

    start: int
    stop: int

    def split(self, at: int) -> Self:
        """Shorten this cell to end at ``at``; return a new cell for the rest."""


C = TypeVar("C", bound=Cell)


class IntervalMap(Generic[C]):
    """Disjoint cells in ascending order; O(log cells) if intervals recur exactly, as slots and chunks do."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[C] = []

    def __iter__(self) -> Iterator[C]:
        return iter(self._cells)

    def covered(self, start: int, stop: int) -> list[C]:
        """The cells within ``[start, stop)``, without gaps; cells that reach beyond it are split."""
        first, last = self._range(start, stop)
        return self._cells[first:last]

    def put(self, cell: C) -> list[C]:
        """Replace the cells in the interval of ``cell``; return the old ones."""
        first, last = self._range(cell.start, cell.stop)
        old = self._cells[first:last]
        self._cells[first:last] = [cell]
        self._starts[first:last] = [cell.start]
        return old

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """The numbers of the cells within ``[start, stop)``, after splitting cells that reach beyond it."""
        first = bisect_left(self._starts, start)
        if first < len(self._cells) and self._starts[first] == start:
            if self._cells[first].stop == stop:
                return first, first + 1
        elif first and self._cells[first - 1].stop > start:
            self._split(first, start)
        last = bisect_left(self._starts, stop)
        if last and self._cells[last - 1].stop > stop:
            self._split(last, stop)
        return first, last

    def _split(self, index: int, at: int) -> None:
        """Split the cell before ``index``, which reaches beyond ``at``."""
        self._cells.insert(index, self._cells[index - 1].split(at))
        self._starts.insert(index, at)
