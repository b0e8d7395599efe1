"""Schedules of reduce-scatter, all-gather and all-to-all: the rounds of all-reduce by themselves, and the exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qccl.codecs.base import Codec
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    Arrays,
    CallerBuffers,
    Encoding,
    exchange,
    partition_as_given,
    peers_of,
    pipeline,
)
from qccl.collectives.rounds import AllGather, ScatterReduce, checked, copy, decode, encode
from qccl.dtypes import DType
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]


def reduce_scatter(
    rank: int,
    size: int,
    counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """The first round of all-reduce: rank r gets part r, of ``counts[r]`` elements, combined from all ranks.

    In place, "output" is the whole vector, and the result is where part r was; otherwise "output" is the part alone.
    Each rank sends (size-1)/size of the encoded vector in one step; an element is quantised once, the own one not.
    """
    combine = checked(rank, size, op, scale, depth, *counts)
    first = sum(counts[:rank])
    whole, part = Buffer(sum(counts), dtype, Role.INPUT), Buffer(counts[rank], dtype, Role.OUTPUT)
    buffers = {"output": Buffer(whole.size, dtype, Role.OUTPUT)} if in_place else {"input": whole, "output": part}
    source = Arrays(("output" if in_place else "input",))
    target = source if in_place else Arrays(("output",), first)
    if size == 1:
        own = Span(source.names[0], 0, whole.size)
        ops = (copy(codec, own, Span("output", 0, whole.size), combine),)
        return Schedule(
            "reduce_scatter", rank, size, buffers, ops if len(own) and (not in_place or scale != 1.0) else ()
        )
    layout = partition_as_given(counts, codec, chunk_elements)
    scatter = ScatterReduce(rank, range(size), Encoding(layout, codec, dtype), source, depth)

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, None, target)

    operations = pipeline(layout.chunks, (0, scatter.send), (min(1, depth - 1), reduce))
    return Schedule("reduce_scatter", rank, size, buffers | scatter.buffers(), operations)


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


def all_to_all(
    rank: int,
    size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    dtype: DType,
    codec: Codec,
    *,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Rank r's part j goes to rank j, where it is part r; counts are this rank's, by peer, and may differ.

    Everything is sent once, in one step; the own part is copied as it is.
    """
    checked(rank, size, "sum", 1.0, depth, *send_counts, *recv_counts)
    caller = CallerBuffers.make(in_place=False)
    buffers = {
        "input": Buffer(sum(send_counts), dtype, Role.INPUT),
        "output": Buffer(sum(recv_counts), dtype, Role.OUTPUT),
    }
    peers = peers_of(rank, size)
    out, back = (
        Encoding(partition_as_given(counts, codec, chunk_elements), codec, dtype)
        for counts in (send_counts, recv_counts)
    )
    send, recv = out.slots("send", len(peers), depth), back.slots("recv", len(peers), depth)

    # Both ranks number an element by its place in the part. So that no random number is used twice, the number of the
    # receiver stands for the round.
    def first_of(encoding: Encoding, peer: int) -> int:
        return next((segment.index for segment in encoding.layout.segments(peer, 0)), 0)

    def keep(k: int) -> Iterator[Op]:
        start, first, count = sum(send_counts[:rank]), sum(recv_counts[:rank]), send_counts[rank]
        if k == 0 and count:
            yield copy(codec, Span("input", start, start + count), Span("output", first, first + count))

    def received(k: int) -> dict[int, Span]:
        return {peer: recv.span(k, i, back.nbytes(peer, k)) for i, peer in enumerate(peers)}

    def post(k: int) -> Iterator[Op]:
        wires = {peer: send.span(k, i, out.nbytes(peer, k)) for i, peer in enumerate(peers)}
        for peer, wire in wires.items():
            yield from encode(out, peer, k, caller.source, wire, peer, origin=first_of(out, peer))
        yield from exchange(wires, received(k))

    def take(k: int) -> Iterator[Op]:
        for peer, wire in received(k).items():
            yield from decode(back, peer, k, wire, caller.target, peer, rank, origin=first_of(back, peer))

    chunks = max(out.layout.chunks, back.layout.chunks)
    ops = pipeline(chunks, (0, post), (0, keep), (min(1, depth - 1), take))
    slots = {ring.name: ring.buffer() for ring in (send, recv) if peers}
    return Schedule("all_to_all", rank, size, buffers | slots, ops)
