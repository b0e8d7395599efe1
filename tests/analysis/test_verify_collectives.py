"""The verifier accepts every other collective than all-reduce: many sizes, counts and roots, in place or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import all_ranks as allreduce
from schedule_cases import changed, chunks_of, places

from qccl.analysis import postconditions as expect
from qccl.analysis.verify import VerificationError, verify
from qccl.chunks import ChunkPolicy
from qccl.codecs import MinMax, NoCodec, TwoRounds
from qccl.collectives.all_gather import all_gather
from qccl.collectives.all_to_all import all_to_all
from qccl.collectives.broadcast import broadcast
from qccl.collectives.hierarchical import Levels, hierarchical
from qccl.collectives.operands import CallerBuffers, Combine, Group
from qccl.collectives.reduce import reduce_one_shot, reduce_two_round
from qccl.collectives.reduce_scatter import reduce_scatter
from qccl.dtypes import DTYPES, FLOAT16, FLOAT32, DType
from qccl.schedule import Exchange, Op, Schedule

CODEC = MinMax(bits=4, bucket=8)


Buffers = Callable[[int], CallerBuffers]


def all_ranks(
    make: Callable[..., Schedule], size: int, buffers: Buffers, *arguments: object, **options: object
) -> list[Schedule]:
    return [make(Group.of_all(rank, size), buffers(rank), *arguments, **options) for rank in range(size)]


def alike(count: int, dtype: DType = FLOAT32, in_place: bool = False, root: int | None = None) -> Buffers:
    """Inputs and outputs of ``count`` elements; with ``root``, the output of that rank alone."""
    return lambda rank: CallerBuffers.alike((count,), dtype, in_place=in_place, result=root in (None, rank))


def parts(make: Callable[..., CallerBuffers], counts: Sequence[int], dtype: DType, in_place: bool = False) -> Buffers:
    return lambda rank: make(counts, rank, dtype, in_place=in_place)


def random_options(draw: random.Random) -> dict[str, object]:
    return {"chunking": chunks_of(draw.choice([None, 1, 8, 40]), draw.randint(1, 5))}


def random_kind(draw: random.Random) -> tuple[object, object]:
    codec = MinMax(draw.randint(1, 8), draw.choice([8, 16, "shard"]))
    pair = TwoRounds(codec, draw.choice([NoCodec(), MinMax(draw.randint(1, 8), 24)]))
    return draw.choice(DTYPES), draw.choice([codec, pair, NoCodec()])


def counts_of(draw: random.Random, size: int) -> list[int]:
    return [draw.choice([0, 1, 7, 8, 9, draw.randint(0, 200)]) for _ in range(size)]


def verify_one(name: str, draw: random.Random, size: int) -> None:
    dtype, codec = random_kind(draw)
    options, in_place = random_options(draw), draw.random() < 0.5
    op, scale = draw.choice([("sum", 1.0), ("sum", 1 / size), ("min", 1.0), ("max", 1.0)])
    counts, count, root = counts_of(draw, size), draw.choice([0, 1, 8, 9, draw.randint(0, 900)]), draw.randrange(size)
    if name == "reduce_scatter":
        buffers = parts(CallerBuffers.scattered, counts, dtype, in_place)
        ranks = all_ranks(reduce_scatter, size, buffers, codec, Combine(op, scale), **options)
        verify(ranks, expect=partial(expect.reduce_scatter, counts=counts, op=op, scale=scale))
    elif name == "all_gather":
        ranks = all_ranks(all_gather, size, parts(CallerBuffers.gathered, counts, dtype, in_place), codec, **options)
        verify(
            ranks, expect=partial(expect.all_gather, counts=counts), given=partial(expect.given_parts, counts=counts)
        )
    elif name == "all_to_all":
        matrix = [counts_of(draw, size) for _ in range(size)]
        ranks = [
            all_to_all(Group.of_all(rank, size), matrix[rank], [row[rank] for row in matrix], dtype, codec, **options)
            for rank in range(size)
        ]
        verify(ranks, expect=partial(expect.all_to_all, counts=matrix))
    elif name == "broadcast":
        tree = draw.choice(["chain", "binomial"])
        ranks = all_ranks(broadcast, size, alike(count, dtype, in_place), codec, root=root, tree=tree, **options)
        verify(ranks, expect=partial(expect.broadcast, root=root))
    elif name == "reduce":
        make = draw.choice([reduce_one_shot, reduce_two_round])
        buffers = alike(count, dtype, in_place, root)
        ranks = all_ranks(make, size, buffers, codec, Combine(op, scale), root=root, **options)
        verify(ranks, expect=partial(expect.reduce, root=root, op=op, scale=scale))
    else:
        several = counts_of(draw, draw.randint(1, 6))
        algorithm = draw.choice(["two_round", "one_shot"])
        options |= {"scale": scale, "in_place": in_place}
        ranks = allreduce(algorithm, size, several, dtype=dtype, codec=codec, op=op, **options)
        verify(ranks, expect=partial(expect.allreduce, op=op, scale=scale))


NAMES = ["reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "coalesced"]


@pytest.mark.parametrize("name", NAMES)
@given(st.randoms(use_true_random=False), st.integers(1, 9))
@settings(max_examples=50)
def test_accepts_random_configurations(name: str, draw: random.Random, size: int) -> None:
    verify_one(name, draw, size)


@pytest.mark.parametrize("name", NAMES)
def test_accepts_sizes_to_31(name: str) -> None:
    draw = random.Random(64)
    for size in (13, 16, 31):
        verify_one(name, draw, size)


@pytest.mark.slow
def test_accepts_64_ranks() -> None:
    for name in NAMES:
        verify_one(name, random.Random(64), 64)


def drop_a_transfer(ops: list[Op]) -> None:
    i = places(ops, Exchange)[0]
    ops[i] = Exchange(ops[i].sends[1:], ops[i].recvs)


def late(ops: list[Op]) -> None:
    """The first transfer comes after everything else."""
    ops.append(ops.pop(places(ops, Exchange)[0]))


def broken() -> Iterator[tuple[list[Schedule], Callable[..., object]]]:
    counts = [8, 16, 9]
    scattered = parts(CallerBuffers.scattered, counts, FLOAT32)
    yield all_ranks(reduce_scatter, 3, scattered, CODEC), partial(expect.reduce_scatter, counts=counts)
    yield (
        all_ranks(broadcast, 3, alike(40), CODEC, chunking=ChunkPolicy.of_elements(8)),
        partial(expect.broadcast, root=0),
    )
    yield allreduce("two_round", 3, [5, 40], dtype=FLOAT16), expect.allreduce


@pytest.mark.parametrize("mutate", [drop_a_transfer, late])
def test_rejects_what_is_broken(mutate: Callable[[list[Op]], object]) -> None:
    for schedules, wanted in broken():
        verify(schedules, expect=wanted)
        with pytest.raises(VerificationError):
            verify(changed(schedules, mutate, (0,)), expect=wanted)


def test_rejects_the_wrong_expectation() -> None:
    """The result of one root does not fulfil the postcondition of another."""
    with pytest.raises(VerificationError, match="without the contribution of rank 1"):
        verify(all_ranks(broadcast, 3, alike(40), CODEC), expect=partial(expect.broadcast, root=1))


# -- two levels --------------------------------------------------------------------------------------------------------


def random_nodes(draw: random.Random, size: int) -> list[list[int]]:
    """Ranks dealt to nodes at random, in order inside each."""
    number = draw.randint(1, min(size, 5))
    nodes: list[list[int]] = [[] for _ in range(number)]
    for rank in range(size):
        nodes[rank if rank < number else draw.randrange(number)].append(rank)
    return nodes


def verify_two_levels(draw: random.Random, nodes: list[list[int]]) -> None:
    size = sum(map(len, nodes))
    dtype, codec = random_kind(draw)
    intra = draw.choice([NoCodec(), NoCodec(), MinMax(8, 16)])
    op, scale = draw.choice([("sum", 1.0), ("sum", 1 / size), ("min", 1.0), ("max", 1.0)])
    levels = Levels(nodes, draw.choice([1, min(map(len, nodes))]), draw.choice(["one_shot", "two_round"]), intra)
    buffers = alike(draw.choice([0, 1, 8, 9, draw.randint(0, 3000)]), dtype, draw.random() < 0.5)
    options = random_options(draw)
    ranks = all_ranks(hierarchical, size, buffers, codec, Combine(op, scale), levels=levels, **options)
    verify(ranks, expect=partial(expect.allreduce, op=op, scale=scale))


@given(st.randoms(use_true_random=False), st.integers(1, 9))
@settings(max_examples=80)
def test_accepts_random_nodes(draw: random.Random, size: int) -> None:
    verify_two_levels(draw, random_nodes(draw, size))


@pytest.mark.parametrize("shape", [[1] * 6, [2] * 8, [3] * 5, [1, 2, 3], [8] * 8, [16] * 4, [4, 7, 4]], ids=str)
def test_accepts_node_sizes(shape: list[int]) -> None:
    draw, starts = random.Random(str(shape)), [sum(shape[:i]) for i in range(len(shape))]
    for _ in range(2):
        verify_two_levels(draw, [list(range(s, s + n)) for s, n in zip(starts, shape, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "parts", "chunks"), [("one_shot", 1, 3), ("one_shot", 8, 3), ("two_round", 8, 1)]
)
def test_accepts_256_ranks(algorithm: str, parts: int, chunks: int, no_collector: None) -> None:
    """32 nodes of 8 ranks."""
    nodes = [list(range(8 * i, 8 * i + 8)) for i in range(32)]
    count = 1024 * parts * chunks * (32 if algorithm == "two_round" else 1)
    options = {"levels": Levels(nodes, parts, algorithm, NoCodec()), "chunking": ChunkPolicy.of_elements(1024)}
    verify(all_ranks(hierarchical, 256, alike(count), MinMax(bits=4), **options))
