"""Reduce: as all-reduce, but one rank alone gets the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from qccl.arguments import OpLike, integer, one_of, op_of
from qccl.arrays import Values
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import choose_allreduce
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Group
from qccl.collectives.partitions import partition
from qccl.collectives.rounds import AllGather, ScatterReduce, alone, assemble, pipeline
from qccl.collectives.spec import Call, CollectiveSpec, check_root, common, input_and_output
from qccl.collectives.wire import Encoding
from qccl.dtypes import DType
from qccl.schedule import Op, Schedule

__all__ = ["REDUCE", "ReduceSpec", "choose_reduce", "reduce_one_shot", "reduce_two_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpec(CollectiveSpec):
    """Arguments of quantized_reduce."""

    name = "reduce"

    op: str
    root: int
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", root: int = 0, algorithm: str = "auto") -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        one_of(algorithm, ("auto", *REDUCE), "algorithm")
        return cls(**common(*shared), op=op_of(op), root=integer(root, "root"), algorithm=algorithm)

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """See CollectiveSpec; only the root has an output."""
        return input_and_output(call.find, *call.arrays, writes=call.rank == call.own["root"])

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec; only the root has an output."""
        check_root(self.root, size)
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place, result=rank == self.root)

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = choose_reduce(self.count, group.size, self.dtype, self.codec)
        combine = Combine.of(self.op, group.size)
        return REDUCE[algorithm](group, buffers, self.codec, combine, root=self.root, chunking=chunking)


def choose_reduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm that "auto" stands for, by the bytes that the root receives.

    These are (size-1) E in one_shot, and 2 (size-1)/size E in two_round, which takes one more hop. With two ranks
    one_shot is never worse.
    """
    return "one_shot" if size <= 2 else choose_allreduce(count, size, dtype, codec.rounds[0])


def reduce_one_shot(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    root: int = 0,
    chunking: ChunkPolicy = NETWORK,
) -> Schedule:
    """Each rank sends the root its encoded vector, and the root combines the codes and its own values.

    There is one hop, in which the root receives size - 1 encoded vectors. An element is quantised once, the root's own
    one not.
    """
    encoding = Encoding(partition(buffers.counts, 1, (codec,), chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1 or not any(buffers.counts):
        return assemble("one_shot", group, buffers, alone(buffers, codec, combine))
    scatter = ScatterReduce(group, encoding, buffers.source, owners={root: 0})
    reduce = partial(scatter.reduce, combine=combine, wire=None, target=buffers.target)
    ops = pipeline(encoding.partition.chunks, (0, scatter.send), (encoding.lag, reduce))
    return assemble("one_shot", group, buffers, ops, scatter)


def reduce_two_round(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    root: int = 0,
    chunking: ChunkPolicy = NETWORK,
) -> Schedule:
    """Scatter-reduce, after which every rank sends its shard of the sum to the root.

    The first codec of a pair encodes both rounds: owners have no memory for a sum that is not encoded. Each rank sends
    one encoded vector in all, and the root receives 2 (size-1)/size of one. An element is quantised
    twice, but in the root's shard once.
    """
    encoding = Encoding(partition(buffers.counts, group.size, (codec,), chunking), codec, buffers.dtype, chunking.depth)
    if group.size == 1 or not any(buffers.counts):
        return assemble("two_round", group, buffers, alone(buffers, codec, combine))
    is_root = group.rank == root
    owners = {rank: part for part, rank in enumerate(group.ranks) if (rank == group.rank) != is_root}
    scatter = ScatterReduce(group, encoding, buffers.source)
    gather = AllGather(group, encoding, round_number=1, owners=owners, receivers=(root,))

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, None if is_root else gather.wire(k), buffers.target if is_root else None)

    lag, decode = encoding.lag, partial(gather.decode, target=buffers.target)
    stages = ((0, scatter.send), (lag, reduce), (lag, gather.exchange), (lag + lag, decode))
    return assemble("two_round", group, buffers, pipeline(encoding.partition.chunks, *stages), scatter, gather)


#: the algorithms of reduce by name
REDUCE: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": reduce_one_shot, "two_round": reduce_two_round}
)
