"""Reduce: an all-reduce whose result only one rank gets."""

from __future__ import annotations

from dataclasses import dataclass

from qccl.base.arrays import Values
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import AllReduceSpec, choose_allreduce, shards_of
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import SUM, CallerBuffers, Combine, RankGroup
from qccl.collectives.partitions import partition
from qccl.collectives.rounds import AllGatherRound, ScatterReduce, alone, assemble, pipeline
from qccl.collectives.schedule import Schedule
from qccl.collectives.spec import Call, CollectiveSpec, check_root, input_and_output
from qccl.collectives.wire import Encoding

__all__ = ["ReduceSpec", "reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpec(CollectiveSpec):
    """Arguments of quantized_reduce."""

    name = "reduce"
    algorithms = AllReduceSpec.algorithms

    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"

    def choose(self, size: int) -> str:
        """Choose by the bytes that the root receives: (size-1) E in one_shot, and 2 (size-1)/size E in two_round.

        two_round takes one more hop. With two ranks one_shot is never worse.
        """
        return "one_shot" if size <= 2 else choose_allreduce(self.count, size, self.dtype, self.codec.rounds[0])

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """See CollectiveSpec; only the root has an output."""
        return input_and_output(call.find, *call.arrays, writes=call.rank == call.own["root"])

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec; only the root has an output."""
        check_root(self.root, size)
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place, result=rank == self.root)

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        algorithm, combine = self.algorithm_for(group.size), Combine.of(self.op, group.size)
        return reduce(algorithm, group, buffers, self.codec, combine, root=self.root, chunking=chunking)


def reduce(
    algorithm: str,
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    root: int = 0,
    chunking: ChunkPolicy,
) -> Schedule:
    """The schedule of an algorithm.

    "one_shot": each rank sends the root its encoded vector, and the root combines the codes and its own values. There
    is one hop, in which the root receives size - 1 encoded vectors. The root's values are not quantised, all others
    once.

    "two_round": scatter-reduce, after which every rank sends its shard of the sum to the root. The first codec of a
    pair encodes both rounds: owners have no memory for a sum that is not encoded. Each rank sends one encoded vector in
    all, and the root receives 2 (size-1)/size of one. Elements are quantised twice, those of the root's shard once.
    """
    parts = partition(buffers.counts, shards_of(algorithm, group.size), (codec,), chunking)
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth)
    if group.size == 1 or not any(buffers.counts):
        return assemble(algorithm, group, buffers, alone(buffers, codec, combine))
    lag, is_root = encoding.lag, group.rank == root
    if algorithm == "one_shot":
        scatter = ScatterReduce(group, encoding, buffers.source, owners={root: 0})
        ops = pipeline((0, scatter.send()), (lag, scatter.reduce(combine, None, buffers.target)))
        return assemble(algorithm, group, buffers, ops, scatter)
    owners = {rank: part for part, rank in enumerate(group.ranks) if (rank == group.rank) != is_root}
    scatter = ScatterReduce(group, encoding, buffers.source)
    gather = AllGatherRound(group, encoding, round_number=1, owners=owners, receivers=(root,))
    wires, target = (None, buffers.target) if is_root else (gather.wires(), None)
    reduce = scatter.reduce(combine, wires, target)
    stages = (0, scatter.send()), (lag, reduce), (lag, gather.exchange()), (lag + lag, gather.decode(buffers.target))
    return assemble(algorithm, group, buffers, pipeline(*stages), scatter, gather)
