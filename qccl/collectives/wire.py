"""Chunks as codes on the wire: how many bytes each has, and which slot of the workspace holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qccl.codecs.base import Codec
from qccl.collectives.partitions import Partition, Segment
from qccl.dtypes import DType
from qccl.schedule import Buffer, Exchange, Role, Span, Transfer

__all__ = ["ALIGNMENT", "SEGMENT_ALIGNMENT", "Encoding", "Slots", "exchange"]

#: alignment in bytes of wire slots: a cache line
ALIGNMENT = 64
#: alignment in bytes of the codes of several segments in one slot: a vector register of a GPU
SEGMENT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Slots:
    """A wire buffer as a ring of ``depth`` rows of ``width`` slots: chunk ``k`` uses row ``k % depth``."""

    name: str
    width: int
    depth: int
    slot_nbytes: int

    def buffers(self) -> dict[str, Buffer]:
        """The buffer that holds the ring, by name; none if there are no slots."""
        return {self.name: Buffer(self.width * self.depth * self.slot_nbytes, None, Role.WORK)} if self.width else {}

    def span(self, k: int, column: int, nbytes: int) -> Span:
        """The first ``nbytes`` of a slot."""
        start = ((k % self.depth) * self.width + column) * self.slot_nbytes
        return Span(self.name, start, start + nbytes)


class Encoding:
    """The chunks of a partition as codes of one codec, with their sizes and slots.

    The code of a chunk is the codes of its segments; each begins at a multiple of SEGMENT_ALIGNMENT.

    Attributes:
        depth: wire slots per peer, and so the chunks that may be on the wire at the same time.
    """

    def __init__(self, partition: Partition, codec: Codec, dtype: DType, depth: int, *, sums: bool = False) -> None:
        """``sums``: by the codec of the second round, which encodes sums."""
        self.partition, self.codec, self.dtype, self.depth = partition, codec.rounds[sums], dtype, depth
        self._sizes: dict[int, int] = {}
        self._chunks: dict[tuple[int, int], list[tuple[Segment, int, int]]] = {}

    def of_sums(self, codec: Codec) -> Encoding:
        """The same chunks in the second round of ``codec``."""
        return Encoding(self.partition, codec, self.dtype, self.depth, sums=True)

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

    def slots(self, name: str, width: int, least_depth: int = 1) -> Slots:
        """A ring of slots, each large enough for any chunk, with no more rows than there are chunks."""
        partition = self.partition
        largest = max(self.nbytes(part, k) for part in range(partition.parts) for k in range(partition.chunks))
        return Slots(name, width, min(max(self.depth, least_depth), partition.chunks), _aligned(largest, ALIGNMENT))

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


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def exchange(sends: Mapping[int, Span], recvs: Mapping[int, Span]) -> Iterator[Exchange]:
    """One Exchange of the spans by peer, without the empty ones (they are empty on both sides); none if all are."""
    outgoing = tuple(Transfer(peer, span) for peer, span in sends.items() if len(span))
    incoming = tuple(Transfer(peer, span) for peer, span in recvs.items() if len(span))
    if outgoing or incoming:
        yield Exchange(outgoing, incoming)
