"""Oracles of the other collectives with state: the results and the state of all ranks, step after step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from laws import shards, starts
from oracle import RngCounter, f32, from_float, to_float
from oracle_feedback import Rank, coded, ranks_without_state, total, with_momentum

from qccl.codecs import get


@dataclass
class Oracle:
    """All ranks of a collective; step() gives each rank's result, and changes the state of those that may."""

    codec: str
    ranks: int
    counts: tuple[int, ...]  # of the parts of a reduce-scatter; otherwise one
    dtype: str
    op: str = "sum"
    call: int = 0
    kept: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = ranks_without_state(self.codec, self.ranks, self.count)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def scale(self) -> np.float32:
        return f32(1 / self.ranks) if self.op == "avg" else f32(1)

    def step(self, inputs: list[np.ndarray], lr: float = 1.0) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            kept = [each.copy() for each in self.kept]
            results = self._step(kept, inputs, f32(lr))
            guards = [self.guard(x, y) for x, y in zip(inputs, results, strict=True)]
        for rank, arrays in enumerate(guards):
            if all(np.isfinite(to_float(values, self.dtype)).all() for values in arrays):
                self.kept[rank] = kept[rank]
        self.call += 1
        return results

    def guard(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """What must be finite for a rank to change its state, of its input and its result."""
        return [y]

    def _step(self, kept: list[Rank], inputs: list[np.ndarray], lr: np.float32) -> list[np.ndarray]:
        raise NotImplementedError

    def values(self, kept: list[Rank], inputs: list[np.ndarray]) -> list[np.ndarray]:
        return [with_momentum(k, to_float(x, self.dtype), self.codec) for k, x in zip(kept, inputs, strict=True)]

    def coded(self, kept: Rank, x: np.ndarray, part: slice, counter: RngCounter, lr: np.float32, **how) -> np.ndarray:
        return coded(kept, x, part, self.codec, self.dtype, counter, lr, **({"rounded": False} | how))


@dataclass
class ReduceScatter(Oracle):
    def guard(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        return [x, y]

    def _step(self, kept, inputs, lr):
        values, results = self.values(kept, inputs), []
        for owner, (first, index) in enumerate(starts(self.counts, get(self.codec).granule)):
            part = slice(first, first + self.counts[owner])
            terms = [
                x[part]
                if rank == owner or part.start == part.stop
                else self.coded(kept[rank], x, part, RngCounter(self.call, 0, rank, index), lr)
                for rank, x in enumerate(values)
            ]
            alone = self.ranks == 1 and kept[0].momentum is None and self.scale == 1
            results.append(inputs[0] if alone else from_float(total(terms) * self.scale, self.dtype))
        return results


@dataclass
class Hierarchical(Oracle):
    node_ids: tuple[int, ...] = ()
    layout: str = "leader"
    algorithm: str = "one_shot"

    @property
    def nodes(self) -> list[list[int]]:
        return [[r for r, node in enumerate(self.node_ids) if node == each] for each in dict.fromkeys(self.node_ids)]

    def _step(self, kept, inputs, lr):
        nodes, values = self.nodes, self.values(kept, inputs)
        if self.ranks == 1:
            return [from_float(values[0] * self.scale, self.dtype) if kept[0].momentum is not None else inputs[0]]
        scale = self.scale if len(nodes) == 1 else f32(1)
        sums = [self._inside(node, values, kept, scale) for node in nodes]
        if len(nodes) == 1:
            return [from_float(sums[0], self.dtype)] * self.ranks
        parts = 1 if self.layout == "leader" else min(map(len, nodes))
        splits = len(nodes) if self.algorithm == "two_round" else 1
        result = np.empty_like(inputs[0])
        for number, shard in enumerate(shards(self.count, parts * splits, math.lcm(get(self.codec).granule, 1024))):
            owners = [node[number // splits] for node in nodes]
            if shard.start < shard.stop:
                own = number % splits if splits > 1 else None
                result[shard] = self._between(kept, owners, own, sums, shard, lr)
        return [result] * self.ranks

    def _inside(self, node: list[int], values: list[np.ndarray], kept: list[Rank], scale: np.float32) -> np.ndarray:
        """The sum of a node, as its ranks store it: others' values and their sum are rounded to the element type."""
        if len(node) == 1:
            return values[node[0]]
        found = np.empty(self.count, f32)
        parts = 1 if self.layout == "leader" else min(map(len, self.nodes))
        splits = len(self.nodes) if self.algorithm == "two_round" else 1
        bounds = shards(self.count, parts * splits, math.lcm(get(self.codec).granule, 1024))
        for number, shard in enumerate(bounds):
            owner = node[number // splits]
            terms = [values[r][shard] if r == owner else self._rounded(values[r][shard]) for r in node]
            found[shard] = self._rounded(total(terms) * scale)
        return found

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return to_float(from_float(values, self.dtype), self.dtype)

    def _between(self, kept, owners, own, sums, shard, lr):
        terms = [
            sums[i][shard]
            if i == own
            else self.coded(kept[owner], sums[i], shard, RngCounter(self.call, 1, owner, shard.start), lr)
            for i, owner in enumerate(owners)
        ]
        x = np.empty(self.count, f32)
        x[shard] = total(terms) * self.scale if self.scale != 1 else total(terms)
        if own is None:
            return from_float(x[shard], self.dtype)
        counter = RngCounter(self.call, 2, owners[own], shard.start)
        return from_float(self.coded(kept[owners[own]], x, shard, counter, lr, rounded=True), self.dtype)


@dataclass
class PeerExchange(Oracle):
    """The result is the decoded code."""

    def guard(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        return [x]

    def _step(self, kept, inputs, lr):
        whole = slice(0, self.count)
        return [
            self.coded(k, x, whole, RngCounter(self.call, 0, rank, 0), lr)
            for rank, (k, x) in enumerate(zip(kept, self.values(kept, inputs), strict=True))
        ]
