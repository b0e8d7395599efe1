"""All-reduce: ``two_round`` for large vectors, ``one_shot`` for small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from qccl.arguments import OpLike, one_of, op_of
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Group
from qccl.collectives.partitions import HOP_NBYTES, partition_together
from qccl.collectives.rounds import AllGather, ScatterReduce, alone, assemble, pipeline, reduce_and_encode
from qccl.collectives.spec import CollectiveSpec, common
from qccl.collectives.wire import Encoding
from qccl.dtypes import DType
from qccl.schedule import Op, Schedule

__all__ = ["ALLREDUCE", "AllReduceSpec", "choose_allreduce", "one_shot", "two_round"]

#: encoded bytes above which two ranks use two rounds. Both algorithms send as much, but one_shot encodes and decodes a
#: fifth more elements, which costs 10 to 25% in shared memory. Measured: the two are equal at 64 KiB
_TWO_RANKS_NBYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSpec(CollectiveSpec):
    """Arguments of quantized_allreduce."""

    name = "allreduce"
    keeps_state = True

    op: str
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", algorithm: str = "auto") -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        return cls(**common(*shared), op=op_of(op), algorithm=algorithm)

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = choose_allreduce(self.count, group.size, self.dtype, self.codec)
        combine = Combine.of(self.op, group.size)
        return ALLREDUCE[algorithm](group, buffers, self.codec, combine, chunking=chunking)


def choose_allreduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm that "auto" stands for: "one_shot" if its extra bytes cost less than a second round.

    Of a vector encoded in E bytes, and its sum in F, one_shot sends (size-1) E in one round and two_round
    (size-1)/size (E + F) in two. The difference is (size-1)/size ((size-1) E - F). With two ranks and E = F it is 0,
    and one_shot costs computation only.
    """
    nbytes, of_sum = (each.encoded_nbytes(count, dtype) for each in codec.rounds)
    if size <= 2:
        return "one_shot" if nbytes <= _TWO_RANKS_NBYTES else "two_round"
    extra = (size - 1) * ((size - 1) * nbytes - of_sum)
    return "one_shot" if extra <= size * HOP_NBYTES else "two_round"


def two_round(
    group: Group, buffers: CallerBuffers, codec: Codec, combine: Combine = SUM, *, chunking: ChunkPolicy = NETWORK
) -> Schedule:
    """Scatter-reduce, then all-gather.

    Sources: the code guide of QSGD-TF, section 1, "Communication"; "Notes on 1bit SGD", sections 3 and 5 (CNTK).

    Rank r reduces shard r. Each rank sends 2 (size-1)/size of the encoded vector; an element is quantised twice. The
    workspace is (3 size - 2) x depth wire slots of one chunk each, whatever the count.
    """
    if group.size == 1 or not any(buffers.counts):
        return assemble("two_round", group, buffers, alone(buffers, codec, combine))
    encoding = _encoding(buffers, group.size, codec, chunking)
    scatter = ScatterReduce(group, encoding, buffers.source)
    gather = AllGather(group, encoding.of_sums(codec), round_number=1)

    def reduce(k: int) -> Iterator[Op]:
        return reduce_and_encode(scatter, gather, k, combine, buffers.target)

    lag, decode = encoding.lag, partial(gather.decode, target=buffers.target)
    stages = ((0, scatter.send), (lag, reduce), (lag, gather.exchange), (lag + lag, decode))
    ops = pipeline(encoding.partition.chunks, *stages)
    return assemble("two_round", group, buffers, ops, scatter, gather)


def one_shot(
    group: Group, buffers: CallerBuffers, codec: Codec, combine: Combine = SUM, *, chunking: ChunkPolicy = NETWORK
) -> Schedule:
    """Each rank sends its whole encoded vector to all others, and combines all codes, its own included.

    Each rank sends size - 1 times the encoded vector in one round; an element is quantised once and the sum not at all.
    The workspace is size x depth wire slots of one chunk each.
    """
    if group.size == 1 or not any(buffers.counts):
        return assemble("one_shot", group, buffers, alone(buffers, codec, combine))
    encoding = _encoding(buffers, 1, codec, chunking)
    gather = AllGather(group, encoding, common=True)
    encode = partial(gather.encode, source=buffers.source)
    reduce = partial(gather.reduce, combine=combine, target=buffers.target)
    ops = pipeline(encoding.partition.chunks, (0, encode), (0, gather.exchange), (encoding.lag, reduce))
    return assemble("one_shot", group, buffers, ops, gather)


def _encoding(buffers: CallerBuffers, parts: int, codec: Codec, chunking: ChunkPolicy) -> Encoding:
    """How the caller's arrays are divided and encoded.

    Several arrays share messages but not buckets: each array begins a new bucket.
    """
    together = partition_together(buffers.counts, parts, codec, chunking)
    return Encoding(together, codec, buffers.dtype, chunking.depth)


#: the algorithms of all-reduce by name
ALLREDUCE: Mapping[str, Callable[..., Schedule]] = MappingProxyType({"one_shot": one_shot, "two_round": two_round})
