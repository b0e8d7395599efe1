"""Reduce: as all-reduce, but one rank alone gets the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from qccl.arguments import OpLike, integer, one_of, op_of
from qccl.arrays import Values
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import choose_allreduce
from qccl.collectives.layout import DEFAULT_DEPTH, CallerBuffers, Encoding, exchange, partition, pipeline
from qccl.collectives.rounds import ScatterReduce, alone, checked, decode
from qccl.collectives.spec import CollectiveSpec, check_root, common, reduction
from qccl.dtypes import DType
from qccl.schedule import Buffer, Op, Role, Schedule, Span

__all__ = ["REDUCE", "ReduceSpec", "choose_reduce", "reduce_one_shot", "reduce_two_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpec(CollectiveSpec):
    """Parameters of quantized_reduce."""

    name = "reduce"

    op: str
    root: int
    algorithm: str

    @classmethod
    def from_arguments(cls, *shared: Any, op: OpLike = "sum", root: int = 0, algorithm: str = "auto") -> Self:
        """Check the arguments."""
        one_of(algorithm, ("auto", *REDUCE), "algorithm")
        return cls(**common(*shared), op=op_of(op), root=integer(root, "root"), algorithm=algorithm)

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec; there is an output on the root alone."""
        check_root(self.root, size)
        both = {"input": self.count, "output": self.count}
        return both if rank == self.root else {"input": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See CollectiveSpec."""
        if rank == self.root:
            return CollectiveSpec.bind(self, arrays, rank, size)
        return False, {"input": arrays["input"].address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_reduce(self.count, size, self.dtype, self.codec)
        return REDUCE[name](
            *(rank, size, self.count, self.dtype, self.codec, combine),
            root=self.root,
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def choose_reduce(count: int, size: int, dtype: DType, codec: Codec) -> str:
    """The algorithm of reduce that "auto" stands for, by the bytes that the root receives.

    In one_shot (size-1) E, in two_round 2 (size-1)/size E in one more step. With two ranks one_shot has nothing against
    it.
    """
    return "one_shot" if size <= 2 else choose_allreduce(count, size, dtype, codec)


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
    check_root(root, size)
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
    check_root(root, size)
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


def _reduced(caller: CallerBuffers, count: int, dtype: DType, is_root: bool) -> dict[str, Buffer]:
    return caller.buffers((count,), dtype) if is_root else {"input": Buffer(count, dtype, Role.INPUT)}


#: the algorithms of reduce by name
REDUCE: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {"one_shot": reduce_one_shot, "two_round": reduce_two_round}
)
