"""The verifier accepts every collective but all-reduce (test_verify.py): many sizes, counts, roots, in place or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from schedule_cases import changed, places

from qccl.analysis import postconditions as expect
from qccl.analysis.verify import VerificationError, verify
from qccl.codecs import MinMax, NoCodec
from qccl.collectives.all_gather import all_gather
from qccl.collectives.all_to_all import all_to_all
from qccl.collectives.allreduce import coalesced
from qccl.collectives.broadcast import broadcast
from qccl.collectives.hierarchical import hierarchical
from qccl.collectives.reduce import reduce_one_shot, reduce_two_round
from qccl.collectives.reduce_scatter import reduce_scatter
from qccl.dtypes import DTYPES, FLOAT16, FLOAT32
from qccl.schedule import Exchange, Op, Schedule

CODEC = MinMax(bits=4, bucket=8)


def all_ranks(make: Callable[..., Schedule], size: int, *arguments: object, **options: object) -> list[Schedule]:
    return [make(rank, size, *arguments, **options) for rank in range(size)]


def random_options(draw: random.Random) -> dict[str, object]:
    return {"chunk_elements": draw.choice([None, 1, 8, 40]), "depth": draw.randint(1, 5)}


def random_kind(draw: random.Random) -> tuple[object, object]:
    codec = draw.choice([MinMax(draw.randint(1, 8), draw.choice([8, 16, "shard"])), NoCodec()])
    return draw.choice(DTYPES), codec


def counts_of(draw: random.Random, size: int) -> list[int]:
    return [draw.choice([0, 1, 7, 8, 9, draw.randint(0, 200)]) for _ in range(size)]


def verify_one(name: str, draw: random.Random, size: int) -> None:
    dtype, codec = random_kind(draw)
    options, in_place = random_options(draw), draw.random() < 0.5
    op, scale = draw.choice([("sum", 1.0), ("sum", 1 / size), ("min", 1.0), ("max", 1.0)])
    counts, count, root = counts_of(draw, size), draw.choice([0, 1, 8, 9, draw.randint(0, 900)]), draw.randrange(size)
    if name == "reduce_scatter":
        ranks = all_ranks(reduce_scatter, size, counts, dtype, codec, op, scale=scale, in_place=in_place, **options)
        verify(ranks, expect=partial(expect.reduce_scatter, counts=counts, op=op, scale=scale))
    elif name == "all_gather":
        ranks = all_ranks(all_gather, size, counts, dtype, codec, in_place=in_place, **options)
        verify(
            ranks, expect=partial(expect.all_gather, counts=counts), given=partial(expect.given_parts, counts=counts)
        )
    elif name == "all_to_all":
        matrix = [counts_of(draw, size) for _ in range(size)]
        ranks = [
            all_to_all(rank, size, matrix[rank], [row[rank] for row in matrix], dtype, codec, **options)
            for rank in range(size)
        ]
        verify(ranks, expect=partial(expect.all_to_all, counts=matrix))
    elif name == "broadcast":
        tree = draw.choice(["chain", "binomial"])
        ranks = all_ranks(broadcast, size, count, dtype, codec, root=root, tree=tree, in_place=in_place, **options)
        verify(ranks, expect=partial(expect.broadcast, root=root))
    elif name == "reduce":
        make = draw.choice([reduce_one_shot, reduce_two_round])
        ranks = all_ranks(make, size, count, dtype, codec, op, root=root, scale=scale, in_place=in_place, **options)
        verify(ranks, expect=partial(expect.reduce, root=root, op=op, scale=scale))
    else:
        several = counts_of(draw, draw.randint(1, 6))
        algorithm = draw.choice(["two_round", "one_shot"])
        options |= {"algorithm": algorithm, "scale": scale, "in_place": in_place}
        ranks = all_ranks(coalesced, size, several, dtype, codec, op, **options)
        verify(ranks, expect=partial(expect.allreduce, op=op, scale=scale))


NAMES = ["reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "coalesced"]


@pytest.mark.parametrize("name", NAMES)
def test_accepts_random_configurations(name: str) -> None:
    draw = random.Random(name)
    for _ in range(60):
        verify_one(name, draw, draw.randint(1, 9))


@pytest.mark.parametrize("name", NAMES)
def test_accepts_sizes_to_64(name: str) -> None:
    draw = random.Random(64)
    for size in (13, 16, 31, 64):
        verify_one(name, draw, size)


def drop_a_transfer(ops: list[Op]) -> None:
    i = places(ops, Exchange)[0]
    ops[i] = Exchange(ops[i].sends[1:], ops[i].recvs)


def late(ops: list[Op]) -> None:
    """The first transfer comes after everything else."""
    ops.append(ops.pop(places(ops, Exchange)[0]))


def broken() -> Iterator[tuple[list[Schedule], Callable[..., object]]]:
    counts = [8, 16, 9]
    yield all_ranks(reduce_scatter, 3, counts, FLOAT32, CODEC), partial(expect.reduce_scatter, counts=counts)
    yield all_ranks(broadcast, 3, 40, FLOAT32, CODEC, chunk_elements=8), partial(expect.broadcast, root=0)
    yield all_ranks(coalesced, 3, [5, 40], FLOAT16, CODEC), expect.allreduce


@pytest.mark.parametrize("mutate", [drop_a_transfer, late])
def test_rejects_what_is_broken(mutate: Callable[[list[Op]], object]) -> None:
    for schedules, wanted in broken():
        verify(schedules, expect=wanted)
        with pytest.raises(VerificationError):
            verify(changed(schedules, mutate, (0,)), expect=wanted)


def test_rejects_the_wrong_expectation() -> None:
    """What is wanted of one root is not what another one gives."""
    with pytest.raises(VerificationError, match="without the contribution of rank 1"):
        verify(all_ranks(broadcast, 3, 40, FLOAT32, CODEC), expect=partial(expect.broadcast, root=1))


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
    arguments = {
        "intra": intra,
        "nodes": nodes,
        "parts": draw.choice([1, min(map(len, nodes))]),
        "algorithm": draw.choice(["one_shot", "two_round"]),
        "scale": scale,
        "in_place": draw.random() < 0.5,
        **random_options(draw),
    }
    count = draw.choice([0, 1, 8, 9, draw.randint(0, 3000)])
    ranks = all_ranks(hierarchical, size, count, dtype, codec, op, **arguments)
    verify(ranks, expect=partial(expect.allreduce, op=op, scale=scale))


def test_accepts_random_nodes() -> None:
    draw = random.Random(2)
    for _ in range(80):
        verify_two_levels(draw, random_nodes(draw, draw.randint(1, 9)))


@pytest.mark.parametrize("shape", [[1] * 6, [2] * 8, [3] * 5, [1, 2, 3], [8] * 8, [16] * 4, [4, 7, 4]], ids=str)
def test_accepts_node_sizes(shape: list[int]) -> None:
    draw, starts = random.Random(str(shape)), [sum(shape[:i]) for i in range(len(shape))]
    for _ in range(2):
        verify_two_levels(draw, [list(range(s, s + n)) for s, n in zip(starts, shape, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "parts", "chunks"), [("one_shot", 1, 3), ("one_shot", 8, 3), ("two_round", 8, 1)]
)
def test_accepts_256_ranks(algorithm: str, parts: int, chunks: int) -> None:
    """32 nodes of 8 ranks."""
    nodes = [list(range(8 * i, 8 * i + 8)) for i in range(32)]
    count = 1024 * parts * chunks * (32 if algorithm == "two_round" else 1)
    options = {"intra": NoCodec(), "nodes": nodes, "parts": parts, "algorithm": algorithm, "chunk_elements": 1024}
    verify(all_ranks(hierarchical, 256, count, FLOAT32, MinMax(bits=4), **options))
