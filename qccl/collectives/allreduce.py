"""Schedules of all-reduce: ``two_round`` for large vectors, ``one_shot`` for small ones and for two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from qccl.dtypes import DType
from qccl.schedule import Op, Schedule

__all__ = ["coalesced", "one_shot", "two_round"]


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
