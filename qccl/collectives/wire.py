"""Chunks as codes on the wire: the bytes of each, and the slot of the workspace that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from qccl.base.dtypes import DType
from qccl.codecs.base import Codec
from qccl.collectives.partitions import Partition, Segment
from qccl.collectives.schedule import Buffer, Exchange, Role, Span, Transfer

__all__ = ["ALIGNMENT", "SEGMENT_ALIGNMENT", "Encoding", "Slots", "exchange"]

#: alignment in bytes of wire slots: a cache line
ALIGNMENT = 64
#: alignment in bytes of the codes of several segments in one slot: a vector register of a GPU
SEGMENT_ALIGNMENT = 16


class Encoding:
    """The chunks of a partition as codes of one codec, with their sizes and slots.

    The code of a chunk consists of its segments' codes; each begins at a multiple of SEGMENT_ALIGNMENT.

    Attributes:
        depth: wire slots per peer, and so the chunks that may be on the wire at the same time.
    """

    def __init__(self, partition: Partition, codec: Codec, dtype: DType, depth: int, *, sums: bool = False) -> None:
        """``sums``: encode by the codec of the second round, which encodes sums."""
        self.partition, self.codec, self.dtype, self.depth = partition, codec.rounds[sums], dtype, depth
        self._sizes: dict[int, int] = {}
        self._chunks: dict[tuple[int, int], list[tuple[Segment, int, int]]] = {}

    @property
    def lag(self) -> int:
        """Iterations by which a stage that waits for a transfer follows the stage that started it; see pipeline().

        An in-order compute queue then never delays the encode of chunk k+1 for the transfers of chunk k. The lag must
        be less than the depth.
        """
        return min(1, self.depth - 1)

    def nbytes(self, part: int, k: int) -> int:
        """Bytes on the wire of chunk ``k`` of a part; 0 if the chunk is empty."""
        codes = self._codes(part, k)
        return codes[-1][2] if codes else 0

    def segments(self, part: int, k: int, *slots: Span) -> Iterator[tuple[Segment, list[Span]]]:
        """The segments of a chunk; for each, the position of its code in every one of ``slots``."""
        for segment, start, stop in self._codes(part, k):
            yield segment, [Span(slot.buffer, slot.start + start, slot.start + stop) for slot in slots]

    @cached_property
    def slot_nbytes(self) -> int:
        """The size of a slot into which any chunk fits."""
        parts, chunks = range(self.partition.parts), range(self.partition.chunks)
        return _aligned(max([self.nbytes(part, k) for part in parts for k in chunks]), ALIGNMENT)

    def _codes(self, part: int, k: int) -> list[tuple[Segment, int, int]]:
        """The segments of a chunk, each with the first byte and the end of its code."""
        found = self._chunks.get((part, k))
        if found is None:
            found, start = [], 0
            for segment in self.partition.segments(part, k):
                stop = start + self._size(len(segment))
                found.append((segment, start, stop))
                start = _aligned(stop, SEGMENT_ALIGNMENT)
            self._chunks[part, k] = found
        return found

    def _size(self, count: int) -> int:
        found = self._sizes.get(count)
        if found is None:
            found = self._sizes[count] = self.codec.encoded_nbytes(count, self.dtype)
        return found


class Slots:
    """A wire buffer as a ring of rows: chunk ``k`` uses row ``k % depth``, in which each peer has a slot.

    There are no more rows than chunks.

    Attributes:
        parts: by peer, the part whose codes its slots hold.
    """

    def __init__(self, encoding: Encoding, name: str, parts: Mapping[int, int], least_depth: int = 1) -> None:
        self.parts, self.encoding, self._name = parts, encoding, name
        self._depth = min(max(encoding.depth, least_depth), encoding.partition.chunks)

    def buffers(self) -> dict[str, Buffer]:
        """The buffer that holds the ring, by name; none if there are no slots."""
        nbytes = len(self.parts) * self._depth * self.encoding.slot_nbytes
        return {self._name: Buffer(nbytes, None, Role.WORK)} if self.parts else {}

    def wires(self, k: int) -> dict[int, Span]:
        """The codes of chunk ``k``, by peer."""
        nbytes = self.encoding.slot_nbytes
        start, found = k % self._depth * len(self.parts) * nbytes, {}
        for peer, part in self.parts.items():
            found[peer] = Span(self._name, start, start + self.encoding.nbytes(part, k))
            start += nbytes
        return found

    def wire(self, k: int) -> Span:
        """The code of chunk ``k``, if a row has one slot."""
        return self.wires(k).popitem()[1]


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def exchange(sends: Mapping[int, Span], recvs: Mapping[int, Span]) -> Iterator[Exchange]:
    """One Exchange of the spans by peer, without those that are empty on both sides; nothing if all are empty."""
    outgoing = tuple(Transfer(peer, span) for peer, span in sends.items() if len(span))
    incoming = tuple(Transfer(peer, span) for peer, span in recvs.items() if len(span))
    if outgoing or incoming:
        yield Exchange(outgoing, incoming)
