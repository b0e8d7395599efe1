"""How a vector is cut into shards and chunks, where its codes lie on the wire, and in which order chunks are worked on.

Everything a collective is put together from that does not depend on which collective it is. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qccl.codecs.base import Codec
from qccl.dtypes import FLOAT32, DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Exchange, Leg, Op, Role, Span

__all__ = [
    "ALIGNMENT",
    "DEFAULT_CHUNK",
    "DEFAULT_DEPTH",
    "CallerBuffers",
    "Coded",
    "Layout",
    "Slots",
    "check_place",
    "cut",
    "exchange",
    "peers_of",
    "pipeline",
]

#: bytes that wire slots and workspace buffers are aligned to: a cache line
ALIGNMENT = 64
#: elements in a chunk of 8-bit codes: 160 KiB of float32 kept slow links (0.1 to 1 Gbit/s) busiest; 512 KiB lost 2-3%
#: of their rate. What counts is the size of the messages: as many elements of 4-bit codes, in messages half as long,
#: took a quarter more time (4 ranks, 1 Gbit/s)
DEFAULT_CHUNK = 40 * 1024
#: and so many times that at most, with fewer bits: more values than that leave the cache
_MOST_CHUNKS = 4
#: wire slots per peer; with all chunks posted at once the second round queues behind the first in TCP
DEFAULT_DEPTH = 4


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

    def _granules(self, part: int) -> tuple[int, int]:
        total = -(-self.count // self.granule)
        return total * part // self.parts, total * (part + 1) // self.parts

    def _elements(self, start: int, stop: int) -> range:
        return range(min(start * self.granule, self.count), min(stop * self.granule, self.count))


def cut(count: int, parts: int, codec: Codec, chunk_elements: int | None = None) -> Layout:
    """The layout of ``count`` elements in ``parts`` shards, with chunks of at most ``chunk_elements`` or one granule.

    A codec that cannot be split (one range for a whole shard) gets one chunk.
    """
    wanted = _default_chunk(codec) if chunk_elements is None else chunk_elements
    if wanted < 1:
        raise ArgumentError(f"chunk_elements is {wanted}; it must be 1 or more, or None for the default")
    if not codec.splittable:
        return Layout(count, parts, codec.granule, 1)
    granules = -(-count // codec.granule)
    largest_shard = -(-granules // parts)
    per_chunk = max(1, wanted // codec.granule)
    return Layout(count, parts, codec.granule, max(1, -(-largest_shard // per_chunk)))


def _default_chunk(codec: Codec) -> int:
    """Elements whose codes take about as many bytes as DEFAULT_CHUNK has elements."""
    times = round(DEFAULT_CHUNK / codec.encoded_nbytes(DEFAULT_CHUNK, FLOAT32))
    return DEFAULT_CHUNK * min(max(times, 1), _MOST_CHUNKS)


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


class Coded:
    """A layout whose chunks go over the wire in codes: their sizes (looked up once per length) and slots for them."""

    def __init__(self, layout: Layout, codec: Codec, dtype: DType) -> None:
        self.layout, self.codec, self.dtype = layout, codec, dtype
        lengths = {len(layout.chunk(part, k)) for part in range(layout.parts) for k in range(layout.chunks)}
        self._nbytes = {n: codec.encoded_nbytes(n, dtype) for n in lengths}

    def nbytes(self, part: int, k: int) -> int:
        """Bytes on the wire of chunk ``k`` of shard ``part``; 0 where the chunk is empty."""
        return self._nbytes[len(self.layout.chunk(part, k))]

    def slots(self, name: str, width: int, depth: int) -> Slots:
        """A ring of slots, each large enough for any chunk."""
        largest = max(self._nbytes.values())
        return Slots(name, width, min(depth, self.layout.chunks), -(-largest // ALIGNMENT) * ALIGNMENT)


@dataclass(frozen=True, slots=True)
class CallerBuffers:
    """The names of the caller's buffers: where a collective reads its values and where it writes the result."""

    source: str
    target: str

    @staticmethod
    def make(in_place: bool) -> CallerBuffers:
        """In place there is one buffer, "output"; otherwise "input" as well."""
        return CallerBuffers("output" if in_place else "input", "output")

    def buffers(self, count: int, dtype: DType) -> dict[str, Buffer]:
        """Both (or the one) as buffers of ``count`` elements."""
        found = {self.target: Buffer(count, dtype, Role.OUTPUT)}
        if self.source != self.target:
            found[self.source] = Buffer(count, dtype, Role.INPUT)
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
    outgoing = tuple(Leg(peer, span) for peer, span in sends.items() if len(span))
    incoming = tuple(Leg(peer, span) for peer, span in recvs.items() if len(span))
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
