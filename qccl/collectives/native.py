"""Reduce-scatter and all-gather of plain values by the library's own collectives, in place of messages.

The classes have the methods of ScatterReduce and AllGather (rounds.py). The library adds in its own order, so results
may differ from theirs in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from qccl.collectives.operands import Arrays, Combine, Group
from qccl.collectives.rounds import Round, decode_chunk, encode_row
from qccl.collectives.wire import Encoding, Slots
from qccl.schedule import Exchange, NativeCollective, Op, Reduce, Span, Transfer

__all__ = ["NativeAllGather", "NativeScatterReduce"]


class _Native(Round):
    """A round that the library moves from all slots of a row to all slots of another one."""

    def __init__(self, group: Group, encoding: Encoding, name: str, op: str | None) -> None:
        """With ``op`` a reduce-scatter, without an all-gather; rank ``i`` of the group owns part ``i``."""
        own, every = {group.rank: group.index}, {rank: part for part, rank in enumerate(group.ranks)}
        self.encoding, self._rank = encoding, group.rank
        self._send = Slots(encoding, f"{name}.send", every if op else own)
        self._recv = Slots(encoding, f"{name}.recv", own if op else every)
        self._native = NativeCollective(tuple(group.ranks), encoding.dtype, op)

    def exchange(self, k: int) -> Iterator[Op]:
        """Sum or gather the slots of chunk ``k``."""
        sends, recvs = (slots.wires(k, whole=True).items() for slots in (self._send, self._recv))
        yield Exchange(tuple(Transfer(*sent) for sent in sends), tuple(Transfer(*got) for got in recvs), self._native)


class NativeScatterReduce(_Native):
    """Each rank copies all parts of a chunk into adjacent slots, and receives the library's sum of its own part."""

    def __init__(self, group: Group, encoding: Encoding, source: Arrays, op: str) -> None:
        super().__init__(group, encoding, "up", op)
        self._source = source

    def send(self, k: int) -> Iterator[Op]:
        """Copy chunk ``k`` of every part to its slot, and let the library sum the slots."""
        yield from encode_row(self._send, k, self._source)
        yield from self.exchange(k)

    def reduce(self, k: int, combine: Combine, wire: Span | None, target: Arrays | None) -> Iterator[Op]:
        """Copy the sum of chunk ``k`` of the own part, times the scale, into ``target``; there is no ``wire``."""
        assert wire is None and target is not None
        for segment, spans in self.encoding.segments(self._recv.parts[self._rank], k, self._recv.wire(k)):
            out = target.span(segment)
            yield Reduce(self.encoding.codec, tuple(spans), None, 0, None, out, combine.op, combine.scale)


class NativeAllGather(_Native):
    """The library gathers the ranks' slots, and each rank copies the others' parts from there."""

    def __init__(self, group: Group, encoding: Encoding) -> None:
        super().__init__(group, encoding, "down", None)

    def encode(self, k: int, source: Arrays, keep: Arrays | None = None) -> Iterator[Op]:
        """Copy chunk ``k`` of the own part to its slot; the values are exact, so there is nothing to ``keep``."""
        yield from encode_row(self._send, k, source, keep=keep)

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Copy chunk ``k`` of the others' parts into place."""
        for owner, wire in self._recv.wires(k).items():
            if owner != self._rank:
                yield from decode_chunk(self.encoding, self._recv.parts[owner], k, wire, target, owner)
