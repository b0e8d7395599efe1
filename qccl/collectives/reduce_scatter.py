"""Reduce-scatter: the first round of all-reduce. In two levels a node sends another node the sum of a part once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Self

from qccl.base.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.codecs.none import NoCodec
from qccl.collectives.arguments import OpLike
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.hierarchical import by_level
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Nodes, RankGroup, ranks_by_node
from qccl.collectives.partitions import Segment, partition_as_given
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import ScatterReduce, alone, assemble, pipeline
from qccl.collectives.schedule import Buffer, Role, Schedule, Span
from qccl.collectives.spec import Binding, CollectiveSpec
from qccl.collectives.wire import ALIGNMENT, Encoding

__all__ = ["ReduceScatterSpec", "reduce_scatter", "reduce_scatter_in_levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatterSpec(PartsSpec):
    """Arguments of quantized_reduce_scatter."""

    name = "reduce_scatter"
    keeps_state = True

    op: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", counts: Sequence[int] | None = None) -> Self:
        """See CollectiveSpec; ``counts``: the lengths of the parts."""
        return cls.checked(*shared, op=op, parts=parts_of(counts))

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.scattered(self.lengths(size), rank, self.dtype, in_place=in_place)

    def fit(self, arrays: dict[str, Values], rank: int, size: int) -> None:
        """See CollectiveSpec; without an output of its own, the result replaces this rank's part of the input."""
        if arrays["output"] is arrays["input"]:
            lengths = self.lengths(size)
            arrays["output"] = arrays["input"].part(sum(lengths[:rank]), lengths[rank])
        CollectiveSpec.fit(self, arrays, rank, size)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """In place, the output is this rank's part of the input; any other overlap is refused."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(target, source, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": source.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        combine = Combine.of(self.op, group.size)
        if self.node_ids:
            nodes = ranks_by_node(self.node_ids)
            return reduce_scatter_in_levels(group, buffers, self.codec, combine, nodes=nodes, chunking=chunking)
        return reduce_scatter(group, buffers, self.codec, combine, chunking=chunking)


def reduce_scatter(
    group: RankGroup, buffers: CallerBuffers, codec: Codec, combine: Combine = SUM, *, chunking: ChunkPolicy
) -> Schedule:
    """Rank r gets part r, of ``buffers.counts[r]`` elements, combined from all ranks.

    Each rank sends (size-1)/size of the encoded vector in one hop. Own values are not quantised, all others once.
    """
    encoding = Encoding(partition_as_given(buffers.counts, codec, chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1:
        return assemble("reduce_scatter", group, buffers, alone(buffers, codec, combine))
    scatter = ScatterReduce(group, encoding, buffers.source)
    ops = pipeline((0, scatter.send()), (encoding.lag, scatter.reduce(combine, None, buffers.target)))
    return assemble("reduce_scatter", group, buffers, ops, scatter)


def reduce_scatter_in_levels(
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    nodes: Sequence[Sequence[int]],
    chunking: ChunkPolicy,
) -> Schedule:
    """Rank r gets part r: each node sums exact values, and one of its ranks sends the encoded sum to rank r.

    Each node sends the parts of all other nodes' ranks once, in the second of two hops. The sums of nodes are rounded
    to the element type. Each node's sum is quantised once, the sum of the own node not.

    A codec with error feedback has the residuals of the sums that the rank encodes. The sums are then kept as a whole,
    because residuals belong to elements of a buffer; otherwise they are kept for ``chunking.depth`` chunks.
    """
    rank, levels, own = group.rank, Nodes(group.rank, nodes), NoCodec()
    several = len(levels.mine) > 1
    if several:
        codec, up_codec = by_level(codec, own)
    parts = partition_as_given(buffers.counts, codec, chunking, math.lcm(codec.granule, own.granule))
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth)
    sums = _Sums(buffers, encoding, rank, levels.partners(rank))
    between = ScatterReduce(
        RankGroup(rank, [levels.stands_for(node, rank) for node in nodes]),
        encoding,
        sums if several else buffers.source,
        name="between",
        round_number=1,
        owners={part: part for part in (*levels.partners(rank), rank)},
        senders=[levels.stands_for(node, rank) for node in levels.others],
    )
    lag, send, reduce = encoding.lag, between.send(), between.reduce(combine, None, buffers.target)
    if not several:
        ops = pipeline((0, send), (lag, reduce))
        return assemble("two_levels", group, buffers, ops, between)
    grouped = parts.grouped([(mate, *levels.partners(mate)) for mate in levels.mine])
    up_encoding = Encoding(grouped, up_codec, buffers.dtype, chunking.depth)
    up = ScatterReduce(RankGroup(rank, levels.mine), up_encoding, buffers.source, name="up")
    sum_in_node = up.reduce(Combine(combine.op), None, sums)
    ops = pipeline((0, up.send()), (lag, sum_in_node), (lag, send), (lag + lag, reduce))
    return assemble("two_levels", group, buffers, ops, up, between, sums, guarded=sums.guarded)


class _Sums:
    """The memory of a node's sums: the target for the own part, the buffer "sums" for parts of other nodes.

    Attributes:
        guarded: the sums that must be finite for residuals to change.
    """

    def __init__(self, buffers: CallerBuffers, encoding: Encoding, rank: int, partners: Sequence[int]) -> None:
        starts = list(accumulate(buffers.counts, initial=0))
        self._target, self._dtype, self._own = buffers.target, buffers.dtype, range(starts[rank], starts[rank + 1])
        self.guarded: list[Span] = []
        rows: list[list[Segment]] = [[] for _ in range(encoding.partition.chunks)]
        for segment in chain.from_iterable([encoding.segments[part] for part in partners]):
            rows[segment.chunk].append(segment)
        if "residual" in encoding.codec.state_names:
            self._places = {segment.start: segment.start for row in rows for segment in row}
            self._size = starts[-1] if self._places else 0
            self.guarded = [Span("sums", starts[part], starts[part + 1]) for part in partners if buffers.counts[part]]
            return
        # slots are padded to ALIGNMENT elements, so their bytes are aligned for any element type
        slots = [[-(-len(segment) // ALIGNMENT) * ALIGNMENT for segment in row] for row in rows]
        longest, depth = max(map(sum, slots)), min(encoding.depth, len(rows))
        self._size, self._places = longest * depth, {}
        for k, (row, lengths) in enumerate(zip(rows, slots, strict=True)):
            places = accumulate(lengths, initial=k % depth * longest)
            self._places |= {segment.start: place for segment, place in zip(row, places, strict=False)}

    def buffers(self) -> dict[str, Buffer]:
        """The buffer of the sums for other nodes, if there are other nodes."""
        return {"sums": Buffer(self._size, self._dtype, Role.WORK)} if self._size else {}

    def spans(self, segments: Sequence[Segment]) -> list[Span]:
        """The elements of each segment."""
        found = self._target.spans(segments)
        for i, segment in enumerate(segments):
            if segment.start not in self._own:
                start = self._places[segment.start]
                found[i] = Span("sums", start, start + len(segment))
        return found
