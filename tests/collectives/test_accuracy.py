"""The derived bounds of an all-reduce: never exceeded, and not much larger than what happens."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case
from laws import assert_same_bits, expected, stored

import qccl
from qccl import codecs, dtypes
from qccl.bench import accuracy, data, reference
from qccl.codecs.floats import from_float32, to_float32

COUNT = 3 * 1024 + 17


def inputs(size: int, dtype: dtypes.DType, scale: float = 1.0) -> list[np.ndarray]:
    values = [to_float32(data.gaussian(r, 0, COUNT, dtype, seed=5), dtype) * np.float32(scale) for r in range(size)]
    return [to_float32(from_float32(v, dtype), dtype) for v in values]


def shards(size: int, algorithm: str) -> int:
    return 1 if algorithm == "one_shot" else size


def results(values: list[np.ndarray], codec: str, dtype: dtypes.DType, op: str, algorithm: str) -> np.ndarray:
    def call(comm: qccl.Communicator) -> np.ndarray:
        x = from_float32(values[comm.rank], dtype)
        comm.quantized_allreduce(x, codec=codec, op=op, algorithm=algorithm, dtype=dtype)
        return to_float32(x, dtype)

    return qccl.run_ranks(len(values), call)[0]


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
@pytest.mark.parametrize(
    ("codec", "dtype", "size", "tight"),
    [
        ("minmax8", "float32", 3, 0.3),
        ("minmax4:rounding=stochastic", "float32", 4, 0.2),
        ("minmax1:bucket=8", "float32", 2, 0.3),
        ("minmax5:bucket=shard", "float32", 3, 0.2),
        ("minmax8", "float16", 2, 0.3),
        ("minmax3:bucket=256", "bfloat16", 3, 0.3),
        ("none", "bfloat16", 3, 0.3),
        ("minmax8", "float32", 1, 0.0),
    ],
)
def test_errors_stay_within_the_bound_and_come_near_it(
    codec: str, dtype: str, size: int, tight: float, op: str, algorithm: str
) -> None:
    element, parsed = dtypes.get(dtype), codecs.get(codec)
    values = inputs(size, element)
    got = results(values, codec, element, op, algorithm)
    share = 0.0
    for owner, start, stop in accuracy.stretches(COUNT, shards(size, algorithm), [parsed], 2048):
        part = [v[start:stop] for v in values]
        error = np.abs(got[start:stop] - accuracy.allreduce_exact(part, op))
        bound = accuracy.allreduce_bound(part, parsed, element, op, algorithm, owner)
        assert (error <= bound).all()
        share = max(share, float((error / np.maximum(bound, 1e-300)).max()))
    if op == "sum":
        assert share >= tight


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_bounds_hold_for_tiny_and_huge_values(scale: float, op: str) -> None:
    codec = codecs.get("minmax6:bucket=64")
    values = inputs(3, dtypes.FLOAT32, scale)
    got = results(values, codec.spec(), dtypes.FLOAT32, op, "two_round")
    for owner, start, stop in accuracy.stretches(COUNT, 3, [codec], COUNT):
        part = [v[start:stop] for v in values]
        error = np.abs(got[start:stop] - accuracy.allreduce_exact(part, op))
        assert (error <= accuracy.allreduce_bound(part, codec, dtypes.FLOAT32, op, "two_round", owner)).all()


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("codec", ["minmax8", "minmax8:bucket=8", "minmax8:bucket=shard", "none"])
@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 100_000])
def test_stretches_cover_the_vector_once_in_order(count: int, codec: str, algorithm: str) -> None:
    parsed = codecs.get(codec)
    found = list(accuracy.stretches(count, shards(3, algorithm), [parsed], 4096))
    assert [start for _, start, _ in found] == [0, *(stop for _, _, stop in found)][: len(found)]
    assert (found[-1][2] if found else 0) == count
    assert all(start % parsed.granule == 0 for _, start, _ in found)
    owners = {owner for owner, _, _ in found}
    assert owners <= ({0} if algorithm == "one_shot" else {0, 1, 2})
    if not parsed.splittable:
        assert len(found) == len(owners)


def test_plain_bound_holds_for_any_order() -> None:
    values = [v.astype(np.float16) for v in inputs(8, dtypes.FLOAT16)]
    exact = accuracy.allreduce_exact([v.astype(np.float32) for v in values], "sum")
    bound = accuracy.plain_bound([v.astype(np.float32) for v in values], dtypes.FLOAT16, "sum")
    rng = np.random.default_rng(0)
    for _ in range(10):
        total = np.zeros(COUNT, np.float16)
        for i in rng.permutation(8):
            total += values[i]
        assert (np.abs(total - exact) <= bound).all()


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
    case = Case(size, 1500, kind, dtype, op, codec, algorithm, None, False)
    parsed, element, call = codecs.get(codec), dtypes.get(dtype), 3
    values = [to_float32(stored(case.input(r)), element) for r in range(size)]
    found = np.concatenate(
        [
            reference.allreduce([v[a:b] for v in values], parsed, element, op, algorithm, owner, a, call)
            for owner, a, b in accuracy.stretches(1500, shards(size, algorithm), [parsed], 256)
        ]
    )
    assert_same_bits(found, expected(case, call), str(case))
