"""Reduce-scatter and all-gather of plain values by the library's own collectives, in place of messages.

The classes have the methods of ScatterReduce and AllGather (rounds.py). The library adds in its own order, so results
may differ from theirs in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from qccl.collectives.operands import Arrays, Combine, Group
from qccl.collectives.rounds import Round, decode_chunk, encode_chunk
from qccl.collectives.wire import Encoding, Slots
from qccl.schedule import Exchange, NativeCollective, Op, Reduce, Span, Transfer

__all__ = ["NativeAllGather", "NativeScatterReduce"]


class NativeScatterReduce(Round):
    """Each rank copies all parts of a chunk into adjacent slots, and receives the library's sum of its own part.

    Rank ``i`` of the group owns part ``i``, and all ranks own one.
    """

    def __init__(self, group: Group, encoding: Encoding, source: Arrays, *, name: str, op: str) -> None:
        self._group, self._encoding, self._source = group, encoding, source
        self._send, self._recv = encoding.slots(f"{name}.send", group.size), encoding.slots(f"{name}.recv", 1)
        self._native = NativeCollective(tuple(group.ranks), encoding.dtype, op)

    def send(self, k: int) -> Iterator[Op]:
        """Copy chunk ``k`` of every part to its slot, and let the library sum the slots."""
        for part in range(self._group.size):
            wire = self._send.span(k, part, self._encoding.nbytes(part, k))
            yield from encode_chunk(self._encoding, part, k, self._source, wire)
        received = Transfer(self._group.rank, _slot(self._recv, k, 0))
        yield Exchange(_row(self._group, self._send, k), (received,), self._native)

    def reduce(self, k: int, combine: Combine, wire: Span | None, target: Arrays | None) -> Iterator[Op]:
        """Copy the sum of chunk ``k`` of the own part, times the scale, into ``target``; there is no ``wire``."""
        assert wire is None and target is not None
        part = self._group.index
        slot = self._recv.span(k, 0, self._encoding.nbytes(part, k))
        for segment, spans in self._encoding.segments(part, k, slot):
            out = target.span(segment)
            yield Reduce(self._encoding.codec, tuple(spans), None, 0, None, out, combine.op, combine.scale)


class NativeAllGather(Round):
    """The library gathers the ranks' slots, and each rank copies the others' parts from there."""

    def __init__(self, group: Group, encoding: Encoding, *, name: str) -> None:
        self._group, self._encoding = group, encoding
        self._send, self._recv = encoding.slots(f"{name}.send", 1), encoding.slots(f"{name}.recv", group.size)
        self._native = NativeCollective(tuple(group.ranks), encoding.dtype)

    def encode(self, k: int, source: Arrays, keep: Arrays | None = None) -> Iterator[Op]:
        """Copy chunk ``k`` of the own part to its slot; the values are exact, so there is nothing to ``keep``."""
        part = self._group.index
        wire = self._send.span(k, 0, self._encoding.nbytes(part, k))
        yield from encode_chunk(self._encoding, part, k, source, wire, keep=keep)

    def exchange(self, k: int) -> Iterator[Op]:
        """Gather the slots of chunk ``k``."""
        sent = Transfer(self._group.rank, _slot(self._send, k, 0))
        yield Exchange((sent,), _row(self._group, self._recv, k), self._native)

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Copy chunk ``k`` of the others' parts into place."""
        for part, owner in enumerate(self._group.ranks):
            if owner != self._group.rank:
                wire = self._recv.span(k, part, self._encoding.nbytes(part, k))
                yield from decode_chunk(self._encoding, part, k, wire, target, owner)


def _row(group: Group, slots: Slots, k: int) -> tuple[Transfer, ...]:
    """The whole slots of chunk ``k``, one after the other, each of one rank."""
    return tuple(Transfer(rank, _slot(slots, k, column)) for column, rank in enumerate(group.ranks))


def _slot(slots: Slots, k: int, column: int) -> Span:
    return slots.span(k, column, slots.slot_nbytes)
