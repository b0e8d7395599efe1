"""The reference of the benchmark: the oracle's bits, stretches that cover the vector, and the codecs' bounds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from bench_rows import measured
from cases import NUMPY, hard_data, stored
from kernel_calls import assert_same_bits
from oracle_collectives import AllReduce
from users_codec import Half

import qccl
from qccl import codecs
from qccl.base import dtypes
from qccl.bench.sweep import data, reference
from qccl.bench.sweep.calls import Case, PlainCall
from qccl.bench.sweep.check import stretches_of
from qccl.bench.sweep.measure import Row
from qccl.codecs.floats import to_float32


def stretches(count: int, size: int, algorithm: str, codec: codecs.Codec, longest: int) -> list[tuple[int, ...]]:
    shards = 1 if algorithm == "one_shot" else size
    call = SimpleNamespace(each=(count,), shards=shards, codecs=(codec,))
    return [*stretches_of(call, longest)]


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("codec", ["minmax8", "minmax8:bucket=8", "minmax8:bucket=shard", "none"])
@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 100_000])
def test_stretches_cover_the_vector_once_in_order(count: int, codec: str, algorithm: str) -> None:
    parsed = codecs.get(codec)
    found = stretches(count, 3, algorithm, parsed, 4096)
    assert [start for _, start, _, _ in found] == [0, *(stop for _, _, stop, _ in found)][: len(found)]
    assert (found[-1][2] if found else 0) == count
    assert all(start % parsed.granule == 0 and start == index for _, start, _, index in found)
    owners = {owner for owner, *_ in found}
    assert owners <= ({0} if algorithm == "one_shot" else {0, 1, 2})
    if not parsed.splittable:
        assert len(found) == len(owners)


def test_the_bound_of_the_plain_all_reduce_holds_for_any_order() -> None:
    dtype, count = dtypes.FLOAT16, 3 * 1024 + 17
    values = [data.gaussian(rank, 0, count, dtype, seed=5) for rank in range(8)]
    call = PlainCall(SimpleNamespace(size=8, transport=SimpleNamespace(name="mpi")), Case(count, dtype, "sum"))
    given = [to_float32(v, dtype) for v in values]
    exact, bound = reference.exact(given, "sum"), call.bound(given)
    rng = np.random.default_rng(0)
    for _ in range(10):
        total = np.zeros(count, np.float16)
        for i in rng.permutation(8):
            total += values[i]
        error = np.abs(total - exact)
        assert (error <= bound).all() and error.max() > 0.05 * bound.max()


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
@pytest.mark.parametrize(
    ("codec", "dtype", "kind", "size"),
    [
        ("minmax8:bucket=256", "float32", "outliers", 4),
        ("minmax4:bucket=64,rounding=stochastic,seed=9", "float16", "normal", 3),
        ("minmax3:bucket=shard,rounding=stochastic", "bfloat16", "negative", 3),
        ("minmax1:bucket=8", "float32", "subnormal", 2),
        ("minmax2:bucket=64", "float32", "zeros", 5),
        ("none", "bfloat16", "normal", 3),
        ("none", "float16", "zeros", 3),
        ("minmax8", "float16", "normal", 1),
    ],
)
def test_the_reference_of_the_benchmark_is_the_oracles(
    codec: str, dtype: str, kind: str, size: int, op: str, algorithm: str
) -> None:
    """In pieces of whole buckets, and in a call that is not the first."""
    parsed, element, call = codecs.get(codec), dtypes.get(dtype), 3
    inputs = [stored(hard_data(kind, 1500, NUMPY[dtype], rank)) for rank in range(size)]
    values = [to_float32(x, element) for x in inputs]
    found = np.concatenate(
        [
            reference.reduced(
                [v[a:b] for v in values],
                *(parsed, element, op, -1 if algorithm == "one_shot" else owner, index, call),
                encoded=algorithm == "two_round",
            )
            for owner, a, b, index in stretches(1500, size, algorithm, parsed, 256)
        ]
    )
    (wanted,) = AllReduce(codec, size, (1500,), dtype, op, algorithm, call=call).step(inputs)[0]
    assert_same_bits(found, wanted, f"{codec}, {op}, {algorithm}")


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("kind", ["allreduce", "hierarchical_allreduce", "reduce", "reduce_scatter", "all_gather"])
def test_values_outside_of_the_codecs_bound_are_wrong(kind: str, op: str) -> None:
    case = Case(600, dtypes.FLOAT32, op, kind, 1 if kind == "reduce" else -1)

    def run(comm: qccl.Communicator) -> list[Row]:
        comm.nodes = (0, 0, 1)
        return [measured(comm, Half(bound=bound), case, parameters={"intra": "none"}) for bound in (1.0, 0.5)]

    for right, wrong in qccl.run_ranks(3, run):
        assert right.out_of_place.wrong == 0
        assert wrong.out_of_place.wrong > 100


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1, 0, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "all_gather"])
def test_right_results_in_two_levels_are_not_wrong(kind: str, nodes: tuple[int, ...]) -> None:
    def run(comm: qccl.Communicator) -> list[Row]:
        comm.nodes = nodes
        return [
            measured(comm, codec, Case(40_000 * len(nodes), dtype, op, kind))
            for codec, dtype, op in [
                ("minmax4:bucket=64,rounding=stochastic,seed=3", dtypes.FLOAT32, "avg"),
                ("topk:k=0.2,block=64+ef+nesterov:mu=0.5", dtypes.BFLOAT16, "sum"),
                ("minmax5:bucket=shard", dtypes.FLOAT16, "sum"),
            ]
            if kind != "all_gather" or "+" not in codec
        ]

    for rows in qccl.run_ranks(len(nodes), run):
        assert all(side.wrong == 0 for row in rows for side in row.sides), rows
        assert 1 in map(nodes.count, nodes) or kind == "allreduce" or any(r.algorithm == "two_levels" for r in rows)
