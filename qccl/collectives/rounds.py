"""The rounds that collectives are made of, chunk by chunk: scatter-reduce, all-gather, relay.

A round has a method per stage of the pipeline; each yields the operations of one chunk. A round runs in a group of
ranks, in which the rank at place ``p`` owns part ``p`` of the round's cut. A cut of fewer parts than ranks leaves the
last places without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qccl.codecs.base import Codec
from qccl.collectives.layout import Arrays, CallerBuffers, Encoding, Slots, check_place, exchange, peers_of
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Decode, Encode, Op, Reduce, Span

__all__ = ["AllGather", "Combine", "Relay", "ScatterReduce", "alone", "checked", "copy", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class Combine:
    """How the ranks' values become one: ``op`` ("sum", "min", "max"), then times ``scale``."""

    op: str = "sum"
    scale: float = 1.0


class ScatterReduce:
    """Each rank sends every owner its part, and the owners reduce the codes that they get, and their own values.

    ``owners``: the ranks that own parts 0, 1, ..., if not those at places 0, 1, ... of the group. Wire slots: one for
    each peer in "scatter.send" and in "scatter.recv", ``name`` being "scatter".
    """

    def __init__(
        self,
        rank: int,
        group: Sequence[int],
        encoding: Encoding,
        source: Arrays,
        depth: int,
        *,
        name: str = "scatter",
        round_number: int = 0,
        owners: Sequence[int] | None = None,
    ) -> None:
        self._encoding, self._source, self._round = encoding, source, round_number
        self._place = group.index(rank)
        part_of = {owner: part for part, owner in enumerate(owners or group[: encoding.layout.parts])}
        self._part = part_of.get(rank)
        others = [group[place] for place in peers_of(self._place, len(group))]
        self._owners = {other: part_of[other] for other in others if other in part_of}
        self._senders = [] if self._part is None else others
        self._in_order = [other for other in group if other != rank]
        self._send = encoding.slots(f"{name}.send", len(self._owners), depth)
        self._recv = encoding.slots(f"{name}.recv", len(self._senders), depth)

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return _buffers(self._send, self._recv)

    def send(self, k: int) -> Iterator[Op]:
        """Encode chunk ``k`` of every owner's part and exchange."""
        sends = {}
        for i, (owner, part) in enumerate(self._owners.items()):
            wire = sends[owner] = self._send.span(k, i, self._encoding.nbytes(part, k))
            yield from encode(self._encoding, part, k, self._source, wire, self._round)
        yield from exchange(sends, self._received(k))

    def reduce(self, k: int, combine: Combine, wire: Span | None, target: Arrays | None) -> Iterator[Op]:
        """Combine the codes of chunk ``k`` of the own part with the own values, into ``wire`` and ``target``."""
        if self._part is None:
            return
        received = self._received(k)
        wires = [received[other] for other in self._in_order]
        slots = wires if wire is None else [*wires, wire]
        for segment, codes in self._encoding.segments(self._part, k, *slots):
            yield Reduce(
                self._encoding.codec,
                srcs=tuple(codes[: len(wires)]),
                own=self._source.span(segment),
                own_index=self._place,
                wire=None if wire is None else codes[-1],
                out=None if target is None else target.span(segment),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                round=self._round + 1,
                src_ranks=tuple(self._in_order),
                src_round=self._round,
            )

    def _received(self, k: int) -> dict[int, Span]:
        if self._part is None:
            return {}
        nbytes = self._encoding.nbytes(self._part, k)
        return {other: self._recv.span(k, i, nbytes) for i, other in enumerate(self._senders)}


class AllGather:
    """Each owner sends one wire to all other ranks, and each rank gets those of all owners.

    With ``common`` there is one part, and every rank sends a code of it. The wires are made in ``round_number``. Wire
    slots: one in "gather.send", one for each owner in "gather.recv", ``name`` being "gather".
    """

    def __init__(
        self,
        rank: int,
        group: Sequence[int],
        encoding: Encoding,
        depth: int,
        *,
        name: str = "gather",
        round_number: int = 0,
        common: bool = False,
    ) -> None:
        self._group, self._place, self._encoding, self._round = group, group.index(rank), encoding, round_number
        self._part_of = (0,) * len(group) if common else range(encoding.layout.parts)
        others = peers_of(self._place, len(group))
        self._owners = [place for place in others if place < len(self._part_of)]
        self._receivers = others if self._place < len(self._part_of) else ()
        self._send = encoding.slots(f"{name}.send", 1 if self._receivers else 0, depth)
        self._recv = encoding.slots(f"{name}.recv", len(self._owners), depth)

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return _buffers(self._send, self._recv)

    def wire(self, k: int) -> Span:
        """Where the own wire of chunk ``k`` is put, to be sent."""
        return self._send.span(k, 0, self._encoding.nbytes(self._part_of[self._place], k))

    def encode(self, k: int, source: Arrays, keep: Arrays | None = None) -> Iterator[Op]:
        """Encode chunk ``k`` of the own part, if there is one; ``keep`` gets what the others will have."""
        if self._place < len(self._part_of):
            part = self._part_of[self._place]
            yield from encode(self._encoding, part, k, source, self.wire(k), self._round, keep)

    def exchange(self, k: int) -> Iterator[Op]:
        """Send the own wire of chunk ``k`` to all, and receive theirs."""
        sends = (
            dict.fromkeys((self._group[place] for place in self._receivers), self.wire(k)) if self._receivers else {}
        )
        yield from exchange(sends, {self._group[place]: wire for place, wire in self._received(k).items()})

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode chunk ``k`` of the others' parts into place."""
        for place, slot in self._received(k).items():
            yield from decode(self._encoding, self._part_of[place], k, slot, target, self._group[place], self._round)

    def reduce(self, k: int, combine: Combine, target: Arrays) -> Iterator[Op]:
        """Where the part is common: combine all wires of chunk ``k``, the own one included, in the group's order."""
        found = self._received(k) | {self._place: self.wire(k)}
        for segment, codes in self._encoding.segments(0, k, *(found[place] for place in sorted(found))):
            yield Reduce(
                *(self._encoding.codec, tuple(codes), None, 0, None, target.span(segment)),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                src_ranks=tuple(self._group[place] for place in sorted(found)),
                src_round=self._round,
            )

    def _received(self, k: int) -> dict[int, Span]:
        return {
            place: self._recv.span(k, i, self._encoding.nbytes(self._part_of[place], k))
            for i, place in enumerate(self._owners)
        }


class Relay:
    """Wires go down a tree from ``root``: each rank gets them from its parent and passes them on to its children.

    Wire slots: one in "relay", ``name`` being that.
    """

    def __init__(
        self,
        root: int,
        parent: int | None,
        children: Sequence[int],
        encoding: Encoding,
        depth: int,
        name: str = "relay",
    ) -> None:
        self._root, self._parent, self._children, self._encoding = root, parent, children, encoding
        self._slots = encoding.slots(name, 1, max(depth, 2))  # one is received while another is passed on

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffer."""
        return _buffers(self._slots)

    def wire(self, k: int) -> Span:
        """The wire of chunk ``k``."""
        return self._slots.span(k, 0, self._encoding.nbytes(0, k))

    def exchange(self, step: int) -> Iterator[Op]:
        """Receive chunk ``step`` and pass on the one before; the root sends chunk ``step``."""
        passed, received = (step, step) if self._parent is None else (step - 1, step)
        chunks = range(self._encoding.layout.chunks)
        sends = dict.fromkeys(self._children, self.wire(passed)) if passed in chunks else {}
        receives = {self._parent: self.wire(received)} if self._parent is not None and received in chunks else {}
        yield from exchange(sends, receives)

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode chunk ``k``."""
        yield from decode(self._encoding, 0, k, self.wire(k), target, self._root)


def encode(
    encoding: Encoding,
    part: int,
    k: int,
    source: Arrays,
    wire: Span,
    round_number: int = 0,
    keep: Arrays | None = None,
    *,
    origin: int = 0,
) -> Iterator[Op]:
    """Encode chunk ``k`` of a part into ``wire``; ``keep`` gets the decoded values, in the same pass.

    Elements are numbered from ``origin`` on.
    """
    for segment, (code,) in encoding.segments(part, k, wire):
        index = segment.index - origin
        if keep is None:
            yield Encode(encoding.codec, source.span(segment), code, index, round_number)
        else:
            own, out = source.span(segment), keep.span(segment)
            yield Reduce(encoding.codec, (), own, 0, code, out, index=index, round=round_number)


def decode(
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
    """Decode chunk ``k`` of a part from ``wire``, made by rank ``maker``, or add it to what ``target`` holds."""
    for segment, (code,) in encoding.segments(part, k, wire):
        place = (segment.index - origin, round_number, maker)
        yield Decode(encoding.codec, code, target.span(segment), accumulate, *place)


def alone(codec: Codec, caller: CallerBuffers, counts: Sequence[int], combine: Combine) -> tuple[Op, ...]:
    """What a rank without peers does: exact copies, where there is anything to change."""
    if caller.source == caller.target and combine.scale == 1.0:
        return ()
    return tuple(
        copy(codec, Span(source, 0, count), Span(target, 0, count), combine)
        for source, target, count in zip(caller.source.names, caller.target.names, counts, strict=True)
        if count
    )


def copy(codec: Codec, source: Span, target: Span, combine: Combine | None = None) -> Op:
    """The values themselves, not coded (``codec`` has no say in it), but scaled."""
    combine = combine or Combine()
    return Reduce(codec, (), source, 0, None, target, combine.op, combine.scale)


def checked(rank: int, size: int, op: str, scale: float, depth: int, *counts: int) -> Combine:
    """Check the arguments that all collectives have. Raises ArgumentError."""
    for count in counts or (0,):
        check_place(rank, size, count)
    if op not in ("sum", "min", "max"):
        raise ArgumentError(f"op is {op!r}; a schedule knows sum, min and max (an average is a sum with a scale)")
    if depth < 1:
        raise ArgumentError(f"depth is {depth}; there must be 1 wire slot per peer or more (2 or more to overlap)")
    return Combine(op, scale)


def _buffers(*slots: Slots) -> dict[str, Buffer]:
    return {s.name: s.buffer() for s in slots if s.width}
