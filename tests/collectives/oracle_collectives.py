"""An oracle of all collectives, with and without state: parts, rounds and formulas, but no chunks, slots or schedules.

``step()`` of a collective takes the inputs of all ranks, in the storage of their element type (bfloat16 is uint16), and
returns each rank's results. It changes the state of the ranks that may change it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import oracle
from codec_table import oracle_of
from oracle import RngCounter, f32, from_float, to_float

from qccl.base.dtypes import get as dtype_of
from qccl.codecs import get
from qccl.codecs.feedback import feedback_of, momentum_of
from qccl.collectives.hierarchical import intra_of

Term = np.ndarray | oracle.Sparse


def shards(count: int, parts: int, granule: int) -> list[slice]:
    granules = -(-count // granule)
    edges = [min(granules * r // parts * granule, count) for r in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def starts(counts: Sequence[int], granule: int) -> list[tuple[int, int]]:
    """For each part: its first element, and that element's number in random keys (parts have their own buckets)."""
    found, first, index = [], 0, 0
    for count in counts:
        found.append((first, index))
        first, index = first + count, index + -(-count // granule) * granule
    return found


@dataclass
class Kept:
    """The state of one rank: fp32 of the vector's length, or None if the codec has no state of that kind."""

    residual: np.ndarray | None
    momentum: np.ndarray | None

    def copy(self) -> Kept:
        return Kept(*(None if a is None else a.copy() for a in (self.residual, self.momentum)))


def finite(state: np.ndarray) -> np.ndarray:
    """New state as it is stored, with 0 in place of infinity and NaN."""
    return np.where(np.isfinite(state), state, f32(0))


def through(codec: oracle.Codec, values: np.ndarray, dtype: str, counter: RngCounter) -> Term:
    """fp32 values as others decode them; ``none`` rounds them to the element type."""
    if codec is None:
        return to_float(from_float(values, dtype), dtype)
    wire = oracle.encode_any(codec, values, dtype, counter)
    return oracle.wire_floats(codec, wire, values.size, dtype, counter)


def dense(term: Term, count: int) -> np.ndarray:
    return oracle.combine("sum", None, term, count)


@dataclass
class Oracle:
    """All ranks of a collective. ``counts`` are those of its parts or arrays; otherwise it is one number."""

    codec: str
    ranks: int
    counts: tuple[int, ...]
    dtype: str
    op: str = "sum"
    algorithm: str = "one_shot"
    root: int = 0
    call: int = 0
    kept: list[Kept] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = get(self.codec).state_names
        zeros = [np.zeros(sum(self.counts), f32) if kind in names else None for kind in ("residual", "momentum")]
        self.kept = [Kept(*zeros).copy() for _ in range(self.ranks)]
        self.rounds, self.granule = [*map(oracle_of, get(self.codec).plain.rounds)], get(self.codec).granule

    def step(self, inputs: list, lr: float | None = None) -> list[list[np.ndarray]]:
        self.lr, self.new = f32(1 if lr is None else lr), [each.copy() for each in self.kept]
        with np.errstate(all="ignore"):
            results = self.results(inputs)
        for rank, found in enumerate(results):
            guard = self.guard(inputs[rank], found)
            if all(np.isfinite(to_float(values, self.dtype)).all() for values in guard):
                self.kept[rank] = self.new[rank]
        self.call += 1
        return results

    def guard(self, x: np.ndarray, results: list[np.ndarray]) -> list[np.ndarray]:
        """All that must be finite for a rank to change its state."""
        return results

    def results(self, inputs: list) -> list[list[np.ndarray]]:
        raise NotImplementedError

    @property
    def scale(self) -> np.float32:
        return f32(1 / self.ranks) if self.op == "avg" else f32(1)

    def values(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """The ranks' own values: ``m = mu m + x``, then ``x + mu m``, if there is a momentum."""
        found, mu = [], f32(momentum_of(get(self.codec)))
        for kept, x in zip(self.new, (to_float(x, self.dtype) for x in inputs), strict=True):
            if kept.momentum is not None:
                momentum = mu * kept.momentum + x
                kept.momentum, x = finite(momentum), x + mu * momentum
            found.append(x)
        return found

    def coded(
        self, rank: int, x: np.ndarray, part: slice, round_: int = 0, index: int | None = None, second: bool = False
    ) -> Term:
        """A part of the vector, whose values are ``x``, as others decode its code; ``second``: a sum, in its own codec.

        A residual is multiplied by beta and divided by the learning rate when it is added, and rounded to its own type
        when it is stored. With a learning rate of 0, 0 is added, and it stays. That of a sum is of what is decoded
        in the element type. The sum is rounded to the element type before another codec encodes it.
        """
        codec, residual = get(self.codec), self.new[rank].residual
        if second and self.rounds[0] != self.rounds[1]:
            x = to_float(self.store(x), self.dtype)
        beta, kept_as = feedback_of(codec)
        if residual is not None:
            x = x + (residual[part] * (f32(beta) * (f32(1) / self.lr)) if self.lr else f32(0))
        counter = RngCounter(self.call, round_, rank, part.start if index is None else index)
        found = through(self.rounds[second], x, self.dtype, counter)
        if residual is not None and self.lr:
            received = dense(found, x.size)
            if second:
                received = to_float(from_float(received, self.dtype), self.dtype)
            residual[part] = finite(to_float(from_float((x - received) * self.lr, kept_as.name), kept_as.name))
        return found

    def total(self, terms: list[Term], count: int, scale: np.float32 | None = None) -> np.ndarray:
        """The terms combined in rank order, beginning with the first one itself, and scaled."""
        total = None
        for term in terms:
            total = oracle.combine("sum" if self.op == "avg" else self.op, total, term, count)
        scale = self.scale if scale is None else scale
        return total * scale if scale != 1 else total

    def store(self, values: np.ndarray) -> np.ndarray:
        return from_float(values, self.dtype)

    def reduced(self, values: list[np.ndarray], part: slice, owner: int | None, encoded: bool, index=None):
        """A part of all ranks' values, combined by the owner, who has its own as they are (None: everyone's codes)."""
        count = part.stop - part.start
        terms = [
            x[part] if rank == owner or not count else self.coded(rank, x[part], part, 0, index)
            for rank, x in enumerate(values)
        ]
        total = self.total(terms, count)
        if encoded and count:
            total = dense(self.coded(owner, total, part, 1, index, second=True), count)
        return self.store(total)


class AllReduce(Oracle):
    def results(self, inputs):
        values, whole = self.values(inputs), slice(0, self.counts[0])
        if self.ranks == 1:
            alone = self.store(values[0] * self.scale) if self.new[0].momentum is not None else inputs[0]
            return [[alone]]
        if self.algorithm == "one_shot":
            return [[self.reduced(values, whole, None, False)]] * self.ranks
        parts = enumerate(shards(self.counts[0], self.ranks, self.granule))
        return [[np.concatenate([self.reduced(values, part, owner, True) for owner, part in parts])]] * self.ranks


class Coalesced(Oracle):
    """Arrays one after the other, each from a granule on, as one vector of granules."""

    def results(self, inputs):
        if self.ranks == 1:
            return inputs
        granules, found, first, two = [-(-n // self.granule) for n in self.counts], [], 0, self.algorithm == "two_round"
        owners = shards(sum(granules), self.ranks if two else 1, 1)
        for i, count in enumerate(self.counts):
            values, pieces = self.values([xs[i] for xs in inputs]), [inputs[0][i][:0]]
            for owner, shard in enumerate(owners):
                edges = (max(0, min(granules[i], edge - first)) * self.granule for edge in (shard.start, shard.stop))
                part = slice(*(min(edge, count) for edge in edges))
                if part.start < part.stop:
                    index = first * self.granule + part.start
                    pieces.append(self.reduced(values, part, owner if two else None, two, index))
            found.append(np.concatenate(pieces))
            first += granules[i]
        return [found] * self.ranks


class ReduceScatter(Oracle):
    def guard(self, x, results):
        return [x, *results]

    def results(self, inputs):
        values, results = self.values(inputs), []
        for owner, (first, index) in enumerate(starts(self.counts, self.granule)):
            part = slice(first, first + self.counts[owner])
            alone = self.ranks == 1 and self.new[0].momentum is None
            results.append([inputs[0] if alone else self.reduced(values, part, owner, False, index)])
        return results


class AllGather(Oracle):
    def results(self, inputs):
        if self.ranks == 1:
            return [[inputs[0]]]
        found = []
        for rank, (x, (_, index)) in enumerate(zip(inputs, starts(self.counts, self.granule), strict=True)):
            term = self.coded(rank, to_float(x, self.dtype), slice(0, x.size), 0, index, second=True)
            found.append(self.store(dense(term, x.size)))
        return [[np.concatenate(found)]] * self.ranks


class AllToAll(Oracle):
    """``counts`` by sender, and by receiver among those of a sender. The round is the receiver's number."""

    def results(self, inputs):
        n, found = self.ranks, [[] for _ in range(self.ranks)]
        for sender, x in enumerate(inputs):
            edges = np.cumsum([0, *self.counts[n * sender : n * (sender + 1)]])
            for receiver in range(n):
                y = x[edges[receiver] : edges[receiver + 1]]
                if sender != receiver:
                    term = self.coded(sender, to_float(y, self.dtype), slice(0, y.size), receiver)
                    y = self.store(dense(term, y.size))
                found[receiver].append(y)
        return [[np.concatenate(parts)] for parts in found]


class Broadcast(Oracle):
    def results(self, inputs):
        x = inputs[self.root]
        if self.ranks > 1:
            x = self.store(dense(self.coded(self.root, to_float(x, self.dtype), slice(0, x.size)), x.size))
        return [[x]] * self.ranks


class Reduce(Oracle):
    def results(self, inputs):
        values, count = self.values(inputs), self.counts[0]
        if self.algorithm == "one_shot":
            found = self.reduced(values, slice(0, count), self.root, False)
        else:
            parts = enumerate(shards(count, self.ranks, self.granule))
            found = np.concatenate([self.reduced(values, part, owner, owner != self.root) for owner, part in parts])
        return [[found] if rank == self.root else [] for rank in range(self.ranks)]


@dataclass
class Hierarchical(Oracle):
    node_ids: tuple[int, ...] = ()
    layout: str = "leader"
    intra: str = "none"

    def results(self, inputs):
        values, nodes = self.values(inputs), [[*map(int, np.flatnonzero(np.equal(self.node_ids, i)))] for i in
                                              dict.fromkeys(self.node_ids)]  # fmt: skip
        if self.ranks == 1:
            return [[self.store(values[0] * self.scale) if self.new[0].momentum is not None else inputs[0]]]
        parts = 1 if self.layout == "leader" else min(map(len, nodes))
        splits = len(nodes) if self.algorithm == "two_round" else 1
        intra = intra_of(self.intra, dtype_of(self.dtype))
        self.inside, found = oracle_of(intra), [inputs[0][:0]]
        for number, shard in enumerate(shards(self.counts[0], parts * splits, math.lcm(self.granule, intra.granule))):
            owners = [node[number // splits] for node in nodes]
            if shard.start < shard.stop:
                found.append(self.store(self._shard(nodes, values, shard, owners, number % splits, splits > 1)))
        return [[np.concatenate(found)]] * self.ranks

    def _within(self, x: np.ndarray) -> Term:
        return through(self.inside, x, self.dtype, RngCounter())

    def _shard(self, nodes, values, shard, owners, split, splits) -> np.ndarray:
        count, sums = shard.stop - shard.start, []
        scale = self.scale if len(nodes) == 1 else f32(1)
        for node, owner in zip(nodes, owners, strict=True):
            terms = [values[r][shard] if r == owner else self._within(values[r][shard]) for r in node]
            total = self.total(terms, count, scale)
            sums.append(total if len(node) == 1 else to_float(self.store(total), self.dtype))
        [total, *others] = sums
        if others:
            terms = [x if splits and i == split else self.coded(owners[i], x, shard, 1) for i, x in enumerate(sums)]
            total = self.total(terms, count)
            if splits:
                total = dense(self.coded(owners[split], total, shard, 2, second=True), count)
        if any(len(node) > 1 for node in nodes):  # the result goes back through the nodes' codec
            total = dense(self._within(to_float(self.store(total), self.dtype)), count)
        return total


@dataclass
class PeerExchange(Oracle):
    """A rank's decoded code is added to its model, which other ranks have replicas of."""

    model: float = 0.0

    def guard(self, x, results):
        return [x]

    def results(self, inputs):
        whole = slice(0, self.counts[0])
        model = to_float(self.store(np.full(self.counts[0], self.model, f32)), self.dtype)
        terms = [self.coded(rank, x, whole) for rank, x in enumerate(self.values(inputs))]
        return [[self.store(oracle.combine("sum", model, term, model.size))] for term in terms]
