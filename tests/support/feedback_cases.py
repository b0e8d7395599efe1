"""Calls with state of reduce-scatter, all-reduce in two levels and peer exchange, compared with their oracles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from cases import NUMPY, hard_data
from codec_table import with_small_buckets
from laws import assert_same_bits, stored
from oracle import f32, from_float, to_float
from oracle_feedback import Rank
from oracle_feedback_collectives import Hierarchical, Oracle, PeerExchange, ReduceScatter

import qccl
from qccl.codecs import get

BOTH = "minmax2:bucket=64+ef+nesterov:mu=0.5"
CODECS = [
    *("minmax2:bucket=64+ef", "minmax3:bucket=8,rounding=stochastic,seed=4+ef", "minmax2:bucket=shard+ef"),
    *(BOTH, "onebit:bucket=32,reconstruct=scale+ef+nesterov", "onebit+nesterov", "none+ef", "none+nesterov:mu=0.25"),
    *("minmax2:bucket=64+ef:beta=0.95", "onebit:bucket=32+ef:dtype=bfloat16"),
    "minmax2:bucket=64+ef:beta=0.5,dtype=bfloat16+nesterov:mu=0.5",
    *(f"{row.spec}+ef" for row in with_small_buckets(256)),
]
LENGTHS = [1, 63, 65, 1000, 9001]
SHAPES = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 1, 2, 2), (0, 1, 2)]


@dataclass(frozen=True)
class Case:
    """Calls of one collective; ``counts`` are the parts of a reduce-scatter, otherwise one number."""

    name: str
    ranks: int
    counts: tuple[int, ...]
    codec: str
    dtype: str = "float32"
    op: str = "sum"
    chunk: int | None = None
    in_place: bool = False
    changing: bool = False
    node_ids: tuple[int, ...] = ()
    layout: str = "leader"
    algorithm: str = "one_shot"

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def lrs(self) -> list[float | None]:
        return [0.1, 0.1, 0.02, 3.0, 0.5] if self.changing else [None] * 5

    def oracle(self) -> Oracle:
        shared = self.codec, self.ranks, self.counts, self.dtype, self.op
        if self.name == "hierarchical_allreduce":
            return Hierarchical(*shared, node_ids=self.node_ids, layout=self.layout, algorithm=self.algorithm)
        return {"reduce_scatter": ReduceScatter, "peer_exchange": PeerExchange}[self.name](*shared)

    def inputs(self, kinds: tuple[str, ...] = ("normal", "outliers", "zeros", "negative", "normal")) -> list:
        return [
            [hard_data(kind, self.count, NUMPY[self.dtype], 100 * step + rank) for rank in range(self.ranks)]
            for step, kind in enumerate(kinds)
        ]

    def call(self, comm: qccl.Communicator, x: Any, lr: float | None, key: str = "a") -> Any:
        """One call; returns this rank's result."""
        how = {"codec": self.codec, "chunk": self.chunk, "key": key, "lr": lr}
        if self.name == "peer_exchange":
            return self._exchange(comm, x, how)
        how |= {"op": self.op}
        if self.name == "hierarchical_allreduce":
            how |= {"node_ids": self.node_ids, "layout": self.layout, "algorithm": self.algorithm}
            out = x if self.in_place else np.empty_like(x)
            return comm.hierarchical_allreduce(x, out, **how)
        mine, first = self.counts[comm.rank], sum(self.counts[: comm.rank])
        if self.in_place:
            comm.quantized_reduce_scatter(x, counts=self.counts, **how)
            return x[first : first + mine]
        return comm.quantized_reduce_scatter(x, np.empty(mine, x.dtype), counts=self.counts, **how)

    def _exchange(self, comm: qccl.Communicator, z: np.ndarray, how: dict) -> np.ndarray:
        """The code of ``z``, decoded; each rank sends to the next one, whose replica gets the same bits."""
        to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        mine, theirs = np.zeros_like(z), np.zeros_like(z)
        comm.peer_exchange(z, send_to=[to], replicas={back: theirs}, applied=mine, **how)
        assert comm.allgather(mine.tobytes())[back] == theirs.tobytes()
        return mine


def cases() -> list[Case]:
    draw, found = random.Random(5), []
    for i, codec in enumerate(CODECS):
        shared = {"dtype": draw.choice([*NUMPY]), "chunk": draw.choice([None, 64, 300]), "changing": i % 3 == 0}
        shared |= {"op": draw.choice(["sum", "avg"]), "in_place": draw.random() < 0.5}
        n, count, node_ids = draw.choice([1, 2, 3, 4]), draw.choice(LENGTHS), SHAPES[i % len(SHAPES)]
        parts = tuple(draw.choice([0, 1, 65, 700, draw.randint(0, 3000)]) for _ in range(n))
        found.append(Case("reduce_scatter", n, parts, codec, **shared))
        levels = {"layout": draw.choice(["leader", "sharded"]), "algorithm": draw.choice(["one_shot", "two_round"])}
        ranks = len(node_ids)
        found.append(Case("hierarchical_allreduce", ranks, (count,), codec, **shared, **levels, node_ids=node_ids))
        plain = shared | {"op": "sum", "in_place": False}
        found.append(Case("peer_exchange", draw.choice([2, 3]), (count,), codec, **plain))
    return found


def three(codec: str, **how: Any) -> list[Case]:
    """The three collectives on four ranks."""
    return [
        Case("reduce_scatter", 4, (300, 0, 65, 700), codec, **how),
        Case("hierarchical_allreduce", 4, (700,), codec, node_ids=(0, 0, 1, 1), **how),
        Case("hierarchical_allreduce", 4, (3700,), codec, node_ids=(0, 0, 1, 1), algorithm="two_round", **how),
        Case("hierarchical_allreduce", 4, (3700,), codec, node_ids=(0, 1, 1, 2), layout="sharded", **how),
        Case("peer_exchange", 4, (700,), codec, **how),
    ]


def kept_by(comm: qccl.Communicator) -> dict:
    return comm.state_dict()["keys"]


def run(case: Case, inputs: list, comm: qccl.Communicator) -> tuple[list, dict]:
    """The results of all steps, and the state at the end."""
    found = [stored(case.call(comm, xs[comm.rank].copy(), lr)).copy() for xs, lr in zip(inputs, case.lrs, strict=True)]
    return found, kept_by(comm)


def assert_state(values: dict, kept: Rank, rank: int) -> None:
    """The state is the oracle's; where the oracle has only zeros, the rank may have none."""
    for kind in ("residual", "momentum"):
        wanted = getattr(kept, kind)
        if kind in values:
            assert_same_bits(values[kind] + f32(0), wanted + f32(0), f"rank {rank}, {kind}")
        else:
            assert wanted is None or not wanted.any(), f"rank {rank} has no {kind}"


def run_all(case: Case) -> list[tuple[list, dict]]:
    """The results of all steps, and the state at the end, of each rank."""
    return qccl.run_ranks(case.ranks, partial(run, case, case.inputs()))


def compare(case: Case, found_by_rank: list[tuple[list, dict]]) -> None:
    """Compare with the oracle."""
    inputs, oracle = case.inputs(), case.oracle()
    wanted = [oracle.step([stored(x) for x in xs], lr or 1.0) for xs, lr in zip(inputs, case.lrs, strict=True)]
    for rank, (results, state) in enumerate(found_by_rank):
        for step, found in enumerate(results):
            y = wanted[step][rank]
            y = from_float(f32(0) + y, case.dtype) if case.name == "peer_exchange" else y
            if get(case.codec).plain.sparse:  # an element that is not sent is not added, not even as 0 to -0
                found, y = (to_float(each, case.dtype) + f32(0) for each in (found, y))
            assert_same_bits(found, y, f"rank {rank}, step {step}")
        assert_state(state["a"]["values"], oracle.kept[rank], rank)
