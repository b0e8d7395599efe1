"""The rounds of collectives, chunk by chunk: scatter-reduce and all-gather.

A round has a method for each stage of the pipeline, which returns the operations of each chunk. A round runs in a group
of ranks: rank ``i`` of the group owns part ``i`` of the round's partition. If the partition has fewer parts than the
group has ranks, the last ranks own none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat, zip_longest
from operator import itemgetter
from typing import Protocol

from qccl.codecs.base import Codec
from qccl.collectives.feedback import with_feedback
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Places, RankGroup
from qccl.collectives.schedule import Buffer, Decode, Encode, Op, Reduce, Schedule, Span
from qccl.collectives.wire import ByChunk, Encoding, Slots, exchange, to_all

__all__ = ["AllGatherRound", "Round", "ScatterReduce", "Stage", "alone", "assemble", "copy_values", "decode_all"]
__all__ += ["decode_part", "encode_all", "encode_part", "merged", "pipeline"]

#: a stage of a pipeline: its lag, and the operations of each chunk
Stage = tuple[int, ByChunk]


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
        owners = dict(group.owners(encoding.partition.parts) if owners is None else owners)
        self._part = owners.pop(group.rank, None)
        self._in_order = tuple([other for other in group.ranks if other != group.rank])
        own = {} if self._part is None else dict.fromkeys(senders or group.others, self._part)
        self._send = Slots(encoding, f"{name}.send", owners)
        self._recv = Slots(encoding, f"{name}.recv", own)

    def send(self) -> ByChunk:
        """Encode every owner's part and exchange."""
        encodes = encode_all(self._send, self._source, self._round)
        return merged(encodes, exchange(self._send.wires, self._recv.wires))

    def reduce(self, combine: Combine, wires: Sequence[Span] | None, target: Places | None) -> ByChunk:
        """Combine the codes of the own part with the own values.

        ``target`` gets the sums, and ``wires`` their codes, one for each segment. Either may be None, for not wanted.
        """
        ops: list[list[Op]] = [[] for _ in range(self.encoding.partition.chunks)]
        if self._part is None:
            return ops
        segments = self.encoding.segments[self._part]
        received = list(map(self._recv.spans, self._in_order))
        own = self._source.spans(segments)
        out = None if target is None else target.spans(segments)
        for i, segment in enumerate(segments):
            op = Reduce(
                self.encoding.codec,
                srcs=tuple(map(itemgetter(i), received)),
                own=own[i],
                own_index=self._index,
                wire=None if wires is None else wires[i],
                out=None if out is None else out[i],
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                round=self._round + 1,
                src_ranks=self._in_order,
                src_round=self._round,
            )
            ops[segment.chunk].append(op)
        return ops


class AllGatherRound(Round):
    """Each owner sends its wire to other ranks, and each rank receives the wires of owners.

    There is one wire slot in "gather.send", and one for each owner in "gather.recv"; ``name`` replaces "gather".

    Attributes:
        received: for each chunk the slots of the others' wires, by owner.
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
        self.encoding, self._round, self._group = encoding, round_number, group
        others = dict(group.owners(encoding.partition.parts) if owners is None else owners)
        own = {group.rank: others.pop(group.rank)} if group.rank in others else {}
        self._receivers = (receivers or group.others) if own else ()
        self._send = Slots(encoding, f"{name}.send", own)
        self._recv = Slots(encoding, f"{name}.recv", others)
        self.received = self._recv.wires

    def wires(self) -> list[Span]:
        """The place of each segment of the own wire."""
        return self._send.spans(self._group.rank)

    def encode(self, source: Places, keep: Places | None = None) -> ByChunk:
        """Encode the own part, if there is one; ``keep`` receives the values that the others decode."""
        return encode_all(self._send, source, self._round, keep)

    def exchange(self) -> ByChunk:
        """Send the own wire to the receivers, and receive the owners' wires."""
        return exchange(to_all(self._receivers, self._send), self._recv.wires)

    def decode(self, target: Places, slots: Slots | None = None) -> ByChunk:
        """Decode the others' parts, or those in other ``slots``, into place."""
        return decode_all(slots or self._recv, target, self._round)

    def reduce(self, combine: Combine, target: Places) -> ByChunk:
        """Combine all wires, the own one included, in the group's order; all ranks own the same part."""
        ops: list[list[Op]] = [[] for _ in range(self.encoding.partition.chunks)]
        segments, ranks = self.encoding.segments[0], tuple(self._group.ranks)
        wires = [(self._send if rank == self._group.rank else self._recv).spans(rank) for rank in ranks]
        for segment, srcs, out in zip(segments, zip(*wires, strict=True), target.spans(segments), strict=True):
            op = Reduce(
                self.encoding.codec,
                srcs=srcs,
                own=None,
                own_index=0,
                wire=None,
                out=out,
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                src_ranks=ranks,
                src_round=self._round,
            )
            ops[segment.chunk].append(op)
        return ops


def encode_part(
    slots: Slots, peer: int, source: Places, round_number: int = 0, keep: Places | None = None, *, origin: int = 0
) -> ByChunk:
    """Encode a peer's part into its slots; ``keep`` receives the decoded values, in the same pass.

    Elements are numbered from ``origin`` on.
    """
    codec, segments = slots.encoding.codec, slots.encoding.segments[slots.parts[peer]]
    ops: list[list[Op]] = [[] for _ in slots.wires]
    outs = repeat(None) if keep is None else keep.spans(segments)
    for segment, own, wire, out in zip(segments, source.spans(segments), slots.spans(peer), outs, strict=False):
        index = segment.index - origin
        if out is None:
            op: Op = Encode(codec, own, wire, index, round_number)
        else:
            op = Reduce(codec, (), own, 0, wire, out, index=index, round=round_number)
        ops[segment.chunk].append(op)
    return ops


def decode_part(
    slots: Slots,
    peer: int,
    target: Places,
    round_number: int = 0,
    *,
    origin: int = 0,
    accumulate: bool = False,
) -> ByChunk:
    """Decode the part that a peer has encoded; ``accumulate`` adds it to ``target``."""
    codec, segments = slots.encoding.codec, slots.encoding.segments[slots.parts[peer]]
    ops: list[list[Op]] = [[] for _ in slots.wires]
    for segment, wire, out in zip(segments, slots.spans(peer), target.spans(segments), strict=True):
        ops[segment.chunk].append(Decode(codec, wire, out, accumulate, segment.index - origin, round_number, peer))
    return ops


def encode_all(slots: Slots, source: Places, round_number: int = 0, keep: Places | None = None) -> ByChunk:
    """encode_part() for each peer."""
    return merged(*[encode_part(slots, peer, source, round_number, keep) for peer in slots.parts])


def decode_all(slots: Slots, target: Places, round_number: int = 0) -> ByChunk:
    """decode_part() for each peer."""
    return merged(*[decode_part(slots, peer, target, round_number) for peer in slots.parts])


def merged(*parts: ByChunk) -> ByChunk:
    """The operations of several parts or stages, one after the other in each chunk."""
    return [list(chain.from_iterable(ops)) for ops in zip_longest(*parts, fillvalue=())]


def alone(buffers: CallerBuffers, codec: Codec, combine: Combine = SUM) -> Iterator[Op]:
    """The operations of a rank without peers: exact copies, with momentum; none if the copy would change nothing."""
    if buffers.source != buffers.target or combine.scale != 1.0 or "momentum" in codec.state_names:
        for source, target, count in zip(buffers.source.names, buffers.target.names, buffers.counts, strict=True):
            if count:
                yield copy_values(codec, Span(source, 0, count), Span(target, 0, count), combine)


def copy_values(codec: Codec, source: Span, target: Span, combine: Combine = SUM) -> Op:
    """Copy values times the scale, without encoding them; ``codec`` only adds its momentum."""
    return Reduce(codec, (), source, 0, None, target, combine.op, combine.scale)


def pipeline(*stages: Stage) -> tuple[Op, ...]:
    """The program order of a pipeline: in iteration ``i`` each stage ``(lag, chunks)`` in turn does chunk ``i - lag``.

    On the host the order is only a priority. On CUDA the queues keep it, so it decides what can overlap: an operation
    that waits for chunk ``k`` must have a lag that puts it behind the encode of chunk ``k + 1``.
    """
    ops: list[Op] = []
    for i in range(max([lag + len(chunks) for lag, chunks in stages])):
        for lag, chunks in stages:
            if 0 <= i - lag < len(chunks):
                ops += chunks[i - lag]
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
