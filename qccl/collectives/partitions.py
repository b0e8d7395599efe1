"""Divides a vector into parts (one for each rank, or more) and chunks (the unit of the pipeline)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from qccl.codecs.base import Codec
from qccl.collectives.chunks import ChunkPolicy, size_before

__all__ = ["HOP_NBYTES", "Partition", "Segment", "partition", "partition_as_given"]

#: bytes that a link carries in the time of one hop: 20 us at 10 Gbit/s, 5 us at 5 GB/s of shared memory
HOP_NBYTES = 24 << 10


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of an array, in a chunk of a part.

    ``index`` is the number of the first element in the whole vector.
    """

    chunk: int
    array: int
    start: int
    stop: int
    index: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Partition:
    """Ranges of arrays, one after the other as one vector of granules; each range begins with a bucket of its own.

    Attributes:
        ranges: array, first element and number of elements of each range.
        bounds: the first granule of each shard, and the end.
        chunks_of: number of chunks of each shard; later chunks are empty.
        ramp: ratio of the largest chunk, in the middle, to the first and last one; 1: all are equal.
        groups: the shards of each part, possibly none; None if every shard is a part.
    """

    ranges: tuple[tuple[int, int, int], ...]
    bounds: tuple[int, ...]
    granule: int
    chunks_of: tuple[int, ...]
    ramp: int = 1
    groups: Sequence[Sequence[int]] | None = None

    def grouped(self, groups: Sequence[Sequence[int]]) -> Partition:
        """The same chunks with other parts, each made of some shards."""
        return replace(self, groups=groups)

    @property
    def chunks(self) -> int:
        """The largest number of chunks of a shard."""
        return max(self.chunks_of)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.bounds) - 1 if self.groups is None else len(self.groups)

    def segments(self, part: int) -> list[Segment]:
        """The segments of a part, by shard and chunk in order; no segment is empty, and each begins with a bucket."""
        found: list[Segment] = []
        starts = list(accumulate([-(-count // self.granule) for _, _, count in self.ranges], initial=0))  # in granules
        for shard in (part,) if self.groups is None else self.groups[part]:
            for chunk, (begin, end) in enumerate(pairwise(self._edges(shard))):
                # only the ranges that the chunk meets: thousands of arrays may have thousands of chunks
                for i in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                    (array, offset, count), start = self.ranges[i], starts[i]
                    low, high = max(begin - start, 0) * self.granule, min((end - start) * self.granule, count)
                    if low < high:
                        found.append(Segment(chunk, array, offset + low, offset + high, start * self.granule + low))
        return found

    def _edges(self, shard: int) -> list[int]:
        """The first granule of each chunk of a shard, and the end."""
        first, chunks = self.bounds[shard], self.chunks_of[shard]
        sizes = range(chunks + 1) if self.ramp == 1 else [size_before(k, chunks, self.ramp) for k in range(chunks + 1)]
        return [first + (self.bounds[shard + 1] - first) * size // sizes[-1] for size in sizes]


def partition(
    counts: Sequence[int],
    parts: int,
    codecs: Sequence[Codec],
    chunking: ChunkPolicy,
    *,
    ramped: bool = False,
) -> Partition:
    """Join arrays to one vector, in parts as equal as possible; arrays share messages, but no buckets.

    Parts are divided at buckets of all ``codecs``, and the last codec sets the chunks; if a codec cannot be split,
    there is one chunk. ``ramped``: chunks grow and shrink if the policy says so.
    """
    granule, last, ramp = math.lcm(*[codec.granule for codec in codecs]), codecs[-1], 1
    granules = sum([-(-count // granule) for count in counts])
    largest = -(-granules // parts)
    if not all([codec.splittable for codec in codecs]):
        chunks = 1
    elif ramped:
        chunks, ramp = chunking.ramped(largest * granule // last.granule, parts, last)
    else:
        chunks = chunking.chunks(largest * granule // last.granule, parts, last)
    bounds = tuple([granules * part // parts for part in range(parts + 1)])
    ranges = tuple([(array, 0, count) for array, count in enumerate(counts)])
    return Partition(ranges, bounds, granule, (min(chunks, max(largest, 1)),) * parts, ramp)


def partition_as_given(
    counts: Sequence[int], codec: Codec, chunking: ChunkPolicy, granule: int | None = None
) -> Partition:
    """One array, whose parts have ``counts`` elements, each with buckets of its own.

    Parts are divided at multiples of ``granule``, which is a multiple of the codec's granule (None: the codec's).
    """
    granule = granule or codec.granule
    granules = [-(-count // granule) for count in counts]
    ranges = tuple((0, sum(counts[:part]), count) for part, count in enumerate(counts))
    bounds = tuple(accumulate(granules, initial=0))
    smaller = granule // codec.granule
    chunks_of = tuple(min(chunking.chunks(n * smaller, len(counts), codec), max(n, 1)) for n in granules)
    return Partition(ranges, bounds, granule, chunks_of)
