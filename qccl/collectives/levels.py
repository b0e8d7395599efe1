"""Reduce-scatter and all-gather in two levels: only one copy of a sum, or of a code, goes from a node to another.

Results have the layout of the collectives in one level. Rank ``j`` of a node stands for it towards the ranks ``j``,
``j + L``, ... of every other node, where ``L`` is the number of its own ranks; so nodes may differ in size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.codecs.none import NoCodec
from qccl.collectives.hierarchical import by_level
from qccl.collectives.operands import SUM, Arrays, CallerBuffers, Combine, Group
from qccl.collectives.partitions import Grouped, Segment, partition_as_given
from qccl.collectives.rounds import Round, ScatterReduce, assemble, decode_chunk, encode_chunk, pipeline
from qccl.collectives.wire import ALIGNMENT, Encoding, Slots, exchange
from qccl.schedule import Buffer, Exchange, Op, Reduce, Role, Schedule, Span, Transfer

__all__ = ["all_gather_in_levels", "reduce_scatter_in_levels"]


class _Nodes:
    """The nodes as one rank sees them: ``mine`` has its node's ranks, ``others`` those of each other node."""

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.rank = rank
        self.index = next(i for i, node in enumerate(nodes) if rank in node)
        self.mine = nodes[self.index]
        self.others = [node for i, node in enumerate(nodes) if i != self.index]

    def stands_for(self, node: Sequence[int], other: int) -> int:
        """The rank of ``node`` that exchanges codes with rank ``other`` of another node."""
        place = next(each.index(other) for each in (self.mine, *self.others) if other in each)
        return node[place % len(node)]

    def partners(self, rank: int) -> tuple[int, ...]:
        """The ranks of other nodes with which ``rank``, of this node, exchanges codes for its node."""
        return tuple(other for node in self.others for other in node if self.stands_for(self.mine, other) == rank)


def reduce_scatter_in_levels(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    nodes: Sequence[Sequence[int]],
    chunking: ChunkPolicy = NETWORK,
) -> Schedule:
    """Rank r gets part r: each node sums exact values, and one of its ranks sends the encoded sum to rank r.

    Each node sends the parts of all other nodes' ranks once, in the second of two hops. The sums of nodes are rounded
    to the element type. The error is that of the codes of all nodes' sums but the own one.

    A codec with error feedback has the residuals of the sums that the rank encodes. The sums are then kept as a whole,
    because residuals belong to elements of a buffer; otherwise they are kept for ``chunking.depth`` chunks.
    """
    levels, own = _Nodes(group.rank, nodes), NoCodec()
    several = len(levels.mine) > 1
    if several:
        codec, up_codec = by_level(codec, own)
    parts = partition_as_given(buffers.counts, codec, chunking, math.lcm(codec.granule, own.granule))
    between = _BetweenNodes(levels, Encoding(parts, codec, buffers.dtype, chunking.depth), buffers, several=several)
    lag = min(1, chunking.depth - 1)
    if not several:
        stages = ((0, between.send), (lag, partial(between.reduce, combine=combine)))
        return assemble("two_levels", group, buffers, pipeline(parts.chunks, *stages), between)
    groups = tuple((rank, *levels.partners(rank)) for rank in levels.mine)
    encoding = Encoding(Grouped(parts, groups), up_codec, buffers.dtype, chunking.depth)
    up = ScatterReduce(Group(group.rank, levels.mine), encoding, buffers.source, name="up")

    def sum_in_node(k: int) -> Iterator[Op]:
        return up.reduce(k, Combine(combine.op), None, between.sums(k))

    last = lag + lag, partial(between.reduce, combine=combine)
    ops = pipeline(parts.chunks, (0, up.send), (lag, sum_in_node), (lag, between.send), last)
    return assemble("two_levels", group, buffers, ops, up, between, guarded=between.guarded())


@dataclass(frozen=True, slots=True)
class _Sums:
    """Where the sums of a node are: of the ``own`` part in ``target``, of parts for other nodes in the buffer "sums".

    ``offsets`` has their places there by first element; None if "sums" has the places of the caller's vector.
    """

    target: Arrays
    own: range
    offsets: Mapping[int, int] | None

    def span(self, segment: Segment) -> Span:
        """The elements of a segment."""
        if segment.start in self.own:
            return self.target.span(segment)
        start = segment.start if self.offsets is None else self.offsets[segment.start]
        return Span("sums", start, start + len(segment))


class _BetweenNodes(Round):
    """Sends the sums of a node's parts to the ranks of other nodes that own them, and adds those that come from there.

    With ``several`` ranks in the node their sums are in sums(); otherwise the caller's values are sent.
    """

    def __init__(self, levels: _Nodes, encoding: Encoding, buffers: CallerBuffers, *, several: bool) -> None:
        self._levels, self._encoding, self._buffers, self._several = levels, encoding, buffers, several
        self._partners = levels.partners(levels.rank)
        self._makers = [levels.stands_for(node, levels.rank) for node in levels.others]
        self._send = encoding.slots("between.send", len(self._partners))
        self._recv = encoding.slots("between.recv", len(self._makers))
        self._whole = "residual" in encoding.codec.state_names
        first = sum(buffers.counts[: levels.rank])
        self._own = range(first, first + buffers.counts[levels.rank])
        chunks = range(encoding.partition.chunks)
        self._row = max((self._offsets(k)[1] for k in chunks), default=0)
        self._rows = min(encoding.depth, len(chunks))

    def buffers(self) -> dict[str, Buffer]:
        """See Round; and that of the sums for other nodes, if there are some."""
        size = sum(self._buffers.counts) if self._whole else self._row * self._rows
        found = Round.buffers(self)
        if self._several and self._row:
            found["sums"] = Buffer(size, self._buffers.dtype, Role.WORK)
        return found

    def guarded(self) -> list[Span]:
        """What must be finite for the residuals to change: all sums that are encoded."""
        counts = self._buffers.counts if self._whole else ()
        starts = {part: sum(counts[:part]) for part in self._partners if counts and counts[part]}
        return [Span("sums", start, start + counts[part]) for part, start in starts.items()]

    def sums(self, k: int) -> _Sums:
        """Where the sums of chunk ``k`` are."""
        row, places = k % self._rows * self._row, self._offsets(k)[0]
        offsets = None if self._whole else {first: row + place for first, place in places.items()}
        return _Sums(self._buffers.target, self._own, offsets)

    def send(self, k: int) -> Iterator[Op]:
        """Encode chunk ``k`` of the parts of other nodes, and exchange."""
        source, sends = self.sums(k) if self._several else self._buffers.source, {}
        for column, part in enumerate(self._partners):
            wire = sends[part] = self._send.span(k, column, self._encoding.nbytes(part, k))
            yield from encode_chunk(self._encoding, part, k, source, wire, 1)
        yield from exchange(sends, self._received(k))

    def reduce(self, k: int, combine: Combine) -> Iterator[Op]:
        """Combine the sums of all nodes of chunk ``k`` of the own part, in the order of the nodes."""
        rank, received = self._levels.rank, self._received(k)
        own = self._buffers.target if self._several else self._buffers.source
        for segment, spans in self._encoding.segments(rank, k, *(received[maker] for maker in self._makers)):
            yield Reduce(
                *(self._encoding.codec, tuple(spans), own.span(segment), self._levels.index),
                *(None, self._buffers.target.span(segment)),
                op=combine.op,
                scale=combine.scale,
                index=segment.index,
                round=2,
                src_ranks=tuple(self._makers),
                src_round=1,
            )

    def _received(self, k: int) -> dict[int, Span]:
        nbytes = self._encoding.nbytes(self._levels.rank, k)
        return {maker: self._recv.span(k, column, nbytes) for column, maker in enumerate(self._makers)}

    def _offsets(self, k: int) -> tuple[dict[int, int], int]:
        """The places of the segments of chunk ``k`` in its row, by first element, and the length of all."""
        offsets, here = {}, 0
        for part in self._partners:
            for segment in self._encoding.partition.segments(part, k):
                offsets[segment.start] = here
                here += -(-len(segment) // ALIGNMENT) * ALIGNMENT  # as many elements are at least as many bytes
        return offsets, here


def all_gather_in_levels(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    *,
    nodes: Sequence[Sequence[int]],
    chunking: ChunkPolicy = NETWORK,
) -> Schedule:
    """All ranks get all parts: a rank sends its code to its node and to one rank of each other node, which forwards it.

    The codes are those of all_gather(), and so is the result. Each node sends its parts once to each other node.
    """
    parts = partition_as_given(buffers.counts, codec, chunking)
    gather = _Forwarding(_Nodes(group.rank, nodes), Encoding(parts, codec, buffers.dtype, chunking.depth, sums=True))
    lag = min(1, chunking.depth - 1)
    encode_own = partial(gather.encode, source=buffers.source, keep=buffers.target)
    decode, decode_late = (partial(each, target=buffers.target) for each in (gather.decode, gather.decode_forwarded))
    stages = (0, encode_own), (0, gather.exchange), (lag, gather.forward), (lag, decode), (lag + lag, decode_late)
    return assemble("two_levels", group, buffers, pipeline(parts.chunks, *stages), gather)


class _Forwarding:
    """The codes of all parts on their way: first to the own node and to other nodes, then on to the ranks there."""

    def __init__(self, levels: _Nodes, encoding: Encoding) -> None:
        self._rank, self._encoding = levels.rank, encoding
        self._mates = [rank for rank in levels.mine if rank != levels.rank]
        self._targets = [*self._mates, *(levels.stands_for(node, levels.rank) for node in levels.others)]
        self._partners = levels.partners(levels.rank)
        self._received = [*self._mates, *self._partners]
        self._forwarded = [(mate, maker) for mate in self._mates for maker in levels.partners(mate)]
        self._send = encoding.slots("gather.send", 1)
        self._recv = encoding.slots("gather.recv", len(self._received))
        self._late = encoding.slots("forward.recv", len(self._forwarded))

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers."""
        return self._send.buffers() | self._recv.buffers() | self._late.buffers()

    def encode(self, k: int, source: Arrays, keep: Arrays) -> Iterator[Op]:
        """Encode chunk ``k`` of the own part; ``keep`` receives the values that the others decode."""
        yield from encode_chunk(self._encoding, self._rank, k, source, self._own(k), 0, keep)

    def exchange(self, k: int) -> Iterator[Op]:
        """Send the own code of chunk ``k``, and receive those of the own node, and of partners in other nodes."""
        yield from exchange(dict.fromkeys(self._targets, self._own(k)), self._direct(k))

    def forward(self, k: int) -> Iterator[Op]:
        """Send the partners' codes of chunk ``k`` to the own node, and receive those of its other ranks' partners."""
        direct, late = self._direct(k), self._spans(self._late, k, [maker for _, maker in self._forwarded])
        sends = [Transfer(mate, direct[maker]) for mate in self._mates for maker in self._partners]
        recvs = [Transfer(mate, late[maker]) for mate, maker in self._forwarded]
        sends, recvs = ([each for each in transfers if len(each.span)] for transfers in (sends, recvs))
        if sends or recvs:
            yield Exchange(tuple(sends), tuple(recvs))

    def decode(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode what exchange() has received."""
        yield from self._decoded(self._direct(k), k, target)

    def decode_forwarded(self, k: int, target: Arrays) -> Iterator[Op]:
        """Decode what forward() has received."""
        yield from self._decoded(self._spans(self._late, k, [maker for _, maker in self._forwarded]), k, target)

    def _decoded(self, wires: Mapping[int, Span], k: int, target: Arrays) -> Iterator[Op]:
        for maker, wire in wires.items():
            yield from decode_chunk(self._encoding, maker, k, wire, target, maker)

    def _own(self, k: int) -> Span:
        return self._send.span(k, 0, self._encoding.nbytes(self._rank, k))

    def _direct(self, k: int) -> dict[int, Span]:
        return self._spans(self._recv, k, self._received)

    def _spans(self, slots: Slots, k: int, makers: Sequence[int]) -> dict[int, Span]:
        """The slots of chunk ``k``, by the rank that made the code."""
        return {maker: slots.span(k, i, self._encoding.nbytes(maker, k)) for i, maker in enumerate(makers)}
