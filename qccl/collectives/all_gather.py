"""All-gather: the second round of all-reduce. In two levels a code crosses once between any two nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.base.arrays import Values, is_part_of
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import CallerBuffers, Nodes, RankGroup, ranks_by_node
from qccl.collectives.partitions import partition_as_given
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import AllGatherRound, Stage, alone, assemble, pipeline
from qccl.collectives.schedule import Exchange, Op, Schedule, Transfer
from qccl.collectives.spec import Binding
from qccl.collectives.wire import Encoding, Slots

__all__ = ["AllGatherSpec"]


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

    def _gathered(
        self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy, make: Callable[..., AllGatherRound]
    ) -> Schedule:
        """All ranks get all parts; part r, of ``buffers.counts[r]`` elements, is rank r's.

        A rank decodes its own part, too, so that all ranks hold the same bits. On one node each rank sends its code to
        all others. On several nodes it sends its code to its node and to one rank of each other node; that rank
        forwards it. So each node sends its parts once to each other node. ``make`` makes the round.
        """
        parts = partition_as_given(buffers.counts, self.codec, chunking)
        node_ids = self.node_ids or (0,) * group.size
        levels = Nodes(group.rank, ranks_by_node(node_ids))
        encoding = Encoding(parts, self.codec, buffers.dtype, chunking.depth, sums=True)
        mates = [rank for rank in group.others if node_ids[rank] == node_ids[group.rank]]
        partners = levels.partners(group.rank)
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
        name = "two_levels" if levels.others else "all_gather"
        return assemble(name, group, buffers, pipeline(*stages), gather, late)
