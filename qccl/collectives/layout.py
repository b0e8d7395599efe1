"""How a vector is cut into shards and chunks, where its codes lie on the wire, and in which order chunks are worked on.

Everything a collective is put together from that does not depend on which collective it is. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from itertools import count as naturals
from typing import Protocol

from qccl.codecs.base import Codec
from qccl.dtypes import FLOAT32, DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Exchange, Op, Role, Span, Transfer

__all__ = [
    "ALIGNMENT",
    "DEFAULT_DEPTH",
    "SEGMENT_ALIGNMENT",
    "Arrays",
    "CallerBuffers",
    "Coarsened",
    "Concatenation",
    "Encoding",
    "Layout",
    "Partition",
    "Ramped",
    "Segment",
    "Slots",
    "Subset",
    "check_place",
    "exchange",
    "partition",
    "partition_as_given",
    "partition_for_all",
    "partition_together",
    "peers_of",
    "pipeline",
]

#: bytes that wire slots and workspace buffers are aligned to: a cache line
ALIGNMENT = 64
#: bytes that the codes of several pieces in one slot are aligned to: a vector register of a GPU
SEGMENT_ALIGNMENT = 16
#: bytes of codes in a chunk. A message costs 10 to 30 us over TCP, so few are better where the link is fast (10 Gbit/s,
#: 2 ranks: 10 ms with 20 KiB, 7 with 40, 5 with 160), but the first and the last chunk overlap with nothing
_LEAST_CHUNK = 48 << 10
_MOST_CHUNK = 160 << 10
#: chunks that a shard has at least, where they are not too small then: fewer lose 1% at 1 Gbit/s
_CHUNKS = 9
#: bytes of codes in the first and the last chunk of a tapered cut, and how many times as large the others become. In
#: two levels a chunk passes through the node before it comes to the link and after: what is large there takes long to
#: begin and to end, and many small ones take the processor's time
_FIRST_CHUNK = 48 << 10
_RAMP = 4
#: wire slots per peer; with all chunks posted at once the second round queues behind the first in TCP. Two to eight
#: take the same time, so few large ones are better than many small ones
DEFAULT_DEPTH = 3
#: bytes of the wire slots of an all-reduce, whatever the number of ranks (unless that makes chunks too small)
_SLOTS_NBYTES = 3 << 20


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
    """How the elements of one or several arrays are cut: in parts, and each part in at most ``chunks`` chunks."""

    @property
    def parts(self) -> int: ...

    @property
    def chunks(self) -> int: ...

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """Chunk ``k`` of a part, in order; no piece is empty, and each begins with a bucket of its own."""


@dataclass(frozen=True, slots=True)
class Layout:
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
        """See Cut."""
        chunk = self.chunk(part, k)
        return (Segment(0, chunk.start, chunk.stop, chunk.start),) if chunk else ()

    def _granules(self, part: int) -> tuple[int, int]:
        total = -(-self.count // self.granule)
        return total * part // self.parts, total * (part + 1) // self.parts

    def _elements(self, start: int, stop: int) -> range:
        return range(min(start * self.granule, self.count), min(stop * self.granule, self.count))


@dataclass(frozen=True, slots=True)
class Ramped(Layout):
    """A layout whose chunks grow from the first on, step by step to ``ramp`` times its size, and shrink again alike.

    Chunk ``k`` is ``[S*e(k)//e(chunks), S*e(k+1)//e(chunks))``, ``e`` being the sum of the sizes before (_before).
    """

    ramp: int

    def chunk(self, part: int, k: int) -> range:
        """See Layout."""
        start, stop = self._granules(part)
        whole = _before(self.chunks, self.chunks, self.ramp)
        low, high = ((stop - start) * _before(at, self.chunks, self.ramp) // whole for at in (k, k + 1))
        return self._elements(start + low, start + high)


def _before(k: int, chunks: int, ramp: int) -> int:
    """The sizes of the first ``k`` of ``chunks`` tapered chunks, in sizes of the first."""

    def rise(n: int) -> int:
        steps = min(n, ramp)
        return steps * (steps + 1) // 2 + (n - steps) * ramp

    half = (chunks + 1) // 2
    return rise(k) if k <= half else rise(half) + rise(chunks - half) - rise(chunks - k)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Segments, each of which begins with a bucket of its own, one after the other as one vector of granules.

    Attributes:
        ranges: array, first element and number of elements of each.
        bounds: the granules at which the parts begin, and the end.
        chunks_of: chunks of each part; where others have more, its further ones are empty.
    """

    ranges: tuple[tuple[int, int, int], ...]
    bounds: tuple[int, ...]
    granule: int
    chunks_of: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return max(self.chunks_of)

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """See Cut."""
        start, length, chunks = self.bounds[part], self.bounds[part + 1] - self.bounds[part], self.chunks_of[part]
        if k >= chunks:
            return ()
        return self._between(start + length * k // chunks, start + length * (k + 1) // chunks)

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
class Coarsened:
    """A cut whose parts are ``parts`` groups of as many parts of another one."""

    fine: Partition
    parts: int

    @property
    def chunks(self) -> int:
        return self.fine.chunks

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """See Cut."""
        each = self.fine.parts // self.parts
        return tuple(p for j in range(each) for p in self.fine.segments(part * each + j, k))


@dataclass(frozen=True, slots=True)
class Subset:
    """``parts`` parts of another cut, from part ``first`` on."""

    fine: Partition
    first: int
    parts: int

    @property
    def chunks(self) -> int:
        return self.fine.chunks

    def segments(self, part: int, k: int) -> tuple[Segment, ...]:
        """See Cut."""
        return self.fine.segments(self.first + part, k)


def partition(count: int, parts: int, codec: Codec, chunk_elements: int | None = None) -> Layout:
    """The layout of ``count`` elements in ``parts`` shards, with chunks of at most ``chunk_elements`` or one granule.

    A codec that cannot be split (one range for a whole shard) gets one chunk.
    """
    granules = -(-count // codec.granule)
    return Layout(count, parts, codec.granule, _chunks(-(-granules // parts), parts, codec, chunk_elements))


def partition_for_all(count: int, parts: int, codecs: Sequence[Codec], chunk_elements: int | None = None) -> Layout:
    """The layout of a vector that several codecs encode, at buckets of all of them; the last decides on the chunks."""
    granule = math.lcm(*(codec.granule for codec in codecs))
    whole = -(-count // granule)
    largest, last = -(-whole // parts), codecs[-1]
    if chunk_elements is None and last.splittable:
        nbytes = last.encoded_nbytes(largest * granule, FLOAT32)
        ramp = max(1, min(_RAMP, _most_chunk(parts) // _FIRST_CHUNK))
        chunks = next(n for n in naturals(1) if _before(n, n, ramp) * _FIRST_CHUNK >= nbytes)
        return Ramped(count, parts, granule, min(chunks, max(largest, 1)), ramp)
    chunks = _chunks(largest * granule // last.granule, parts, last, chunk_elements)
    return Layout(count, parts, granule, min(chunks, max(largest, 1)))


def partition_together(
    counts: Sequence[int], parts: int, codec: Codec, chunk_elements: int | None = None
) -> Concatenation:
    """Several arrays as one vector, in parts as equal as possible."""
    granules = sum(-(-count // codec.granule) for count in counts)
    bounds = tuple(granules * part // parts for part in range(parts + 1))
    ranges = tuple((array, 0, count) for array, count in enumerate(counts))
    return Concatenation(
        ranges, bounds, codec.granule, (_chunks(-(-granules // parts), parts, codec, chunk_elements),) * parts
    )


def partition_as_given(counts: Sequence[int], codec: Codec, chunk_elements: int | None = None) -> Concatenation:
    """One array, whose parts have ``counts`` elements, each with buckets of its own."""
    granules = [-(-count // codec.granule) for count in counts]
    ranges = tuple((0, sum(counts[:part]), count) for part, count in enumerate(counts))
    bounds = tuple(accumulate(granules, initial=0))
    chunks_of = tuple(_chunks(n, len(counts), codec, chunk_elements) for n in granules)
    return Concatenation(ranges, bounds, codec.granule, chunks_of)


def _chunks(granules: int, parts: int, codec: Codec, chunk_elements: int | None) -> int:
    """Chunks of one of the ``parts``, which has so many granules."""
    if chunk_elements is not None and chunk_elements < 1:
        raise ArgumentError(f"chunk_elements is {chunk_elements}; it must be 1 or more, or None for the default")
    if not codec.splittable:
        return 1
    if chunk_elements is None:
        return _default_chunks(granules, parts, codec)
    return max(1, -(-granules // max(1, chunk_elements // codec.granule)))


def _default_chunks(granules: int, parts: int, codec: Codec) -> int:
    """The same where nobody said: by the size of the codes."""
    nbytes = codec.encoded_nbytes(granules * codec.granule, FLOAT32)
    chunk = max(_LEAST_CHUNK, min(-(-nbytes // _CHUNKS), _MOST_CHUNK, _most_chunk(parts)))
    return max(1, min(-(-nbytes // chunk), granules))


def _most_chunk(parts: int) -> int:
    """Bytes of codes in a chunk with which the wire slots are not too many bytes."""
    return _SLOTS_NBYTES // (DEFAULT_DEPTH * (3 * parts - 2))


@dataclass(frozen=True, slots=True)
class Slots:
    """A wire buffer as a ring of ``depth`` rows of ``width`` slots: chunk ``k`` has row ``k % depth``."""

    name: str
    width: int
    depth: int
    slot_nbytes: int

    def buffer(self) -> Buffer:
        """The buffer that holds the ring."""
        return Buffer(self.width * self.depth * self.slot_nbytes, None, Role.WORK)

    def span(self, k: int, column: int, nbytes: int) -> Span:
        """The first ``nbytes`` of a slot."""
        start = ((k % self.depth) * self.width + column) * self.slot_nbytes
        return Span(self.name, start, start + nbytes)


class Encoding:
    """A cut whose chunks go over the wire in codes: their sizes (looked up once per length) and slots for them.

    The code of a chunk is the codes of its pieces, each from a multiple of SEGMENT_ALIGNMENT on.
    """

    def __init__(self, layout: Partition, codec: Codec, dtype: DType) -> None:
        if codec.state_names:
            raise ArgumentError(
                f"{codec.spec()} keeps its {' and '.join(codec.state_names)} from call to call, which only all-reduce "
                f"does; use {codec.plain.spec()}"
            )
        self.layout, self.codec, self.dtype = layout, codec, dtype
        self._sizes: dict[int, int] = {}
        self._nbytes: dict[tuple[int, int], int] = {}

    def nbytes(self, part: int, k: int) -> int:
        """Bytes on the wire of chunk ``k`` of a part; 0 where the chunk is empty."""
        found = self._nbytes.get((part, k))
        if found is None:
            found = 0
            for segment in self.layout.segments(part, k):
                found = _aligned(found, SEGMENT_ALIGNMENT) + self._size(len(segment))
            self._nbytes[part, k] = found
        return found

    def segments(self, part: int, k: int, *slots: Span) -> Iterator[tuple[Segment, list[Span]]]:
        """The pieces of a chunk, and the code of each in all of some slots that hold codes of the chunk."""
        start = 0
        for segment in self.layout.segments(part, k):
            stop = start + self._size(len(segment))
            yield segment, [Span(slot.buffer, slot.start + start, slot.start + stop) for slot in slots]
            start = _aligned(stop, SEGMENT_ALIGNMENT)

    def slots(self, name: str, width: int, depth: int) -> Slots:
        """A ring of slots, each large enough for any chunk."""
        layout = self.layout
        largest = max(self.nbytes(part, k) for part in range(layout.parts) for k in range(layout.chunks))
        return Slots(name, width, min(depth, layout.chunks), _aligned(largest, ALIGNMENT))

    def _size(self, count: int) -> int:
        found = self._sizes.get(count)
        if found is None:
            found = self._sizes[count] = self.codec.encoded_nbytes(count, self.dtype)
        return found


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Arrays:
    """Buffers of values by the number of their array; ``first`` is the vector's element that theirs begin with."""

    names: tuple[str, ...]
    first: int = 0

    def span(self, segment: Segment) -> Span:
        """Where a piece lies."""
        return Span(self.names[segment.array], segment.start - self.first, segment.stop - self.first)


@dataclass(frozen=True, slots=True)
class CallerBuffers:
    """The caller's buffers: where a collective reads its values and where it writes the result."""

    source: Arrays
    target: Arrays

    @staticmethod
    def make(in_place: bool, arrays: int | None = None) -> CallerBuffers:
        """In place there is one buffer, "output"; otherwise "input" as well. Several arrays are "output 0", ..."""
        numbers = [""] if arrays is None else [f" {i}" for i in range(arrays)]
        target = Arrays(tuple(f"output{number}" for number in numbers))
        return CallerBuffers(target if in_place else Arrays(tuple(f"input{number}" for number in numbers)), target)

    def buffers(self, counts: Sequence[int], dtype: DType) -> dict[str, Buffer]:
        """All of them, of ``counts`` elements."""
        found = {name: Buffer(n, dtype, Role.OUTPUT) for name, n in zip(self.target.names, counts, strict=True)}
        if self.source != self.target:
            found |= {name: Buffer(n, dtype, Role.INPUT) for name, n in zip(self.source.names, counts, strict=True)}
        return found


def check_place(rank: int, size: int, count: int) -> None:
    """Raise ArgumentError unless ``0 <= rank < size`` and ``count >= 0``."""
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of {size} ranks does not exist; ranks are 0 to size - 1")
    if count < 0:
        raise ArgumentError(f"count is {count}; it must be 0 or more")


def peers_of(rank: int, size: int) -> tuple[int, ...]:
    """The other ranks, starting after this one: so that not all ranks send to rank 0 first."""
    return tuple((rank + i) % size for i in range(1, size))


def exchange(sends: Mapping[int, Span], recvs: Mapping[int, Span]) -> Iterator[Exchange]:
    """One Exchange of the spans by peer; empty spans have no leg (on both sides), and no legs make no Exchange."""
    outgoing = tuple(Transfer(peer, span) for peer, span in sends.items() if len(span))
    incoming = tuple(Transfer(peer, span) for peer, span in recvs.items() if len(span))
    if outgoing or incoming:
        yield Exchange(outgoing, incoming)


def pipeline(chunks: int, *stages: tuple[int, Callable[[int], Iterator[Op]]]) -> tuple[Op, ...]:
    """Program order of a pipeline: in step ``s`` each stage ``(lag, make)``, in the order given, does chunk s - lag.

    On the host the order is only a priority. On CUDA the lanes keep it, so it decides what can overlap: an operation
    that waits for chunk ``k`` must have a lag that puts it behind the encode of chunk ``k + 1``.
    """
    ops: list[Op] = []
    for step in range(chunks + max(lag for lag, _ in stages)):
        for lag, make in stages:
            if 0 <= step - lag < chunks:
                ops.extend(make(step - lag))
    return tuple(ops)
