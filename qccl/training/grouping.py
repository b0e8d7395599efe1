"""How gradients are divided into calls, the rule of compress(), and the bytes that a call sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from qccl.base.dtypes import FLOAT32, DType
from qccl.codecs import Codec

__all__ = ["FIRST_NBYTES", "GROUP_NBYTES", "encoded_nbytes", "grouped", "sent_nbytes"]

#: the most bytes of gradients that one call reduces, by default
GROUP_NBYTES = 4 << 20
#: and of the first group of a kind: the network is idle until it starts. DDP's first bucket is as large
FIRST_NBYTES = 1 << 20


@dataclass
class _Part:
    """A group that is being filled to ``limit`` bytes."""

    limit: int
    members: list[int] = field(default_factory=list)
    nbytes: int = 0


def grouped(gradients: Iterable[tuple[Hashable, int]], group_nbytes: int = GROUP_NBYTES) -> list[list[int]]:
    """The groups of gradients, given by kind and bytes in the order in which they become ready; as their positions.

    A group has one kind and at most ``group_nbytes`` (the first of its kind also at most 1 MiB) unless it has a single
    gradient. The groups are in the order in which they are complete.
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
    """The encoded bytes of ``count`` elements, the mean of both rounds."""
    return sum(each.encoded_nbytes(count, dtype) for each in codec.rounds) / 2


def sent_nbytes(encoded: float, ranks: int) -> float:
    """Bytes that a rank sends in a two-round all-reduce of a vector that takes ``encoded`` bytes."""
    return 2 * (ranks - 1) / ranks * encoded
