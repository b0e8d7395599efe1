"""All-reduce: ``two_round`` for large vectors, ``one_shot`` for small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from qccl.base.dtypes import DType
from qccl.codecs.base import Codec
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import SUM, Arrays, CallerBuffers, Combine, RankGroup
from qccl.collectives.partitions import HOP_NBYTES, partition
from qccl.collectives.rounds import AllGatherRound, Round, ScatterReduce, Stage, alone, assemble, merged, pipeline
from qccl.collectives.schedule import Schedule
from qccl.collectives.spec import CollectiveSpec
from qccl.collectives.wire import Encoding

__all__ = ["ALLREDUCE", "AllReduceSpec", "choose_allreduce", "one_shot", "shards_of", "stages_of", "two_round"]

#: encoded bytes above which two ranks use two rounds. Both algorithms send the same bytes, but one_shot encodes and
#: decodes a fifth more elements, which costs 10 to 25% in shared memory. At 64 KiB both take the same time
_TWO_RANKS_NBYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSpec(CollectiveSpec):
    """Arguments of quantized_allreduce."""

    name = "allreduce"
    keeps_state = True
    algorithms = ("one_shot", "two_round")

    op: str = "sum"
    algorithm: str = "auto"

    def choose(self, size: int) -> str:
        """See choose_allreduce()."""
        return choose_allreduce(self.count, size, self.dtype, self.codec)

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        algorithm, combine = self.algorithm_for(group.size), Combine.of(self.op, group.size)
        return allreduce(algorithm, group, buffers, self.codec, combine, chunking=chunking)


def choose_allreduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm that "auto" stands for: "one_shot" if its extra bytes cost less than a second round.

    If a vector has E bytes encoded, and its sum F, one_shot sends (size-1) E in one round and two_round
    (size-1)/size (E + F) in two. The difference is (size-1)/size ((size-1) E - F). With two ranks and E = F it is 0,
    and one_shot costs computation only.
    """
    nbytes, of_sum = (each.encoded_nbytes(count, dtype) for each in codec.rounds)
    if size <= 2:
        return "one_shot" if nbytes <= _TWO_RANKS_NBYTES else "two_round"
    extra = (size - 1) * ((size - 1) * nbytes - of_sum)
    return "one_shot" if extra <= size * HOP_NBYTES else "two_round"


def allreduce(
    algorithm: str,
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    chunking: ChunkPolicy,
) -> Schedule:
    """The schedule of an algorithm.

    "two_round": scatter-reduce, then all-gather (the code guide of QSGD-TF, section 1, "Communication"; "Notes on 1bit
    SGD", sections 3 and 5, CNTK). Rank r reduces shard r. Each rank sends 2 (size-1)/size of the encoded vector; an
    element is quantised twice. The workspace is (3 size - 2) x depth wire slots of one chunk each, whatever the count.

    "one_shot": each rank sends its whole encoded vector to all others, and combines all codes, its own included. Each
    rank sends size - 1 times the encoded vector in one round; an element is quantised once and the sum not at all. The
    workspace is size x depth wire slots of one chunk each.
    """
    if group.size == 1 or not any(buffers.counts):
        return assemble(algorithm, group, buffers, alone(buffers, codec, combine))
    parts = partition(buffers.counts, shards_of(algorithm, group.size), (codec,), chunking)
    encoding = Encoding(parts, codec, buffers.dtype, chunking.depth)
    stages, rounds = stages_of(algorithm, group, encoding, codec, combine, buffers.source, buffers.target)
    return assemble(algorithm, group, buffers, pipeline(*stages), *rounds)


def shards_of(algorithm: str, size: int) -> int:
    """The number of shards into which an algorithm divides the vector of ``size`` ranks."""
    return size if algorithm == "two_round" else 1


def stages_of(
    algorithm: str,
    group: RankGroup,
    encoding: Encoding,
    codec: Codec,
    combine: Combine,
    source: Arrays,
    target: Arrays,
    *,
    prefix: str = "",
    round_number: int = 0,
) -> tuple[list[Stage], list[Round]]:
    """The stages and the rounds of an algorithm; the first round encodes by ``encoding``.

    ``prefix`` begins the names of the rounds, and ``round_number`` is the number of the first round. If the rounds have
    different codecs, sums are stored in the element type before they are encoded.
    """
    lag, scatter_name, gather_name = encoding.lag, f"{prefix}scatter", f"{prefix}gather"
    if algorithm == "one_shot":
        owners = dict.fromkeys(group.owners(group.size), 0)
        gather = AllGatherRound(group, encoding, name=gather_name, round_number=round_number, owners=owners)
        return [(0, gather.encode(source)), (0, gather.exchange()), (lag, gather.reduce(combine, target))], [gather]
    scatter = ScatterReduce(group, encoding, source, name=scatter_name, round_number=round_number)
    sums = encoding
    if codec.rounds[1] != encoding.codec:
        sums = Encoding(encoding.partition, codec, encoding.dtype, encoding.depth, sums=True)
    gather = AllGatherRound(group, sums, name=gather_name, round_number=round_number + 1)
    if sums is encoding:
        reduce = scatter.reduce(combine, gather.wires(), target)
    else:
        reduce = merged(scatter.reduce(combine, None, target), gather.encode(target, target))
    stages = [(0, scatter.send()), (lag, reduce), (lag, gather.exchange()), (lag + lag, gather.decode(target))]
    return stages, [scatter, gather]


#: the algorithms of all-reduce by name
ALLREDUCE: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {name: partial(allreduce, name) for name in AllReduceSpec.algorithms}
)
one_shot, two_round = ALLREDUCE.values()
