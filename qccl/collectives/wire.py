"""Chunks as codes on the wire: the bytes of each, and the slot of the workspace that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product, starmap, zip_longest

from qccl.base.dtypes import DType
from qccl.codecs.base import Codec
from qccl.collectives.partitions import Partition
from qccl.collectives.schedule import Buffer, Exchange, Op, Role, Span, Transfer

__all__ = ["ALIGNMENT", "SEGMENT_ALIGNMENT", "ByChunk", "Encoding", "Slots", "exchange", "to_all"]

#: alignment in bytes of wire slots: a cache line
ALIGNMENT = 64
#: alignment in bytes of the codes of several segments in one slot: a vector register of a GPU
SEGMENT_ALIGNMENT = 16

#: the operations of each chunk
ByChunk = Sequence[Sequence[Op]]


class Encoding:
    """The chunks of a partition as codes of one codec, with their sizes and slots.

    The code of a chunk consists of its segments' codes; each begins at a multiple of SEGMENT_ALIGNMENT.

    Attributes:
        depth: wire slots per peer, and so the chunks that may be on the wire at the same time.
        segments: the segments of each part.
        codes: for each segment of a part, the first byte of its code in the chunk's code, and the end.
        nbytes: by part and chunk, the bytes on the wire; 0 if the chunk is empty.
    """

    def __init__(self, partition: Partition, codec: Codec, dtype: DType, depth: int, *, sums: bool = False) -> None:
        """``sums``: encode by the codec of the second round, which encodes sums."""
        self.partition, self.codec, self.dtype, self.depth = partition, codec.rounds[sums], dtype, depth
        self.segments = [partition.segments(part) for part in range(partition.parts)]
        self.codes: list[list[tuple[int, int]]] = [[] for _ in self.segments]
        self.nbytes = [[0] * partition.chunks for _ in self.segments]
        sizes: dict[int, int] = {}
        for segments, codes, nbytes in zip(self.segments, self.codes, self.nbytes, strict=True):
            for segment in segments:
                count = segment.stop - segment.start
                if count not in sizes:
                    sizes[count] = self.codec.encoded_nbytes(count, dtype)
                start = -(-nbytes[segment.chunk] // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
                nbytes[segment.chunk] = start + sizes[count]
                codes.append((start, start + sizes[count]))

    @property
    def lag(self) -> int:
        """Iterations by which a stage that waits for a transfer follows the stage that started it; see pipeline().

        An in-order compute queue then never delays the encode of chunk k+1 for the transfers of chunk k. The lag must
        be less than the depth.
        """
        return min(1, self.depth - 1)

    @cached_property
    def slot_nbytes(self) -> int:
        """The size of a slot into which any chunk fits."""
        return -(-max(map(max, self.nbytes)) // ALIGNMENT) * ALIGNMENT


class Slots:
    """A wire buffer as a ring of rows: chunk ``k`` uses row ``k % depth``, in which each peer has a slot.

    There are no more rows than chunks.

    Attributes:
        parts: by peer, the part whose codes its slots hold.
        wires: for each chunk the codes that are not empty, by peer.
    """

    def __init__(self, encoding: Encoding, name: str, parts: Mapping[int, int], least_depth: int = 1) -> None:
        self.parts, self.encoding, self._name = parts, encoding, name
        chunks, self._nbytes = range(encoding.partition.chunks), encoding.slot_nbytes
        self._depth = min(max(encoding.depth, least_depth), len(chunks))
        self._starts: dict[int, list[int]] = {}
        self.wires: list[dict[int, Span]] = [{} for _ in chunks]
        for place, (peer, part) in enumerate(parts.items()):
            starts = [(k % self._depth * len(parts) + place) * self._nbytes for k in chunks]
            for wires, start, nbytes in zip(self.wires, starts, encoding.nbytes[part], strict=True):
                if nbytes:
                    wires[peer] = Span(name, start, start + nbytes)
            self._starts[peer] = starts

    def buffers(self) -> dict[str, Buffer]:
        """The buffer that holds the ring, by name; none if there are no slots."""
        nbytes = len(self.parts) * self._depth * self._nbytes
        return {self._name: Buffer(nbytes, None, Role.WORK)} if self.parts else {}

    def spans(self, peer: int) -> list[Span]:
        """For each segment of a peer's part, the position of its code."""
        part, slots, found = self.parts[peer], self._starts[peer], []
        for segment, (start, stop) in zip(self.encoding.segments[part], self.encoding.codes[part], strict=True):
            slot = slots[segment.chunk]
            found.append(Span(self._name, slot + start, slot + stop))
        return found


def exchange(sends: Iterable[Mapping[int, Span]], recvs: Iterable[Mapping[int, Span]]) -> ByChunk:
    """One Exchange of the spans by peer for each chunk; none if there are no spans."""
    chunks, nothing = [], dict[int, Span]()
    for outgoing, incoming in zip_longest(sends, recvs, fillvalue=nothing):
        op = Exchange(tuple(starmap(Transfer, outgoing.items())), tuple(starmap(Transfer, incoming.items())))
        chunks.append([op] if outgoing or incoming else [])
    return chunks


def to_all(peers: Iterable[int], slots: Slots) -> list[dict[int, Span]]:
    """For each chunk, the code in its only slot, to be sent to each of ``peers``."""
    return [dict(product(peers, wires.values())) for wires in slots.wires]
