"""The rounds of collectives, chunk by chunk: scatter-reduce and all-gather.

A round has a method for each stage of the pipeline; the method yields the operations of one chunk. A round runs in a
group of ranks: rank ``i`` of the group owns part ``i`` of the round's partition. If the partition has fewer parts than
the group has ranks, the last ranks own none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from qccl.codecs.base import Codec
from qccl.collectives.feedback import with_feedback
from qccl.collectives.operands import SUM, Arrays, CallerBuffers, Combine, Places, RankGroup
from qccl.collectives.schedule import Buffer, Decode, Encode, Op, Reduce, Schedule, Span
from qccl.collectives.wire import Encoding, Slots, exchange

__all__ = ["AllGatherRound", "Round", "ScatterReduce", "Stage", "alone", "assemble", "copy_values", "decode_chunk"]
__all__ += ["decode_row", "encode_chunk", "encode_row", "pipeline"]

#: a stage of a pipeline: its lag, and the function that makes the operations of a chunk
Stage = tuple[int, Callable[[int], Iterator[Op]]]


class Round:
    """A round with two wire buffers, one for sends and one for receives."""

    _send: Slots
    _recv: Slots

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return self._send.buffers() | self._recv.buffers()


class ScatterReduce(Round):
    """Each rank sends every owner its part, and the owners reduce the codes that they receive and their own values.

    There is one wire slot for each peer in "scatter.send" and in "scatter.recv"; ``name`` replaces "scatter".
    """

    def __init__(
        self,
        group: RankGroup,
        encoding: Encoding,
        source: Places,
        *,
        name: str = "scatter",
        round_number: int = 0,
        owners: Mapping[int, int] | None = None,
        senders: Sequence[int] | None = None,
    ) -> None:
        """``owners``: the part of each rank to which this rank sends, and its own part (None: group.owners()).

        ``senders``: the other ranks of the group, in the order of their slots (None: group.others).
        """
        self.encoding, self._source, self._round = encoding, source, round_number
        self._index = group.index
        owners = group.owners(encoding.partition.parts) if owners is None else owners
        self._part = owners.get(group.rank)
        self._in_order = tuple(other for other in group.ranks if other != group.rank)
        own = {} if self._part is None else dict.fromkeys(senders or group.others, self._part)
        self._send = Slots(encoding, f"{name}.send", {peer: owners[peer] for peer in owners if peer != group.rank})
        self._recv = Slots(encoding, f"{name}.recv", own)

    def send(self, k: int) -> Iterator[Op]:
        """Encode chunk ``k`` of every owner's part and exchange."""
        yield from encode_row(self._send, k, self._source, self._round)
        yield from exchange(self._send.wires(k), self._recv.wires(k))

    def reduce(self, k: int, combine: Combine, wire: Span | None, target: Places | None) -> Iterator[Op]:
        """Combine the codes of chunk ``k`` of the own part with the own values, into ``wire`` and ``target``."""
        if self._part is None:
            return
        received = self._recv.wires(k)
        wires = [received[other] for other in self._in_order]
        slots = wires if wire is None else [*wires, wire]
        for segment, spans in self.encoding.segments(self._part, k, *slots):
            yield Reduce(
                self.encoding.codec,
                srcs=tuple(spans[: len(wires)]),
                own=self._source.span(segment),
                own_index=self._index,
                wire=None if wire is None else spans[-1],
                out=None if target is None else target.span(segment),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                round=self._round + 1,
                src_ranks=self._in_order,
                src_round=self._round,
            )


class AllGatherRound(Round):
    """Each owner sends its wire to other ranks, and each rank receives the wires of owners.

    There is one wire slot in "gather.send", and one for each owner in "gather.recv"; ``name`` replaces "gather".
    """

    def __init__(
        self,
        group: RankGroup,
        encoding: Encoding,
        *,
        name: str = "gather",
        round_number: int = 0,
        owners: Mapping[int, int] | None = None,
        receivers: Sequence[int] | None = None,
    ) -> None:
        """``owners``: the part of each rank whose wire this rank makes or receives (None: group.owners()).

        ``receivers``: the ranks that get the own wire (None: group.others). ``round_number``: the round of the wires.
        """
        self.encoding, self._round, self._ranks = encoding, round_number, group.ranks
        owners = group.owners(encoding.partition.parts) if owners is None else owners
        own = {group.rank: owners[group.rank]} if group.rank in owners else {}
        self._receivers = (receivers or group.others) if own else ()
        self._send = Slots(encoding, f"{name}.send", own)
        self._recv = Slots(encoding, f"{name}.recv", {owner: owners[owner] for owner in owners if owner not in own})

    def wire(self, k: int) -> Span:
        """The slot from which the own wire of chunk ``k`` is sent."""
        return self._send.wire(k)

    def received(self, k: int) -> dict[int, Span]:
        """The slots of the others' wires of chunk ``k``, by owner."""
        return self._recv.wires(k)

    def encode(self, k: int, source: Arrays, keep: Arrays | None = None) -> Iterator[Op]:
        """Encode chunk ``k`` of the own part, if there is one; ``keep`` receives the values that the others decode."""
        yield from encode_row(self._send, k, source, self._round, keep)

    def exchange(self, k: int) -> Iterator[Op]:
        """Send the own wire of chunk ``k`` to the receivers, and receive the owners' wires."""
        sends = {peer: wire for wire in self._send.wires(k).values() for peer in self._receivers}
        yield from exchange(sends, self._recv.wires(k))

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode chunk ``k`` of the others' parts into place."""
        yield from decode_row(self._recv, k, target, self._round)

    def reduce(self, k: int, combine: Combine, target: Arrays) -> Iterator[Op]:
        """Combine all wires of chunk ``k``, the own one included, in the group's order; all ranks own the same part."""
        found = self._recv.wires(k) | self._send.wires(k)
        for segment, spans in self.encoding.segments(0, k, *(found[rank] for rank in self._ranks)):
            yield Reduce(
                self.encoding.codec,
                srcs=tuple(spans),
                own=None,
                own_index=0,
                wire=None,
                out=target.span(segment),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                src_ranks=tuple(self._ranks),
                src_round=self._round,
            )


def encode_chunk(
    encoding: Encoding,
    part: int,
    k: int,
    source: Places,
    wire: Span,
    round_number: int = 0,
    keep: Arrays | None = None,
    *,
    origin: int = 0,
) -> Iterator[Op]:
    """Encode chunk ``k`` of a part into ``wire``; ``keep`` receives the decoded values, in the same pass.

    Elements are numbered from ``origin`` on.
    """
    for segment, (span,) in encoding.segments(part, k, wire):
        index = segment.index - origin
        if keep is None:
            yield Encode(encoding.codec, source.span(segment), span, index, round_number)
        else:
            own, out = source.span(segment), keep.span(segment)
            yield Reduce(encoding.codec, (), own, 0, span, out, index=index, round=round_number)


def decode_chunk(
    encoding: Encoding,
    part: int,
    k: int,
    wire: Span,
    target: Arrays,
    maker: int,
    round_number: int = 0,
    *,
    origin: int = 0,
    accumulate: bool = False,
) -> Iterator[Op]:
    """Decode chunk ``k`` of a part from ``wire``, made by rank ``maker``; ``accumulate`` adds it to ``target``."""
    for segment, (span,) in encoding.segments(part, k, wire):
        index = segment.index - origin
        yield Decode(encoding.codec, span, target.span(segment), accumulate, index, round_number, maker)


def encode_row(
    slots: Slots, k: int, source: Places, round_number: int = 0, keep: Arrays | None = None
) -> Iterator[Op]:  # fmt: skip
    """encode_chunk() for each slot of a row."""
    for peer, wire in slots.wires(k).items():
        yield from encode_chunk(slots.encoding, slots.parts[peer], k, source, wire, round_number, keep)


def decode_row(slots: Slots, k: int, target: Arrays, round_number: int = 0) -> Iterator[Op]:
    """decode_chunk() for each slot of a row, by the peer that made the code."""
    for peer, wire in slots.wires(k).items():
        yield from decode_chunk(slots.encoding, slots.parts[peer], k, wire, target, peer, round_number)


def alone(buffers: CallerBuffers, codec: Codec, combine: Combine = SUM) -> Iterator[Op]:
    """The operations of a rank without peers: exact copies, with momentum; none if the copy would change nothing."""
    if buffers.source != buffers.target or combine.scale != 1.0 or "momentum" in codec.state_names:
        for source, target, count in zip(buffers.source.names, buffers.target.names, buffers.counts, strict=True):
            if count:
                yield copy_values(codec, Span(source, 0, count), Span(target, 0, count), combine)


def copy_values(codec: Codec, source: Span, target: Span, combine: Combine = SUM) -> Op:
    """Copy values times the scale, without encoding them; ``codec`` only adds its momentum."""
    return Reduce(codec, (), source, 0, None, target, combine.op, combine.scale)


def pipeline(chunks: int, *stages: Stage) -> tuple[Op, ...]:
    """The program order of a pipeline: in iteration ``i`` each stage ``(lag, make)`` in turn does chunk ``i - lag``.

    On the host the order is only a priority. On CUDA the queues keep it, so it decides what can overlap: an operation
    that waits for chunk ``k`` must have a lag that puts it behind the encode of chunk ``k + 1``.
    """
    ops: list[Op] = []
    for i in range(chunks + max(lag for lag, _ in stages)):
        for lag, make in stages:
            if 0 <= i - lag < chunks:
                ops.extend(make(i - lag))
    return tuple(ops)


class _HasBuffers(Protocol):
    """An object with wire buffers: a round, or Slots."""

    def buffers(self) -> dict[str, Buffer]: ...


def assemble(
    name: str,
    group: RankGroup,
    caller: CallerBuffers,
    ops: Iterable[Op],
    *wires: _HasBuffers,
    guarded: Sequence[Span] = (),
) -> Schedule:
    """The schedule of ``ops``, with the caller's buffers, the buffers of ``wires``, and the state of stateful codecs.

    A call changes the state only if the caller's buffers and the ``guarded`` spans are finite at its end.
    """
    buffers = dict(caller.declared)
    for each in wires:
        buffers |= each.buffers()
    schedule = Schedule(name, group.rank, group.size, buffers, tuple(ops))
    return with_feedback(schedule, caller.guard or caller.target.names, guarded)
