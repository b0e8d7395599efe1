"""All-gather: the second round of all-reduce. In two levels a code crosses once between any two nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.base.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import CallerBuffers, Nodes, RankGroup, ranks_by_node
from qccl.collectives.partitions import partition_as_given
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import AllGatherRound, Stage, alone, assemble, pipeline
from qccl.collectives.schedule import Exchange, Op, Schedule, Transfer
from qccl.collectives.spec import Binding
from qccl.collectives.wire import Encoding, Slots

__all__ = ["AllGatherSpec", "all_gather", "all_gather_in_levels"]

#: makes the round of a schedule, with the arguments of AllGatherRound
_Make = Callable[..., AllGatherRound]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherSpec(PartsSpec):
    """Arguments of quantized_all_gather."""

    name = "all_gather"
    whole = "output"

    @classmethod
    def from_arguments(cls, *shared: Any, counts: Sequence[int] | None = None, **own: Any) -> Self:
        """See CollectiveSpec; ``counts``: the lengths of the parts."""
        return cls.checked(*shared, parts=parts_of(counts), **own)

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.gathered(self.lengths(size), rank, self.dtype, in_place=in_place)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """In place, the input is this rank's part of the output; any other overlap is refused."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(source, target, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": target.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        if group.size == 1:
            return assemble("all_gather", group, buffers, alone(buffers, self.codec))
        return self._gathered(group, buffers, chunking, AllGatherRound)

    def _gathered(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy, make: _Make) -> Schedule:
        """The schedule with rounds that ``make`` makes, in one level or two."""
        if self.node_ids:
            return all_gather_in_levels(group, buffers, self.codec, make, ranks_by_node(self.node_ids), chunking)
        return all_gather(group, buffers, self.codec, make, chunking)


def all_gather(group: RankGroup, buffers: CallerBuffers, codec: Codec, make: _Make, chunking: ChunkPolicy) -> Schedule:
    """All ranks get all parts; part r, of ``buffers.counts[r]`` elements, is rank r's.

    A rank decodes its own part, too, so that all ranks hold the same bits. Each rank sends its encoded part size - 1
    times, in one hop.
    """
    parts = partition_as_given(buffers.counts, codec, chunking)
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth, sums=True)
    gather = make(group, encoding)
    encode_own = gather.encode(buffers.source, keep=buffers.target)
    ops = pipeline((0, encode_own), (0, gather.exchange()), (encoding.lag, gather.decode(buffers.target)))
    return assemble("all_gather", group, buffers, ops, gather)


def all_gather_in_levels(
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    make: _Make,
    nodes: Sequence[Sequence[int]],
    chunking: ChunkPolicy,
) -> Schedule:
    """All ranks get all parts. A rank sends its code to its node and to one rank of each other node; that rank
    forwards it.

    The codes are those of all_gather(), and so is the result. Each node sends its parts once to each other node.
    """
    parts, levels = partition_as_given(buffers.counts, codec, chunking), Nodes(group.rank, nodes)
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth, sums=True)
    mates, partners = [rank for rank in levels.mine if rank != group.rank], levels.partners(group.rank)
    owners = {rank: rank for rank in (group.rank, *mates, *partners)}
    receivers = [*mates, *(levels.stands_for(node, group.rank) for node in levels.others)]
    gather = make(group, encoding, owners=owners, receivers=receivers)
    forwarded = [(mate, maker) for mate in mates for maker in levels.partners(mate)]
    late = Slots(encoding, "forward.recv", {maker: maker for _, maker in forwarded})

    # Send the partners' codes to the own node, and receive the codes of its other ranks' partners.
    forward: list[list[Op]] = []
    for direct, indirect in zip(gather.received, late.wires, strict=True):
        sends = [Transfer(mate, direct[maker]) for mate in mates for maker in partners if maker in direct]
        recvs = [Transfer(mate, indirect[maker]) for mate, maker in forwarded if maker in indirect]
        forward.append([Exchange(tuple(sends), tuple(recvs))] if sends or recvs else [])

    lag, target = encoding.lag, buffers.target
    stages: list[Stage] = [(0, gather.encode(buffers.source, keep=target)), (0, gather.exchange()), (lag, forward)]
    stages += [(lag, gather.decode(target)), (lag + lag, gather.decode(target, late))]
    return assemble("two_levels", group, buffers, pipeline(*stages), gather, late)
