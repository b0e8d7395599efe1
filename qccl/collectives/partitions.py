"""How a vector is divided into parts (one for each rank, or more) and chunks (the unit of the pipeline)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from itertools import count as naturals
from typing import Protocol

from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.dtypes import FLOAT32

__all__ = ["HOP_NBYTES", "Concatenation", "EvenParts", "Grouped", "Partition", "Segment"]
__all__ += ["partition", "partition_as_given", "partition_for_all", "partition_together"]

#: bytes that a link carries in the time of one more hop: 20 us at 10 Gbit/s, 5 us at 5 GB/s of shared memory
HOP_NBYTES = 24 << 10


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of an array; ``index`` is the number of the first in the whole vector."""

    array: int
    start: int
    stop: int
    index: int

    def __len__(self) -> int:
        return self.stop - self.start


class Partition(Protocol):
    """The elements of one or several arrays in parts, and each part in at most ``chunks`` chunks."""

    @property
    def parts(self) -> int:
        """Number of parts."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the part that has most."""

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """Chunk ``k`` of a part, in order; no segment is empty, and each begins with a bucket of its own."""


@dataclass(frozen=True, slots=True)
class EvenParts:
    """``count`` elements in ``parts`` shards of whole granules, as equal as possible, each in ``chunks`` chunks.

    Shard ``r`` is granules ``[G*r//parts, G*(r+1)//parts)`` of the ``G`` in the vector; a shard of ``S`` granules has
    chunk ``k`` at ``[S*k//chunks, S*(k+1)//chunks)``. All shards have the same number of chunks; some may be empty.
    """

    count: int
    parts: int
    granule: int
    chunks: int

    def shard(self, part: int) -> range:
        """The elements of one shard."""
        return self._elements(*self._granules(part))

    def chunk(self, part: int, k: int) -> range:
        """The elements of chunk ``k`` of shard ``part``."""
        start, stop = self._granules(part)
        length = stop - start
        return self._elements(start + length * k // self.chunks, start + length * (k + 1) // self.chunks)

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """One segment at most, because there is one array."""
        chunk = self.chunk(part, k)
        return (Segment(0, chunk.start, chunk.stop, chunk.start),) if chunk else ()

    def _granules(self, part: int) -> tuple[int, int]:
        total = -(-self.count // self.granule)
        return total * part // self.parts, total * (part + 1) // self.parts

    def _elements(self, start: int, stop: int) -> range:
        return range(min(start * self.granule, self.count), min(stop * self.granule, self.count))


def _before(k: int, chunks: int, ramp: int) -> int:
    """The total size of the first ``k`` of ``chunks`` ramped chunks, in units of the first one."""

    def rise(n: int) -> int:
        growing = min(n, ramp)
        return growing * (growing + 1) // 2 + (n - growing) * ramp

    half = (chunks + 1) // 2
    return rise(k) if k <= half else rise(half) + rise(chunks - half) - rise(chunks - k)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Ranges of arrays, one after the other as one vector of granules; each range begins with a bucket of its own.

    Attributes:
        ranges: array, first element and number of elements of each range.
        bounds: the first granule of each part, and the end.
        chunks_of: chunks of each part; beyond these its chunks are empty.
        ramp: chunks grow evenly to so many times the size of the first, and shrink again likewise; 1: they are equal.
    """

    ranges: tuple[tuple[int, int, int], ...]
    bounds: tuple[int, ...]
    granule: int
    chunks_of: tuple[int, ...]
    ramp: int = 1

    @property
    def chunks(self) -> int:
        """Number of chunks of the part that has most."""
        return max(self.chunks_of)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.bounds) - 1

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """One segment for each array that the chunk has elements of; none beyond the part's own chunks."""
        start, length, chunks = self.bounds[part], self.bounds[part + 1] - self.bounds[part], self.chunks_of[part]
        if k >= chunks:
            return ()
        whole = _before(chunks, chunks, self.ramp)
        low, high = (length * _before(at, chunks, self.ramp) // whole for at in (k, k + 1))
        return self._between(start + low, start + high)

    def _between(self, start: int, stop: int) -> tuple[Segment, ...]:
        found, here = [], 0
        for array, first, count in self.ranges:
            granules = -(-count // self.granule)
            low, high = max(start, here) - here, min(stop, here + granules) - here
            if low < high:
                low, high = low * self.granule, min(high * self.granule, count)
                found.append(Segment(array, first + low, first + high, here * self.granule + low))
            here += granules
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A partition each of whose parts joins some parts of a finer one, which may be none; ``groups`` has their numbers.

    ``fine`` may have parts that are in no group.
    """

    fine: Partition
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def evenly(fine: Partition, parts: int) -> Grouped:
        """``parts`` parts of as many neighbours each."""
        each = fine.parts // parts
        return Grouped(fine, tuple(tuple(range(part * each, (part + 1) * each)) for part in range(parts)))

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.groups)

    @property
    def chunks(self) -> int:
        """Those of the finer partition."""
        return self.fine.chunks

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """Chunk ``k`` of each of the finer parts, in the order of the group."""
        return tuple(segment for each in self.groups[part] for segment in self.fine.segments(each, k))


def partition(count: int, parts: int, codec: Codec, chunking: ChunkPolicy = NETWORK) -> EvenParts:
    """The partition of ``count`` elements in ``parts`` shards."""
    granules = -(-count // codec.granule)
    return EvenParts(count, parts, codec.granule, chunking.chunks(-(-granules // parts), parts, codec))


def partition_for_all(
    counts: Sequence[int], parts: int, codecs: Sequence[Codec], chunking: ChunkPolicy = NETWORK
) -> Concatenation:
    """partition_together() of arrays that several codecs encode, divided at buckets of all; the last sets the chunks.

    If one of them cannot be split, there is one chunk.
    """
    granule = math.lcm(*(codec.granule for codec in codecs))
    granules = sum(-(-count // granule) for count in counts)
    largest, last, ramp = -(-granules // parts), codecs[-1], 1
    if not all(codec.splittable for codec in codecs):
        chunks = 1
    elif chunking.ramp:
        nbytes = last.encoded_nbytes(largest * granule, FLOAT32)
        ramp = max(1, min(chunking.ramp, chunking.slot(parts) // chunking.small))
        chunks = next(n for n in naturals(1) if _before(n, n, ramp) * chunking.small >= nbytes)
    else:
        chunks = chunking.chunks(largest * granule // last.granule, parts, last)
    return _together(counts, parts, granule, min(chunks, max(largest, 1)), ramp)


def partition_together(
    counts: Sequence[int], parts: int, codec: Codec, chunking: ChunkPolicy = NETWORK
) -> Concatenation:
    """Several arrays as one vector, in parts as equal as possible; arrays share messages, but no buckets."""
    granules = sum(-(-count // codec.granule) for count in counts)
    return _together(counts, parts, codec.granule, chunking.chunks(-(-granules // parts), parts, codec))


def _together(counts: Sequence[int], parts: int, granule: int, chunks: int, ramp: int = 1) -> Concatenation:
    granules = sum(-(-count // granule) for count in counts)
    bounds = tuple(granules * part // parts for part in range(parts + 1))
    ranges = tuple((array, 0, count) for array, count in enumerate(counts))
    return Concatenation(ranges, bounds, granule, (chunks,) * parts, ramp)


def partition_as_given(
    counts: Sequence[int], codec: Codec, chunking: ChunkPolicy = NETWORK, granule: int | None = None
) -> Concatenation:
    """One array, whose parts have ``counts`` elements, each with buckets of its own.

    Parts are divided at multiples of ``granule``, which is a multiple of the codec's (None: that itself).
    """
    granule = granule or codec.granule
    granules = [-(-count // granule) for count in counts]
    ranges = tuple((0, sum(counts[:part]), count) for part, count in enumerate(counts))
    bounds = tuple(accumulate(granules, initial=0))
    smaller = granule // codec.granule
    chunks_of = tuple(min(chunking.chunks(n * smaller, len(counts), codec), max(n, 1)) for n in granules)
    return Concatenation(ranges, bounds, granule, chunks_of)
