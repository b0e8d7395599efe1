"""The cases of the all-reduce laws: every pair of parameter values, greedily packed into few calls, and hard data."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from codec_table import with_small_buckets

from qccl.codecs import get

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BUCKET = 256

PARAMETERS = {
    "bits": [1, 2, 3, 4, 5, 6, 7, 8],
    "data": ["normal", "nonfinite", "zeros", "subnormal", "constant", "negative", "huge", "outliers"],
    "length": [0, 1, 2, BUCKET - 1, BUCKET, BUCKET + 1, 10 * BUCKET + 3],
    "ranks": [1, 2, 3, 4, 5, 7, 8],
    "op": ["sum", "avg", "min", "max"],
    "dtype": ["float32", "float16", "bfloat16"],
    "bucket": [str(BUCKET), "shard", "8"],
    "rounding": ["nearest", "stochastic"],
    "in_place": [False, True],
    "algorithm": ["two_round", "one_shot"],
    "chunk": [None, BUCKET],
}


#: codecs that go bucket by bucket; each is paired with every other parameter's value
BUCKETED = [row.spec for row in with_small_buckets(BUCKET + 8)]


def any_codec(draw: random.Random) -> str:
    """A random codec: none, min-max, or one that encodes bucket by bucket."""
    minmax = f"minmax{draw.randint(1, 8)}:bucket={draw.choice([8, 256, 'shard'])}"
    if draw.random() < 0.4:
        minmax += ",rounding=stochastic,seed=3"
    return draw.choice(["none", minmax, draw.choice(BUCKETED)])


@dataclass(frozen=True)
class Case:
    """One all-reduce: its arguments and its data."""

    ranks: int
    length: int
    data: str
    dtype: str
    op: str
    codec: str
    algorithm: str
    chunk: int | None
    in_place: bool

    def __str__(self) -> str:
        place = "in" if self.in_place else "out"
        return (
            f"{self.ranks}x{self.length}-{self.data}-{self.dtype}-{self.op}-{self.codec}-{self.algorithm}-"
            f"{self.chunk}-{place}"
        )

    def input(self, rank: int) -> np.ndarray:
        """The input of ``rank``, in the case's dtype."""
        return hard_data(self.data, self.length, NUMPY[self.dtype], rank)

    def arguments(self) -> dict:
        """The keywords of quantized_allreduce."""
        return {"codec": get(self.codec), "op": self.op, "algorithm": self.algorithm, "chunk": self.chunk}


def _case(values: dict) -> Case:
    codec = f"minmax{values['bits']}:bucket={values['bucket']},rounding={values['rounding']},seed=5"
    names = ("ranks", "length", "data", "dtype", "op", "algorithm", "chunk", "in_place")
    return Case(codec=codec, **{name: values[name] for name in names})


def pairwise(parameters: dict[str, list], seed: int) -> list[dict]:
    """Rows in which every pair of values of two parameters occurs at least once."""
    rng = random.Random(seed)
    names = list(parameters)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in parameters[a] for y in parameters[b]
    }
    order = sorted(missing, key=repr)
    rng.shuffle(order)
    rows = []
    for pair in order:
        if pair not in missing:
            continue
        best: dict = {}
        best_gain: set = set()
        for _ in range(20):
            row = dict(pair) | {n: rng.choice(parameters[n]) for n in names if n not in dict(pair)}
            items = [(n, row[n]) for n in names]
            gain = missing & set(itertools.combinations(items, 2))
            if len(gain) > len(best_gain):
                best, best_gain = row, gain
        rows.append(best)
        missing -= best_gain
    return rows


def law_cases(max_ranks: int = 8) -> list[Case]:
    """All pairs, and cases with other codecs and long vectors."""
    parameters = PARAMETERS | {"ranks": [n for n in PARAMETERS["ranks"] if n <= max_ranks]}
    if max_ranks < 8:
        parameters["ranks"] = list(range(1, max_ranks + 1))
    cases = [_case(row) for row in pairwise(parameters, seed=1)]
    varied = ("data", "length", "ranks", "dtype", "in_place", "algorithm", "chunk")
    rows = pairwise({"codec": BUCKETED, "op": ["sum", "avg"]} | {name: parameters[name] for name in varied}, seed=2)
    cases += [Case(**row) for row in rows]
    for i, (ranks, length, dtype) in enumerate(
        itertools.product(parameters["ranks"], [0, 1, 1000, 5000], ["float32", "float16", "bfloat16"])
    ):
        data = PARAMETERS["data"][i % 8]
        cases.append(Case(ranks, length, data, dtype, "sum", "none", ["two_round", "one_shot"][i % 2], None, i % 3 > 0))
    for ranks, codec, dtype in [
        (2, "minmax8", "float32"),
        (4, "minmax4:rounding=stochastic", "bfloat16"),
        (min(max_ranks, 7), "minmax3:bucket=64", "float16"),
    ]:
        cases.append(Case(ranks, 1_000_003, "outliers", dtype, "sum", codec, "two_round", None, True))
    return cases


def hard_data(kind: str, length: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """``length`` values of one kind of trouble, different on each rank, the same in every process."""
    rng = np.random.default_rng([zlib.crc32(kind.encode()), length, rank])
    x = rng.standard_normal(length).astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    if kind == "nonfinite":  # here and there, so that some buckets stay whole
        spots = rng.integers(0, max(length, 1), size=min(length, 3))
        x[spots] = np.array([np.nan, np.inf, -np.inf], np.float32)[: len(spots)]
    elif kind == "zeros":
        x[:] = 0
        x[::3] = -0.0
    elif kind == "subnormal":
        x *= np.float32(float(ml_dtypes.finfo(dtype).tiny) / 4)
    elif kind == "constant":
        x[:] = -1.7 * (rank + 1)
    elif kind == "negative":
        x = -np.abs(x) - 3
    elif kind == "huge":  # max - min overflows; the sum of some ranks too, which must then not be finite
        x = np.clip(x, -1, 1) * np.float32(min(limit, 1e38) * 0.99)
    elif kind == "outliers":
        x[rng.random(length) < 1e-3] *= 1000
    return x.astype(dtype)
