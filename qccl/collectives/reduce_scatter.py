"""Reduce-scatter: the first round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from qccl.arguments import OpLike, op_of
from qccl.arrays import Values, is_part_of
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.levels import reduce_scatter_in_levels
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Group, ranks_by_node
from qccl.collectives.partitions import partition_as_given
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import ScatterReduce, alone, assemble, pipeline
from qccl.collectives.spec import Binding, common
from qccl.collectives.wire import Encoding
from qccl.schedule import Schedule

__all__ = ["ReduceScatterSpec", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatterSpec(PartsSpec):
    """Arguments of quantized_reduce_scatter."""

    name = "reduce_scatter"
    keeps_state = True

    op: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", counts: Sequence[int] | None = None) -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        return cls(**common(*shared), op=op_of(op), parts=parts_of(counts))

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.scattered(self.lengths(size), rank, self.dtype, in_place=in_place)

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """This rank's part of ``source``."""
        lengths = self.lengths(size)
        return source.part(sum(lengths[:rank]), lengths[rank])

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """In place, the output is this rank's part of the input; any other overlap is refused."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(target, source, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": source.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        combine = Combine.of(self.op, group.size)
        if self.node_ids:
            nodes = ranks_by_node(self.node_ids)
            return reduce_scatter_in_levels(group, buffers, self.codec, combine, nodes=nodes, chunking=chunking)
        return reduce_scatter(group, buffers, self.codec, combine, chunking=chunking)


def reduce_scatter(
    group: Group, buffers: CallerBuffers, codec: Codec, combine: Combine = SUM, *, chunking: ChunkPolicy = NETWORK
) -> Schedule:
    """Rank r gets part r, of ``buffers.counts[r]`` elements, combined from all ranks.

    Each rank sends (size-1)/size of the encoded vector in one hop; an element is quantised once, the own one not.
    """
    encoding = Encoding(partition_as_given(buffers.counts, codec, chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1:
        return assemble("reduce_scatter", group, buffers, alone(buffers, codec, combine))
    scatter = ScatterReduce(group, encoding, buffers.source)
    reduce = partial(scatter.reduce, combine=combine, wire=None, target=buffers.target)
    ops = pipeline(encoding.partition.chunks, (0, scatter.send), (encoding.lag, reduce))
    return assemble("reduce_scatter", group, buffers, ops, scatter)
