"""Schedules with a root: broadcast down a tree of ranks, and reduce."""

from __future__ import annotations

from collections.abc import Iterator

from qccl.codecs.base import Codec
from qccl.collectives.layout import DEFAULT_DEPTH, CallerBuffers, Encoding, exchange, partition, pipeline
from qccl.collectives.rounds import Combine, Relay, ScatterReduce, alone, checked, decode, encode
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["broadcast", "reduce_one_shot", "reduce_two_round"]


def broadcast(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    *,
    root: int = 0,
    tree: str = "chain",
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """The root encodes once; the codes go down a "chain" of ranks, chunk by chunk, or a "binomial" tree.

    The root keeps what the others get: all hold the same bits. In a chain each rank sends the encoded vector at most
    once, and the last one has it size - 1 steps of a chunk later; in a tree the root sends it log2(size) times, in as
    many steps. Other ranks than the root have "output" alone.
    """
    checked(rank, size, "sum", 1.0, depth, count)
    _check_root(root, size)
    caller = CallerBuffers.make(in_place or rank != root)
    buffers = caller.buffers((count,), dtype)
    if size == 1 or count == 0:
        return Schedule(tree, rank, size, buffers, alone(codec, caller, (count,), Combine()))
    encoding = Encoding(partition(count, 1, codec, chunk_elements), codec, dtype)
    parent, children = _family(rank, size, root, tree)
    relay = Relay(root, parent, children, encoding, depth)
    chunks = encoding.layout.chunks
    if parent is None:

        def encode_own(k: int) -> Iterator[Op]:
            return encode(encoding, 0, k, caller.source, relay.wire(k), 0, caller.target)

        ops = pipeline(chunks, (0, encode_own), (0, relay.exchange))
    else:

        def decode_one(k: int) -> Iterator[Op]:
            return relay.decode(k, caller.target)

        ops = pipeline(chunks, (0, relay.exchange), (1, decode_one)) + tuple(relay.exchange(chunks))
    return Schedule(tree, rank, size, buffers | relay.buffers(), ops)


def _family(rank: int, size: int, root: int, tree: str) -> tuple[int | None, list[int]]:
    """Parent (None: the root) and children of a rank; of the children, the one with the most descendants first."""
    if tree not in ("chain", "binomial"):
        raise ArgumentError(f"tree is {tree!r}; there are chain and binomial")
    place = (rank - root) % size
    if tree == "chain":
        parent, children = place - 1, [place + 1]
    else:
        steps = [1 << j for j in range(place.bit_length(), size.bit_length())]
        parent, children = place - (1 << max(place.bit_length() - 1, 0)), [place + step for step in steps]
    return (
        None if place == 0 else (parent + root) % size,
        [(child + root) % size for child in children if child < size],
    )


def reduce_one_shot(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    root: int = 0,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Everyone sends the root its encoded vector, and the root sums the codes and its own values.

    One step, in which the root receives size - 1 encoded vectors. An element is quantised once, the root's own one not.
    Other ranks than the root have "input" alone.
    """
    combine = checked(rank, size, op, scale, depth, count)
    _check_root(root, size)
    caller = CallerBuffers.make(in_place and rank == root)
    buffers = _reduced(caller, count, dtype, rank == root)
    if size == 1 or count == 0:
        return Schedule("one_shot", rank, size, buffers, alone(codec, caller, (count,), combine))
    encoding = Encoding(partition(count, 1, codec, chunk_elements), codec, dtype)
    scatter = ScatterReduce(rank, range(size), encoding, caller.source, depth, owners=(root,))

    def reduce(k: int) -> Iterator[Op]:
        return scatter.reduce(k, combine, None, caller.target)

    ops = pipeline(encoding.layout.chunks, (0, scatter.send), (min(1, depth - 1), reduce))
    return Schedule("one_shot", rank, size, buffers | scatter.buffers(), ops)


def reduce_two_round(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    root: int = 0,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Scatter-reduce, after which every rank sends its shard of the sum to the root.

    Each rank sends one encoded vector in all, and the root receives 2 (size-1)/size of one. An element is quantised
    twice, but in the root's shard. Other ranks than the root have "input" alone.
    """
    combine = checked(rank, size, op, scale, depth, count)
    _check_root(root, size)
    caller = CallerBuffers.make(in_place and rank == root)
    buffers = _reduced(caller, count, dtype, rank == root)
    if size == 1 or count == 0:
        return Schedule("two_round", rank, size, buffers, alone(codec, caller, (count,), combine))
    layout = partition(count, size, codec, chunk_elements)
    encoding = Encoding(layout, codec, dtype)
    scatter = ScatterReduce(rank, range(size), encoding, caller.source, depth)
    others = [other for other in range(size) if other != root]
    slots = encoding.slots("gather", len(others) if rank == root else 1, depth)

    def wires(k: int) -> dict[int, Span]:
        return {other: slots.span(k, i, encoding.nbytes(other, k)) for i, other in enumerate(others)}

    def own(k: int) -> Span:
        return slots.span(k, 0, encoding.nbytes(rank, k))

    def reduce(k: int) -> Iterator[Op]:
        if rank == root:
            return scatter.reduce(k, combine, None, caller.target)
        return scatter.reduce(k, combine, own(k), None)

    def gather(k: int) -> Iterator[Op]:
        return exchange({}, wires(k)) if rank == root else exchange({root: own(k)}, {})

    def decode_others(k: int) -> Iterator[Op]:
        for other, wire in wires(k).items() if rank == root else ():
            yield from decode(encoding, other, k, wire, caller.target, other, 1)

    lag = min(1, depth - 1)
    ops = pipeline(layout.chunks, (0, scatter.send), (lag, reduce), (lag, gather), (lag + lag, decode_others))
    return Schedule("two_round", rank, size, buffers | scatter.buffers() | {"gather": slots.buffer()}, ops)


def _check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ArgumentError(f"root is {root}; it must be a rank, 0 to {size - 1}")


def _reduced(caller: CallerBuffers, count: int, dtype: DType, is_root: bool) -> dict[str, Buffer]:
    return caller.buffers((count,), dtype) if is_root else {"input": Buffer(count, dtype, Role.INPUT)}
