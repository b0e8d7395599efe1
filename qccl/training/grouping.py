"""The division of gradients into calls, by the rule of compress(), and the bytes that a call sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from qccl.base.dtypes import FLOAT32, DType
from qccl.codecs import Codec

__all__ = ["FIRST_NBYTES", "GROUP_NBYTES", "encoded_nbytes", "grouped", "sent_nbytes"]

#: default of the most bytes of gradients in one call
GROUP_NBYTES = 4 << 20
#: most bytes of the first group of a kind, for which the network waits; DDP's first bucket has the same size
FIRST_NBYTES = 1 << 20


@dataclass
class _Part:
    """A group that is being filled to ``limit`` bytes."""

    limit: int
    members: list[int] = field(default_factory=list)
    nbytes: int = 0


def grouped(gradients: Iterable[tuple[Hashable, int]], group_nbytes: int = GROUP_NBYTES) -> list[list[int]]:
    """Group gradients, given by kind and bytes in the order in which they become ready. Returns lists of positions.

    A group has one kind and at most ``group_nbytes`` (the first of its kind also at most 1 MiB) unless it has a single
    gradient. The groups are in the order in which they become complete.
    """
    parts: list[_Part] = []
    filling: dict[Hashable, _Part] = {}
    for position, (kind, nbytes) in enumerate(gradients):
        part = filling.get(kind)
        if part is None or part.nbytes + nbytes > part.limit:
            limit = min(group_nbytes, FIRST_NBYTES) if part is None else group_nbytes
            part = filling[kind] = _Part(limit)
            parts.append(part)
        part.members.append(position)
        part.nbytes += nbytes
    return [part.members for part in sorted(parts, key=lambda part: part.members[-1])]


def encoded_nbytes(codec: Codec, count: int, dtype: DType = FLOAT32) -> float:
    """The encoded bytes of ``count`` elements, averaged over both rounds."""
    return sum(each.encoded_nbytes(count, dtype) for each in codec.rounds) / 2


def sent_nbytes(encoded: float, ranks: int) -> float:
    """Bytes that a rank sends in a two-round all-reduce of a vector that takes ``encoded`` bytes."""
    return 2 * (ranks - 1) / ranks * encoded
