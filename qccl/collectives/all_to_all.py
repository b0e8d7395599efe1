"""All-to-all: each rank sends each other rank a part of its vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.base.arrays import Values, check_disjoint
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import CallerBuffers, RankGroup
from qccl.collectives.partitions import partition_as_given
from qccl.collectives.parts import equal_parts, parts_of, row_major
from qccl.collectives.rounds import assemble, copy_values, decode_part, encode_part, merged, pipeline
from qccl.collectives.schedule import Schedule, Span
from qccl.collectives.spec import Binding, CollectiveSpec
from qccl.collectives.wire import Encoding, Slots, exchange

__all__ = ["AllToAllSpec", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllSpec(CollectiveSpec):
    """Arguments of quantized_all_to_all; ``sends`` and ``receives``: elements by peer, None if all are equal."""

    name = "all_to_all"

    sends: tuple[int, ...] | None
    receives: tuple[int, ...] | None

    @classmethod
    def from_arguments(
        cls,
        *shared: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        **own: Any,
    ) -> Self:
        """See CollectiveSpec; the counts are the lengths of the parts for and from each rank."""
        if (send_counts is None) != (recv_counts is None):
            raise ArgumentError("send_counts and recv_counts belong together; give both, or neither if all are equal")
        sends, receives = parts_of(send_counts, "send_counts"), parts_of(recv_counts, "recv_counts")
        return cls.checked(*shared, sends=sends, receives=receives, **own)

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        del shown["sends"], shown["receives"]
        if self.sends is not None:
            shown["count"] = "by pair"
        return shown

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """The elements that go each way between this rank and each other rank, if counts were given."""
        if self.sends is None or self.receives is None:
            return ()
        return tuple(
            f"; {min(rank, p)} sends {max(rank, p)} {(out, back)[rank > p]} elements and gets {(back, out)[rank > p]}"
            for p, (out, back) in enumerate(zip(self.sends, self.receives, strict=True))
        )

    def lengths(self, rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The elements sent and received, by peer. Raises ArgumentError if they do not fit."""
        if self.sends is None or self.receives is None:
            equal = equal_parts(self.count, size, self.name, "send_counts= and recv_counts=")
            return equal, equal
        for keyword, lengths in (("send_counts", self.sends), ("recv_counts", self.receives)):
            if len(lengths) != size:
                raise ArgumentError(f"{keyword} has {len(lengths)} numbers; there must be {size}, one for each rank")
        if self.sends[rank] != self.receives[rank]:
            raise ArgumentError(
                f"rank {rank} sends itself {self.sends[rank]} elements and gets {self.receives[rank]} from itself; "
                f"these must be equal"
            )
        return self.sends, self.receives

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.exchanged(*self.lengths(rank, size), self.dtype)

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """Accept row-major arrays alone, because parts are ranges of elements."""
        return row_major(arrays, self.name)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """Check that input and output do not overlap: the call is never in place."""
        check_disjoint([arrays["output"]], [arrays["input"]])
        return Binding(False, {name: values.address for name, values in arrays.items()})

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        sends, receives = self.lengths(group.rank, group.size)
        return all_to_all(group, sends, receives, self.dtype, self.codec, chunking=chunking)


def all_to_all(
    group: RankGroup,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    *,
    chunking: ChunkPolicy,
) -> Schedule:
    """Send rank r's part j to rank j, where it is part r. Counts are this rank's, by peer, and may differ.

    Every part is sent once, in one hop; the own part is copied without being encoded.
    """
    rank = group.rank
    buffers = CallerBuffers.exchanged(send_counts, recv_counts, dtype)
    out, back = (
        Encoding(partition_as_given(counts, codec, chunking), codec, dtype, chunking.depth)
        for counts in (send_counts, recv_counts)
    )
    send, recv = (Slots(*each, {peer: peer for peer in group.others}) for each in ((out, "send"), (back, "recv")))

    # Both ranks number an element by its position in the part. The receiver's rank serves as the round, so that no
    # random number is used twice.
    def origin(slots: Slots, peer: int) -> int:
        return next((segment.index for segment in slots.encoding.segments[peer]), 0)

    encodes = [encode_part(send, peer, buffers.source, peer, origin=origin(send, peer)) for peer in group.others]
    decodes = [decode_part(recv, peer, buffers.target, rank, origin=origin(recv, peer)) for peer in group.others]
    start, first, count = sum(send_counts[:rank]), sum(recv_counts[:rank]), send_counts[rank]
    own = copy_values(codec, Span("input", start, start + count), Span("output", first, first + count))
    stages = (0, merged(*encodes, exchange(send.wires, recv.wires))), (0, [[own] if count else []])
    ops = pipeline(*stages, (out.lag, merged(*decodes)))
    return assemble("all_to_all", group, buffers, ops, send, recv)
