"""All-gather: the second round of all-reduce by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from qccl.arrays import Values, is_part_of
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.levels import all_gather_in_levels
from qccl.collectives.operands import CallerBuffers, Group, ranks_by_node
from qccl.collectives.partitions import partition_as_given
from qccl.collectives.parts import PartsSpec, parts_of
from qccl.collectives.rounds import AllGather, alone, assemble, pipeline
from qccl.collectives.spec import Binding, common
from qccl.collectives.wire import Encoding
from qccl.schedule import Schedule

__all__ = ["AllGatherSpec", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherSpec(PartsSpec):
    """Arguments of quantized_all_gather."""

    name = "all_gather"

    @classmethod
    def from_arguments(cls, *shared: Any, counts: Sequence[int] | None = None) -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        return cls(**common(*shared), parts=parts_of(counts))

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        return CallerBuffers.gathered(self.lengths(size), rank, self.dtype, in_place=in_place)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """In place, the input is this rank's part of the output; any other overlap is refused."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(source, target, sum(self.lengths(size)[:rank])):
            return Binding(True, {"output": target.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        if self.node_ids:
            return all_gather_in_levels(
                group, buffers, self.codec, nodes=ranks_by_node(self.node_ids), chunking=chunking
            )
        return all_gather(group, buffers, self.codec, chunking=chunking)


def all_gather(group: Group, buffers: CallerBuffers, codec: Codec, *, chunking: ChunkPolicy = NETWORK) -> Schedule:
    """All ranks get all parts; part r, of ``buffers.counts[r]`` elements, is rank r's.

    A rank keeps the decoded values of its own part, as the others get them: all hold the same bits. Each rank sends
    size - 1 times its encoded part in one hop.
    """
    parts = partition_as_given(buffers.counts, codec, chunking)
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth, sums=True)
    if group.size == 1:
        return assemble("all_gather", group, buffers, alone(buffers, codec))
    gather = AllGather(group, encoding)
    encode_own = partial(gather.encode, source=buffers.source, keep=buffers.target)
    decode_others = partial(gather.decode, target=buffers.target)
    stages = ((0, encode_own), (0, gather.exchange), (encoding.lag, decode_others))
    return assemble("all_gather", group, buffers, pipeline(encoding.partition.chunks, *stages), gather)
