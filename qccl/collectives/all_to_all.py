"""All-to-all: each rank sends each other rank a part of its vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arrays import Values, check_disjoint
from qccl.codecs.base import Codec
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    CallerBuffers,
    Encoding,
    exchange,
    partition_as_given,
    peers_of,
    pipeline,
)
from qccl.collectives.rounds import checked, copy, decode, encode
from qccl.collectives.spec import CollectiveSpec, common, equal_parts, parts_of, row_major
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["AllToAllSpec", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllSpec(CollectiveSpec):
    """Parameters of quantized_all_to_all; ``sends`` and ``receives`` are this rank's, by peer; None: all are equal."""

    name = "all_to_all"

    sends: tuple[int, ...] | None
    receives: tuple[int, ...] | None

    @classmethod
    def from_arguments(
        cls, *shared: Any, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
    ) -> Self:
        """Check the arguments."""
        if (send_counts is None) != (recv_counts is None):
            raise ArgumentError("send_counts and recv_counts belong together; give both, or none where all are equal")
        return cls(
            **common(*shared), sends=parts_of(send_counts, "send_counts"), receives=parts_of(recv_counts, "recv_counts")
        )

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        del shown["sends"], shown["receives"]
        if self.sends is not None:
            shown["count"] = "by pair"
        return shown

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """See CollectiveSpec: how many elements go each way."""
        if self.sends is None or self.receives is None:
            return ()
        return tuple(
            f"; {min(rank, p)} sends {max(rank, p)} {(out, back)[rank > p]} elements and gets {(back, out)[rank > p]}"
            for p, (out, back) in enumerate(zip(self.sends, self.receives, strict=True))
        )

    def lengths(self, rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is sent and received, by peer. Raises ArgumentError where it does not fit."""
        if self.sends is None or self.receives is None:
            equal = equal_parts(self.count, size, self.name, "send_counts= and recv_counts=")
            return equal, equal
        for what, given in (("send_counts", self.sends), ("recv_counts", self.receives)):
            if len(given) != size:
                raise ArgumentError(f"{what} has {len(given)} numbers; there must be {size}, one for each rank")
        if self.sends[rank] != self.receives[rank]:
            raise ArgumentError(
                f"rank {rank} sends itself {self.sends[rank]} elements and gets {self.receives[rank]} from itself; "
                f"these must be equal"
            )
        return self.sends, self.receives

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        sends, receives = self.lengths(rank, size)
        return {"input": sum(sends), "output": sum(receives)}

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See CollectiveSpec."""
        return row_major(arrays, self.name)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See CollectiveSpec."""
        check_disjoint([arrays["output"]], [arrays["input"]])
        return False, {name: values.address for name, values in arrays.items()}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        sends, receives = self.lengths(rank, size)
        chunk = self._chunk(default_chunk)
        return all_to_all(rank, size, sends, receives, self.dtype, self.codec, chunk_elements=chunk)


def all_to_all(
    rank: int,
    size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    *,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Rank r's part j goes to rank j, where it is part r; counts are this rank's, by peer, and may differ.

    Everything is sent once, in one step; the own part is copied as it is.
    """
    checked(rank, size, "sum", 1.0, depth, *send_counts, *recv_counts)
    caller = CallerBuffers.make(in_place=False)
    buffers = {
        "input": Buffer(sum(send_counts), dtype, Role.INPUT),
        "output": Buffer(sum(recv_counts), dtype, Role.OUTPUT),
    }
    peers = peers_of(rank, size)
    out, back = (
        Encoding(partition_as_given(counts, codec, chunk_elements), codec, dtype)
        for counts in (send_counts, recv_counts)
    )
    send, recv = out.slots("send", len(peers), depth), back.slots("recv", len(peers), depth)

    # Both ranks number an element by its place in the part. So that no random number is used twice, the number of the
    # receiver stands for the round.
    def first_of(encoding: Encoding, peer: int) -> int:
        return next((segment.index for segment in encoding.layout.segments(peer, 0)), 0)

    def keep(k: int) -> Iterator[Op]:
        start, first, count = sum(send_counts[:rank]), sum(recv_counts[:rank]), send_counts[rank]
        if k == 0 and count:
            yield copy(codec, Span("input", start, start + count), Span("output", first, first + count))

    def received(k: int) -> dict[int, Span]:
        return {peer: recv.span(k, i, back.nbytes(peer, k)) for i, peer in enumerate(peers)}

    def post(k: int) -> Iterator[Op]:
        wires = {peer: send.span(k, i, out.nbytes(peer, k)) for i, peer in enumerate(peers)}
        for peer, wire in wires.items():
            yield from encode(out, peer, k, caller.source, wire, peer, origin=first_of(out, peer))
        yield from exchange(wires, received(k))

    def take(k: int) -> Iterator[Op]:
        for peer, wire in received(k).items():
            yield from decode(back, peer, k, wire, caller.target, peer, rank, origin=first_of(back, peer))

    chunks = max(out.layout.chunks, back.layout.chunks)
    ops = pipeline(chunks, (0, post), (0, keep), (min(1, depth - 1), take))
    slots = {ring.name: ring.buffer() for ring in (send, recv) if peers}
    return Schedule("all_to_all", rank, size, buffers | slots, ops)
