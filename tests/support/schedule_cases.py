"""Schedules of small all-reduces, and ways to break them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from qccl.base.dtypes import FLOAT32, DType
from qccl.codecs import Codec, MinMax
from qccl.collectives.allreduce import ALLREDUCE
from qccl.collectives.analysis.verify import VerificationError, verify
from qccl.collectives.chunks import DEFAULT_DEPTH, NETWORK, ChunkPolicy
from qccl.collectives.operands import CallerBuffers, Combine, RankGroup
from qccl.collectives.schedule import Op, Schedule, Span

CODEC = MinMax(bits=4, bucket=8)
Mutation = Callable[[list[Op]], object]


def chunks_of(elements: int | None, depth: int) -> ChunkPolicy:
    return replace(NETWORK if elements is None else ChunkPolicy.of_elements(elements), depth=depth)


def one_rank(
    algorithm: Callable[..., Schedule],
    rank: int,
    size: int,
    count: int | Sequence[int],
    dtype: DType = FLOAT32,
    codec: Codec = CODEC,
    op: str = "sum",
    *,
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
    **options: object,
) -> Schedule:
    """The schedule that an algorithm of all-reduce makes for one rank; ``count`` is a list for several arrays."""
    several = not isinstance(count, int)
    buffers = CallerBuffers.alike(count if several else (count,), dtype, in_place=in_place, numbered=several)
    options.setdefault("chunking", chunks_of(chunk_elements, depth))
    return algorithm(RankGroup.of_all(rank, size), buffers, codec, Combine(op, scale), **options)


def all_ranks(name: str, size: int, count: int | Sequence[int], **options: object) -> list[Schedule]:
    return [one_rank(ALLREDUCE[name], rank, size, count, **options) for rank in range(size)]


def two_round(depth: int = 2, in_place: bool = False) -> list[Schedule]:
    """Three ranks, five chunks of one bucket, the same size everywhere."""
    return all_ranks("two_round", 3, 3 * 5 * 8, chunk_elements=8, depth=depth, in_place=in_place)


def one_shot(size: int = 3) -> list[Schedule]:
    return all_ranks("one_shot", size, 5 * 8, chunk_elements=8, depth=2)


def changed(schedules: list[Schedule], mutate: Mutation, ranks: tuple[int, ...] = (1,)) -> list[Schedule]:
    """The schedules with the operations of some ranks changed in place by ``mutate``."""
    result = list(schedules)
    for rank in ranks:
        ops = list(schedules[rank].ops)
        mutate(ops)
        result[rank] = replace(schedules[rank], ops=tuple(ops))
    return result


def places(ops: list[Op], kind: type) -> list[int]:
    return [i for i, op in enumerate(ops) if isinstance(op, kind)]


def shifted(span: Span, by: int = 1) -> Span:
    return Span(span.buffer, span.start + by, span.stop + by)


def rejected(schedules: list[Schedule], reason: str, **options: object) -> VerificationError:
    with pytest.raises(VerificationError, match=reason) as caught:
        verify(schedules, **options)
    return caught.value
