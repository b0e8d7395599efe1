"""All-reduce: ``two_round`` for large vectors, ``one_shot`` for small ones and for two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from qccl.arguments import OpLike, one_of, op_of
from qccl.codecs.base import Codec
from qccl.collectives.feedback import with_feedback
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    CallerBuffers,
    Encoding,
    Partition,
    partition,
    partition_together,
    pipeline,
)
from qccl.collectives.rounds import AllGather, Combine, ScatterReduce, alone, checked
from qccl.collectives.spec import CollectiveSpec, common, reduction
from qccl.dtypes import DType
from qccl.schedule import Op, Schedule

__all__ = ["ALLREDUCE", "STEP_NBYTES", "AllReduceSpec", "choose_allreduce", "coalesced", "one_shot", "two_round"]

#: bytes that a link carries in the time of one more step: 20 us at 10 Gbit/s, 5 us at 5 GB/s of shared memory
STEP_NBYTES = 24 * 1024
#: encoded bytes above which two ranks do better in two rounds: both algorithms send as much, but one_shot codes a fifth
#: more elements, which costs 10 to 25% in shared memory (as measured, the two meet at 64 KiB)
_TWO_RANKS_NBYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSpec(CollectiveSpec):
    """Parameters of quantized_allreduce."""

    name = "allreduce"
    keeps_state = True

    op: str
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", algorithm: str = "auto") -> Self:
        """Check the arguments."""
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        return cls(**common(*shared), op=op_of(op), algorithm=algorithm)

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_allreduce(self.count, size, self.dtype, self.codec)
        return ALLREDUCE[name](
            *(rank, size, self.count, self.dtype, self.codec, combine),
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def choose_allreduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm that "auto" stands for: "one_shot" where its extra bytes cost less than a second step.

    Of a vector encoded in E bytes, one_shot sends (size-1) E in one step and two_round 2 (size-1)/size E in two. With
    two ranks both send E, and what one_shot costs is computation.
    """
    nbytes = codec.encoded_nbytes(count, dtype)
    if size <= 2:
        return "one_shot" if nbytes <= _TWO_RANKS_NBYTES else "two_round"
    extra = (size - 1) * (size - 2) * nbytes
    return "one_shot" if extra <= size * STEP_NBYTES else "two_round"


def two_round(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Scatter-reduce, then all-gather: the two rounds of QSGD's TensorFlow port, the stripes of CNTK's 1-bit SGD.

    Rank r reduces shard r. Each rank sends 2 (size-1)/size of the encoded vector; an element is quantised twice. The
    workspace is (3 size - 2) x depth wire slots of one chunk each, whatever the count.
    """
    combine = checked(rank, size, op, scale, depth, count)
    caller = CallerBuffers.make(in_place)
    layout = partition(count, size, codec, chunk_elements)
    schedule = _two_round(rank, size, (count,), layout, dtype, codec.plain, combine, caller, depth)
    return with_feedback(schedule, codec, scale)


def one_shot(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Everyone sends everything, encoded, to everyone, and sums all codes, its own included.

    Each rank sends size - 1 times the encoded vector in one step; an element is quantised once and the sum not at all.
    The workspace is size x depth wire slots of one chunk each.
    """
    combine = checked(rank, size, op, scale, depth, count)
    caller = CallerBuffers.make(in_place)
    layout = partition(count, 1, codec, chunk_elements)
    schedule = _one_shot(rank, size, (count,), layout, dtype, codec.plain, combine, caller, depth)
    return with_feedback(schedule, codec, scale)


def coalesced(
    rank: int,
    size: int,
    counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    algorithm: str = "two_round",
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """All-reduce of many arrays at once, by either algorithm: arrays share messages, but no buckets.

    Each array begins with a bucket of its own. The buffers are "input 0", "output 0" and so on.
    """
    combine = checked(rank, size, op, scale, depth, *counts)
    caller = CallerBuffers.make(in_place, len(counts))
    make = {"two_round": _two_round, "one_shot": _one_shot}[algorithm]
    layout = partition_together(counts, size if algorithm == "two_round" else 1, codec, chunk_elements)
    return with_feedback(make(rank, size, counts, layout, dtype, codec.plain, combine, caller, depth), codec, scale)


def _two_round(
    rank: int,
    size: int,
    counts: Sequence[int],
    layout: Partition,
    dtype: DType,
    codec: Codec,
    combine: Combine,
    caller: CallerBuffers,
    depth: int,
) -> Schedule:
    buffers = caller.buffers(counts, dtype)
    if size == 1 or not any(counts):
        return Schedule("two_round", rank, size, buffers, alone(codec, caller, counts, combine))
    encoding = Encoding(layout, codec, dtype)
    scatter = ScatterReduce(rank, range(size), encoding, caller.source, depth)
    gather = AllGather(rank, range(size), encoding, depth, round_number=1)

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, gather.wire(k), caller.target)

    def decode(k: int) -> Iterator[Op]:
        return gather.decode(k, caller.target)

    # A stage that waits for the line stands one step behind the one that used it: an in-order compute lane then never
    # holds back the encode of chunk k+1 for the transfers of chunk k. That step must be less than the depth.
    lag = min(1, depth - 1)
    ops = pipeline(layout.chunks, (0, scatter.send), (lag, reduce), (lag, gather.exchange), (lag + lag, decode))
    return Schedule("two_round", rank, size, buffers | scatter.buffers() | gather.buffers(), ops)


def _one_shot(
    rank: int,
    size: int,
    counts: Sequence[int],
    layout: Partition,
    dtype: DType,
    codec: Codec,
    combine: Combine,
    caller: CallerBuffers,
    depth: int,
) -> Schedule:
    buffers = caller.buffers(counts, dtype)
    if size == 1 or not any(counts):
        return Schedule("one_shot", rank, size, buffers, alone(codec, caller, counts, combine))
    gather = AllGather(rank, range(size), Encoding(layout, codec, dtype), depth, common=True)

    def encode(k: int) -> Iterator[Op]:
        return gather.encode(k, caller.source)

    def reduce(k: int) -> Iterator[Op]:
        return gather.reduce(k, combine, caller.target)

    ops = pipeline(layout.chunks, (0, encode), (0, gather.exchange), (min(1, depth - 1), reduce))
    return Schedule("one_shot", rank, size, buffers | gather.buffers(), ops)


#: the algorithms of all-reduce by name
ALLREDUCE: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": one_shot, "two_round": two_round}
)
