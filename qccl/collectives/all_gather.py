"""All-gather: the second round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qccl.arrays import Values, is_part_of
from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_CHUNKING, Chunking, ChunkSize, partition_as_given
from qccl.collectives.operands import CallerBuffers, Group
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import AllGather, alone, assemble, pipeline
from qccl.collectives.spec import Binding, common
from qccl.collectives.wire import Encoding
from qccl.schedule import Op, Schedule

__all__ = ["AllGatherSpec", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherSpec(PartsSpec):
    """Arguments of quantized_all_gather."""

    name = "all_gather"

    @classmethod
    def from_arguments(cls, *shared: Any, counts: Sequence[int] | None = None) -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        return cls(**common(*shared), parts=parts_of(counts))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        return {"input": self.lengths(size)[rank], "output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """See CollectiveSpec."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(source, target, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": target.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: ChunkSize = None) -> Schedule:
        """See CollectiveSpec."""
        return all_gather(
            Group.of_all(rank, size),
            CallerBuffers.gathered(self.lengths(size), rank, self.dtype, in_place=in_place),
            self.codec,
            chunking=self._chunking(default_chunk),
        )


def all_gather(
    group: Group, buffers: CallerBuffers, codec: Codec, *, chunking: Chunking = DEFAULT_CHUNKING
) -> Schedule:
    """All ranks get all parts; part r, of ``buffers.counts[r]`` elements, is rank r's.

    A rank keeps the decoded values of its own part, as the others get them: all hold the same bits. Each rank sends
    size - 1 times its encoded part in one step.
    """
    encoding = Encoding(
        partition_as_given(buffers.counts, codec, chunking.elements), codec, buffers.dtype, chunking.depth
    )
    if group.size == 1:
        return assemble("all_gather", group, buffers, alone(buffers, codec))
    gather = AllGather(group, encoding)

    def encode_own(k: int) -> Iterator[Op]:
        return gather.encode(k, buffers.source, buffers.target)

    def decode_others(k: int) -> Iterator[Op]:
        return gather.decode(k, buffers.target)

    stages = ((0, encode_own), (0, gather.exchange), (encoding.lag, decode_others))
    return assemble("all_gather", group, buffers, pipeline(encoding.layout.chunks, *stages), gather)
