"""Reduce-scatter: the first round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arguments import OpLike, op_of
from qccl.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    Arrays,
    Encoding,
    partition_as_given,
    pipeline,
)
from qccl.collectives.rounds import ScatterReduce, checked, copy
from qccl.collectives.spec import PartsSpec, common, parts_of, reduction
from qccl.dtypes import DType
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["ReduceScatterSpec", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatterSpec(PartsSpec):
    """Parameters of quantized_reduce_scatter."""

    name = "reduce_scatter"

    op: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", counts: Sequence[int] | None = None) -> Self:
        """Check the arguments."""
        return cls(**common(*shared), op=op_of(op), parts=parts_of(counts))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        return {"input": self.count, "output": self.lengths(size)[rank]}

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """See CollectiveSpec: the own part, where it is."""
        lengths = self.lengths(size)
        return source.part(sum(lengths[:rank]), lengths[rank])

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See CollectiveSpec."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(target, source, sum(self.lengths(size)[:rank])):
            return True, {"output": source.address}
        return False, {"input": source.address, "output": target.address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        combine, scale = reduction(self.op, size)
        return reduce_scatter(
            *(rank, size, self.lengths(size), self.dtype, self.codec, combine),
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def reduce_scatter(
    rank: int,
    size: int,
    counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """The first round of all-reduce: rank r gets part r, of ``counts[r]`` elements, combined from all ranks.

    In place, "output" is the whole vector, and the result is where part r was; otherwise "output" is the part alone.
    Each rank sends (size-1)/size of the encoded vector in one step; an element is quantised once, the own one not.
    """
    combine = checked(rank, size, op, scale, depth, *counts)
    first = sum(counts[:rank])
    whole, part = Buffer(sum(counts), dtype, Role.INPUT), Buffer(counts[rank], dtype, Role.OUTPUT)
    buffers = {"output": Buffer(whole.size, dtype, Role.OUTPUT)} if in_place else {"input": whole, "output": part}
    source = Arrays(("output" if in_place else "input",))
    target = source if in_place else Arrays(("output",), first)
    if size == 1:
        own = Span(source.names[0], 0, whole.size)
        ops = (copy(codec, own, Span("output", 0, whole.size), combine),)
        return Schedule(
            "reduce_scatter", rank, size, buffers, ops if len(own) and (not in_place or scale != 1.0) else ()
        )
    layout = partition_as_given(counts, codec, chunk_elements)
    scatter = ScatterReduce(rank, range(size), Encoding(layout, codec, dtype), source, depth)

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, None, target)

    operations = pipeline(layout.chunks, (0, scatter.send), (min(1, depth - 1), reduce))
    return Schedule("reduce_scatter", rank, size, buffers | scatter.buffers(), operations)
