"""Schedules of all-reduce: ``two_round`` for large vectors, ``one_shot`` for small ones and for two ranks."""

from __future__ import annotations

from collections.abc import Iterator

from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_DEPTH, CallerBuffers, Coded, check_place, cut, pipeline
from qccl.collectives.rounds import AllGather, Combine, ScatterReduce
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Encode, Op, Reduce, Schedule, Span

__all__ = ["one_shot", "two_round"]


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
    combine = _checked(rank, size, count, op, scale, depth)
    caller = CallerBuffers.make(in_place)
    buffers = caller.buffers(count, dtype)
    if size == 1 or count == 0:
        return Schedule("two_round", rank, size, buffers, _alone(codec, caller, count, combine))
    layout = cut(count, size, codec, chunk_elements)
    coded = Coded(layout, codec, dtype)
    scatter = ScatterReduce(rank, coded, caller.source, depth)
    gather = AllGather(rank, size, coded, depth)

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, wire=gather.wire(k), out=scatter.own(k, caller.target))

    def decode(k: int) -> Iterator[Op]:
        return gather.decode(k, caller.target)

    # A stage that waits for the line stands one step behind the one that used it: an in-order compute lane then never
    # holds back the encode of chunk k+1 for the transfers of chunk k. That step must be less than the depth.
    lag = min(1, depth - 1)
    ops = pipeline(layout.chunks, (0, scatter.send), (lag, reduce), (lag, gather.exchange), (lag + lag, decode))
    return Schedule("two_round", rank, size, buffers | scatter.buffers() | gather.buffers(), ops)


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
    combine = _checked(rank, size, count, op, scale, depth)
    caller = CallerBuffers.make(in_place)
    buffers = caller.buffers(count, dtype)
    if size == 1 or count == 0:
        return Schedule("one_shot", rank, size, buffers, _alone(codec, caller, count, combine))
    layout = cut(count, 1, codec, chunk_elements)
    gather = AllGather(rank, size, Coded(layout, codec, dtype), depth)

    def encode(k: int) -> Iterator[Op]:
        chunk = layout.chunk(0, k)
        yield Encode(codec, Span(caller.source, chunk.start, chunk.stop), gather.wire(k), chunk.start)

    def reduce(k: int) -> Iterator[Op]:
        chunk = layout.chunk(0, k)
        out = Span(caller.target, chunk.start, chunk.stop)
        yield Reduce(codec, gather.wires(k), None, 0, None, out, combine.op, combine.scale, chunk.start)

    ops = pipeline(layout.chunks, (0, encode), (0, gather.exchange), (min(1, depth - 1), reduce))
    return Schedule("one_shot", rank, size, buffers | gather.buffers(), ops)


def _checked(rank: int, size: int, count: int, op: str, scale: float, depth: int) -> Combine:
    check_place(rank, size, count)
    if op not in ("sum", "min", "max"):
        raise ArgumentError(f"op is {op!r}; a schedule knows sum, min and max (an average is a sum with a scale)")
    if depth < 1:
        raise ArgumentError(f"depth is {depth}; there must be 1 wire slot per peer or more (2 or more to overlap)")
    return Combine(op, scale)


def _alone(codec: Codec, caller: CallerBuffers, count: int, combine: Combine) -> tuple[Op, ...]:
    """The one operation of a rank that has no peers: an exact copy; none where there is nothing to change."""
    if count == 0 or (caller.source == caller.target and combine.scale == 1.0):
        return ()
    own, out = Span(caller.source, 0, count), Span(caller.target, 0, count)
    return (Reduce(codec, (), own, 0, None, out, combine.op, combine.scale),)
