"""All-gather: the second round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    Arrays,
    Encoding,
    partition_as_given,
    pipeline,
)
from qccl.collectives.rounds import AllGather, checked, copy
from qccl.collectives.spec import PartsSpec, common, parts_of
from qccl.dtypes import DType
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["AllGatherSpec", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherSpec(PartsSpec):
    """Parameters of quantized_all_gather."""

    name = "all_gather"

    @classmethod
    def from_arguments(cls, *shared: Any, counts: Sequence[int] | None = None) -> Self:
        """Check the arguments."""
        return cls(**common(*shared), parts=parts_of(counts))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        return {"input": self.lengths(size)[rank], "output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See CollectiveSpec."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(source, target, sum(self.lengths(size)[:rank])):
            return True, {"output": target.address}
        return False, {"input": source.address, "output": target.address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        return all_gather(
            *(rank, size, self.lengths(size), self.dtype, self.codec),
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def all_gather(
    rank: int,
    size: int,
    counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    *,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """The second round of all-reduce: all ranks get all parts; part r, of ``counts[r]`` elements, is rank r's.

    In place, rank r's part is where it belongs in "output"; otherwise it is "input". What a rank keeps of its own part
    is what the others get: all hold the same bits. Each sends size - 1 times its encoded part in one step.
    """
    checked(rank, size, "sum", 1.0, depth, *counts)
    buffers = {"output": Buffer(sum(counts), dtype, Role.OUTPUT)}
    target = Arrays(("output",))
    source = target if in_place else Arrays(("input",), sum(counts[:rank]))
    if not in_place:
        buffers["input"] = Buffer(counts[rank], dtype, Role.INPUT)
    if size == 1:
        ops = (copy(codec, Span("input", 0, counts[0]), Span("output", 0, counts[0])),)
        return Schedule("all_gather", rank, size, buffers, () if in_place or not counts[0] else ops)
    layout = partition_as_given(counts, codec, chunk_elements)
    gather = AllGather(rank, range(size), Encoding(layout, codec, dtype), depth)

    def encode_own(k: int) -> Iterator[Op]:
        return gather.encode(k, source, target)

    def decode_others(k: int) -> Iterator[Op]:
        return gather.decode(k, target)

    operations = pipeline(layout.chunks, (0, encode_own), (0, gather.exchange), (min(1, depth - 1), decode_others))
    return Schedule("all_gather", rank, size, buffers | gather.buffers(), operations)
