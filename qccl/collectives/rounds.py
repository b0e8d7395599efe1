"""The rounds that collectives are made of, chunk by chunk: scatter-reduce and all-gather.

A round has a method for each stage of the pipeline; the method yields the operations of one chunk. A round runs in a
group of ranks: rank ``i`` of the group owns part ``i`` of the round's partition. If the partition has fewer parts than
the group has ranks, the last ranks own none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from qccl.codecs.base import Codec
from qccl.collectives.feedback import with_feedback
from qccl.collectives.operands import SUM, Arrays, CallerBuffers, Combine, Group, Places
from qccl.collectives.wire import Encoding, Slots, exchange
from qccl.schedule import Buffer, Decode, Encode, Op, Reduce, Schedule, Span

__all__ = ["AllGather", "Round", "ScatterReduce", "alone", "assemble", "copy_values", "decode_chunk", "encode_chunk"]
__all__ += ["pipeline", "reduce_and_encode"]


class Round:
    """A round with two wire buffers, one for sends and one for receives."""

    _send: Slots
    _recv: Slots

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return self._send.buffers() | self._recv.buffers()


class ScatterReduce(Round):
    """Each rank sends every owner its part, and the owners reduce the codes that they receive and their own values.

    ``owners`` are the ranks that own parts 0, 1, ... (by default the first ranks of the group). There is one wire slot
    for each peer in "scatter.send" and in "scatter.recv"; ``name`` replaces "scatter".
    """

    def __init__(
        self,
        group: Group,
        encoding: Encoding,
        source: Arrays,
        *,
        name: str = "scatter",
        round_number: int = 0,
        owners: Sequence[int] | None = None,
    ) -> None:
        self._encoding, self._source, self._round = encoding, source, round_number
        self._index = group.index
        part_of = {owner: part for part, owner in enumerate(owners or group.ranks[: encoding.partition.parts])}
        self._part = part_of.get(group.rank)
        self._owners = {other: part_of[other] for other in group.others if other in part_of}
        self._senders = () if self._part is None else group.others
        self._in_order = tuple(other for other in group.ranks if other != group.rank)
        self._send = encoding.slots(f"{name}.send", len(self._owners))
        self._recv = encoding.slots(f"{name}.recv", len(self._senders))

    @property
    def codec(self) -> Codec:
        """What encodes the values."""
        return self._encoding.codec

    def send(self, k: int) -> Iterator[Op]:
        """Encode chunk ``k`` of every owner's part and exchange."""
        sends = {}
        for i, (owner, part) in enumerate(self._owners.items()):
            wire = sends[owner] = self._send.span(k, i, self._encoding.nbytes(part, k))
            yield from encode_chunk(self._encoding, part, k, self._source, wire, self._round)
        yield from exchange(sends, self._received(k))

    def reduce(self, k: int, combine: Combine, wire: Span | None, target: Places | None) -> Iterator[Op]:
        """Combine the codes of chunk ``k`` of the own part with the own values, into ``wire`` and ``target``."""
        if self._part is None:
            return
        received = self._received(k)
        wires = [received[other] for other in self._in_order]
        slots = wires if wire is None else [*wires, wire]
        for segment, spans in self._encoding.segments(self._part, k, *slots):
            yield Reduce(
                self._encoding.codec,
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

    def _received(self, k: int) -> dict[int, Span]:
        if self._part is None:
            return {}
        nbytes = self._encoding.nbytes(self._part, k)
        return {other: self._recv.span(k, i, nbytes) for i, other in enumerate(self._senders)}


class AllGather(Round):
    """Each owner sends its wire to all other ranks, and each rank receives the wires of all owners.

    With ``common`` there is one part, and every rank sends a code of it. ``round_number`` is the round in which the
    wires are made. There is one wire slot in "gather.send", and one for each owner in "gather.recv"; ``name`` replaces
    "gather".
    """

    def __init__(
        self, group: Group, encoding: Encoding, *, name: str = "gather", round_number: int = 0, common: bool = False
    ) -> None:
        self._encoding, self._round = encoding, round_number
        self._rank, self._ranks = group.rank, group.ranks
        owners = group.ranks if common else group.ranks[: encoding.partition.parts]
        self._part_of = {owner: 0 if common else part for part, owner in enumerate(owners)}
        self._owners = [other for other in group.others if other in self._part_of]
        self._receivers = group.others if group.rank in self._part_of else ()
        self._send = encoding.slots(f"{name}.send", 1 if self._receivers else 0)
        self._recv = encoding.slots(f"{name}.recv", len(self._owners))

    @property
    def codec(self) -> Codec:
        """What encodes the sums."""
        return self._encoding.codec

    def wire(self, k: int) -> Span:
        """The slot of the own wire of chunk ``k``, from which it is sent."""
        return self._send.span(k, 0, self._encoding.nbytes(self._part_of[self._rank], k))

    def encode(self, k: int, source: Arrays, keep: Arrays | None = None) -> Iterator[Op]:
        """Encode chunk ``k`` of the own part, if there is one; ``keep`` receives the values that the others decode."""
        if self._rank in self._part_of:
            part = self._part_of[self._rank]
            yield from encode_chunk(self._encoding, part, k, source, self.wire(k), self._round, keep)

    def exchange(self, k: int) -> Iterator[Op]:
        """Send the own wire of chunk ``k`` to all, and receive theirs."""
        sends = dict.fromkeys(self._receivers, self.wire(k)) if self._receivers else {}
        yield from exchange(sends, self._received(k))

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode chunk ``k`` of the others' parts into place."""
        for owner, slot in self._received(k).items():
            yield from decode_chunk(self._encoding, self._part_of[owner], k, slot, target, owner, self._round)

    def reduce(self, k: int, combine: Combine, target: Arrays) -> Iterator[Op]:
        """With ``common``: combine all wires of chunk ``k``, the own one included, in the group's order."""
        found = self._received(k) | {self._rank: self.wire(k)}
        for segment, spans in self._encoding.segments(0, k, *(found[rank] for rank in self._ranks)):
            yield Reduce(
                *(self._encoding.codec, tuple(spans), None, 0, None, target.span(segment)),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                src_ranks=tuple(self._ranks),
                src_round=self._round,
            )

    def _received(self, k: int) -> dict[int, Span]:
        return {
            owner: self._recv.span(k, i, self._encoding.nbytes(self._part_of[owner], k))
            for i, owner in enumerate(self._owners)
        }


def reduce_and_encode(
    scatter: ScatterReduce, gather: AllGather, k: int, combine: Combine, target: Arrays
) -> Iterator[Op]:
    """Reduce chunk ``k`` of the own part into ``target`` and into the wire that ``gather`` sends.

    If the rounds have different codecs, the sum is stored in the element type before it is encoded.
    """
    if scatter.codec == gather.codec:
        yield from scatter.reduce(k, combine, gather.wire(k), target)
    else:
        yield from scatter.reduce(k, combine, None, target)
        yield from gather.encode(k, target, target)


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


def alone(buffers: CallerBuffers, codec: Codec, combine: Combine = SUM) -> Iterator[Op]:
    """The operations of a rank without peers: exact copies, with momentum, if there is anything to change."""
    if buffers.source != buffers.target or combine.scale != 1.0 or "momentum" in codec.state_names:
        for source, target, count in zip(buffers.source.names, buffers.target.names, buffers.counts, strict=True):
            if count:
                yield copy_values(codec, Span(source, 0, count), Span(target, 0, count), combine)


def copy_values(codec: Codec, source: Span, target: Span, combine: Combine = SUM) -> Op:
    """Copy values, times the scale; they are not encoded (of ``codec`` only the momentum counts)."""
    return Reduce(codec, (), source, 0, None, target, combine.op, combine.scale)


def pipeline(chunks: int, *stages: tuple[int, Callable[[int], Iterator[Op]]]) -> tuple[Op, ...]:
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
    """A round, or Slots."""

    def buffers(self) -> dict[str, Buffer]: ...


def assemble(
    name: str,
    group: Group,
    caller: CallerBuffers,
    ops: Iterable[Op],
    *wires: _HasBuffers,
    guarded: Sequence[Span] = (),
) -> Schedule:
    """The schedule of ``ops``, with the caller's buffers, those of ``wires``, and the state of stateful codecs.

    State changes if the caller's buffers and the ``guarded`` spans are finite.
    """
    buffers = dict(caller.declared)
    for each in wires:
        buffers |= each.buffers()
    schedule = Schedule(name, group.rank, group.size, buffers, tuple(ops))
    return with_feedback(schedule, caller.guard or caller.target.names, guarded)
