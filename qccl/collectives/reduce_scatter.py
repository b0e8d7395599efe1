"""Reduce-scatter: the first round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arguments import OpLike, op_of
from qccl.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_CHUNKING, Chunking, ChunkSize, partition_as_given
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Group
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import ScatterReduce, alone, assemble, pipeline
from qccl.collectives.spec import Binding, common
from qccl.collectives.wire import Encoding
from qccl.schedule import Op, Schedule

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

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        return {"input": self.count, "output": self.lengths(size)[rank]}

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """See CollectiveSpec: the own part."""
        lengths = self.lengths(size)
        return source.part(sum(lengths[:rank]), lengths[rank])

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """See CollectiveSpec."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(target, source, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": source.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: ChunkSize = None) -> Schedule:
        """See CollectiveSpec."""
        return reduce_scatter(
            Group.of_all(rank, size),
            CallerBuffers.scattered(self.lengths(size), rank, self.dtype, in_place=in_place),
            self.codec,
            Combine.of(self.op, size),
            chunking=self._chunking(default_chunk),
        )


def reduce_scatter(
    group: Group, buffers: CallerBuffers, codec: Codec, combine: Combine = SUM, *, chunking: Chunking = DEFAULT_CHUNKING
) -> Schedule:
    """Rank r gets part r, of ``buffers.counts[r]`` elements, combined from all ranks.

    Each rank sends (size-1)/size of the encoded vector in one step; an element is quantised once, the own one not.
    """
    encoding = Encoding(
        partition_as_given(buffers.counts, codec, chunking.elements), codec, buffers.dtype, chunking.depth
    )
    if group.size == 1:
        return assemble("reduce_scatter", group, buffers, alone(buffers, codec, combine))
    scatter = ScatterReduce(group, encoding, buffers.source)

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, None, buffers.target)

    ops = pipeline(encoding.layout.chunks, (0, scatter.send), (encoding.lag, reduce))
    return assemble("reduce_scatter", group, buffers, ops, scatter)
