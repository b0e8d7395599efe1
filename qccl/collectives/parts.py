"""The lengths of a vector's parts, one for each rank, and the order that their arrays must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qccl.base.arrays import Values
from qccl.base.errors import ArgumentError
from qccl.collectives.arguments import count_of, integers
from qccl.collectives.spec import CollectiveSpec

__all__ = ["PartsSpec", "equal_parts", "parts_of", "row_major"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSpec(CollectiveSpec):
    """A vector of which each rank has a part; ``parts`` has the lengths by rank, None if they are equal.

    ``node_ids`` has the number of each rank's node if the call runs in two levels; it is empty otherwise.
    """

    parts: tuple[int, ...] | None
    node_ids: tuple[int, ...] = ()

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        if not self.node_ids:
            del shown["node_ids"]
        return shown

    def lengths(self, size: int) -> tuple[int, ...]:
        """The lengths of all parts. Raises ArgumentError if they do not fit the vector or the number of ranks."""
        if self.parts is None:
            return equal_parts(self.count, size, self.name)
        if len(self.parts) != size or sum(self.parts) != self.count:
            raise ArgumentError(
                f"counts={list(self.parts)} are {len(self.parts)} numbers with the sum {sum(self.parts)}; there must "
                f"be {size}, one for each rank, with the sum {self.count}, the elements of the whole vector"
            )
        return self.parts

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """Accept row-major arrays alone, because parts are ranges of elements."""
        return row_major(arrays, self.name)


def parts_of(counts: Sequence[int] | None, what: str = "counts") -> tuple[int, ...] | None:
    """Check the lengths of parts; None means equal parts."""
    return None if counts is None else tuple(count_of(count, f"each of {what}") for count in integers(counts, what))


def equal_parts(count: int, size: int, name: str, keywords: str = "counts=") -> tuple[int, ...]:
    """The lengths of ``size`` equal parts. Raises ArgumentError if ``count`` cannot be divided equally."""
    if count % size:
        raise ArgumentError(
            f"{name}: {count} elements cannot be shared equally among {size} ranks; give each rank's elements with "
            f"{keywords}"
        )
    return (count // size,) * size


def row_major(arrays: Mapping[str, Values], name: str) -> str:
    """The order "C". Raises ArgumentError if an array has another order."""
    for values in arrays.values():
        if values.order != "C":
            raise ArgumentError(
                f"{name} takes the elements of row-major arrays, and {values.what} is not: shape and strides in "
                f"elements are {values.shape_and_strides}; pass a row-major copy"
            )
    return "C"
