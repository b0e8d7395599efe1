"""The rounds that all-reduce and its relatives are made of, chunk by chunk: scatter-reduce and all-gather.

A round has a method per stage of the pipeline; each yields the operations of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qccl.collectives.layout import Coded, Slots, exchange, peers_of
from qccl.schedule import Buffer, Decode, Encode, Op, Reduce, Span

__all__ = ["AllGather", "Combine", "ScatterReduce"]


@dataclass(frozen=True, slots=True)
class Combine:
    """How the ranks' values become one: ``op`` ("sum", "min", "max"), then times ``scale``."""

    op: str = "sum"
    scale: float = 1.0


class ScatterReduce:
    """Each rank sends every peer that peer's shard, and reduces the codes of its own shard that it gets.

    Wire slots: one for each peer in "scatter.send" and in "scatter.recv".
    """

    def __init__(self, rank: int, coded: Coded, source: str, depth: int) -> None:
        self._rank, self._coded, self._source = rank, coded, source
        self._layout, self._codec = coded.layout, coded.codec
        self._peers = peers_of(rank, coded.layout.parts)
        self._send = coded.slots("scatter.send", len(self._peers), depth)
        self._recv = coded.slots("scatter.recv", len(self._peers), depth)

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return _buffers(self._send, self._recv)

    def send(self, k: int) -> Iterator[Op]:
        """Encode chunk ``k`` of every peer's shard and exchange."""
        wires = {p: self._send.span(k, i, self._coded.nbytes(p, k)) for i, p in enumerate(self._peers)}
        for peer, wire in wires.items():
            if values := self._layout.chunk(peer, k):
                yield Encode(self._codec, _span(self._source, values), wire, values.start)
        yield from exchange(wires, self._received(k))

    def reduce(self, k: int, combine: Combine, wire: Span | None, out: Span | None) -> Iterator[Op]:
        """Combine the peers' codes of chunk ``k`` of the own shard with the own values, into ``wire`` and ``out``."""
        if not (values := self._layout.chunk(self._rank, k)):
            return
        received = self._received(k)
        yield Reduce(
            self._codec,
            srcs=tuple(received[peer] for peer in sorted(received)),
            own=_span(self._source, values),
            own_index=self._rank,
            wire=wire,
            out=out,
            op=combine.op,
            scale=combine.scale,
            index=values.start,
        )

    def own(self, k: int, buffer: str) -> Span:
        """Chunk ``k`` of the own shard in a buffer of values."""
        return _span(buffer, self._layout.chunk(self._rank, k))

    def _received(self, k: int) -> dict[int, Span]:
        nbytes = self._coded.nbytes(self._rank, k)
        return {p: self._recv.span(k, i, nbytes) for i, p in enumerate(self._peers)}


class AllGather:
    """Each rank sends one wire to all peers and gets theirs.

    The layout has a shard per rank, or one that is common to all ranks: then every rank sends codes of the same
    elements. Wire slots: one in "gather.send", one for each peer in "gather.recv".
    """

    def __init__(self, rank: int, size: int, coded: Coded, depth: int) -> None:
        self._rank, self._coded = rank, coded
        self._shard_of = range(size) if coded.layout.parts == size else (0,) * size
        self._peers = peers_of(rank, size)
        self._send = coded.slots("gather.send", 1, depth)
        self._recv = coded.slots("gather.recv", len(self._peers), depth)

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return _buffers(self._send, self._recv)

    def wire(self, k: int) -> Span:
        """Where the own wire of chunk ``k`` is put, to be sent."""
        return self._send.span(k, 0, self._coded.nbytes(self._shard_of[self._rank], k))

    def wires(self, k: int) -> tuple[Span, ...]:
        """The wires of chunk ``k`` of all ranks, in rank order."""
        found = self._received(k) | {self._rank: self.wire(k)}
        return tuple(found[rank] for rank in sorted(found))

    def exchange(self, k: int) -> Iterator[Op]:
        """Send the own wire of chunk ``k`` to all, and receive theirs."""
        yield from exchange(dict.fromkeys(self._peers, self.wire(k)), self._received(k))

    def decode(self, k: int, target: str) -> Iterator[Op]:
        """Decode chunk ``k`` of the peers' shards into place."""
        for peer, wire in self._received(k).items():
            if values := self._coded.layout.chunk(self._shard_of[peer], k):
                yield Decode(self._coded.codec, wire, _span(target, values))

    def _received(self, k: int) -> dict[int, Span]:
        return {p: self._recv.span(k, i, self._coded.nbytes(self._shard_of[p], k)) for i, p in enumerate(self._peers)}


def _span(buffer: str, elements: range) -> Span:
    return Span(buffer, elements.start, elements.stop)


def _buffers(*slots: Slots) -> dict[str, Buffer]:
    return {s.name: s.buffer() for s in slots}
