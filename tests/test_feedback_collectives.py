"""Error feedback and momentum in reduce-scatter, all-reduce in two levels and peer exchange."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import NUMPY, hard_data
from codec_table import with_small_buckets
from cuda_ranks import ranks as gpu_ranks
from fake_cuda import World, array, installed
from fake_kernels import work
from oracle import RngCounter, f32, from_float, to_float
from oracle_feedback import Rank, coded, ranks_without_state, total, with_momentum
from schedule_cases import changed, places, rejected
from test_allreduce import assert_same_bits, shards, stored
from test_collectives import starts

import qccl
from qccl.analysis import postconditions as expect
from qccl.analysis.verify import verify
from qccl.codecs import get
from qccl.collectives import HierarchicalSpec, PeerExchangeSpec, ReduceScatterSpec
from qccl.collectives import rounds as rounds_module
from qccl.collectives.feedback import sums_of, with_feedback
from qccl.errors import ArgumentError
from qccl.schedule import Encode, Op, Reduce, Role, Schedule

BOTH = "minmax2:bucket=64+ef+nesterov:mu=0.5"
CODECS = [
    *("minmax2:bucket=64+ef", "minmax3:bucket=8,rounding=stochastic,seed=4+ef", "minmax2:bucket=shard+ef"),
    *(BOTH, "onebit:bucket=32,reconstruct=scale+ef+nesterov", "onebit+nesterov", "none+ef", "none+nesterov:mu=0.25"),
    *(f"{row.spec}+ef" for row in with_small_buckets(256)),
]
LENGTHS = [1, 63, 65, 1000, 9001]
SHAPES = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 1, 2, 2), (0, 1, 2)]


# -- oracles: the results and the state of all ranks, step after step --------------------------------------------------


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


# -- calls -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("case", cases(), ids=str)
def test_results_and_state_are_the_oracles(case: Case) -> None:
    compare(case, run_all(case))


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


@pytest.mark.parametrize("case", three(BOTH), ids=str)
@pytest.mark.parametrize("spoil", [np.nan, -np.inf])
def test_a_step_that_is_not_finite_leaves_the_state_of_those_that_see_it(case: Case, spoil: float) -> None:
    """In an all-reduce these are all ranks; otherwise the rank itself, and those whose result it spoils."""
    inputs, oracle = case.inputs(("normal",) * 5), case.oracle()
    inputs[2][1][3] = spoil

    def states(comm: qccl.Communicator) -> list[dict]:
        found = []
        for xs in inputs:
            case.call(comm, xs[comm.rank].copy(), None)
            found.append(kept_by(comm)["a"]["values"])
        return found

    wanted = []
    for xs in inputs:
        oracle.step(xs)
        wanted.append(list(oracle.kept))
    everyone = case.name == "hierarchical_allreduce"
    for rank, found in enumerate(qccl.run_ranks(4, states)):
        for step, values in enumerate(found):
            assert_state(values, wanted[step][rank], rank)
            assert all(np.isfinite(each).all() for each in values.values())
        sees = everyone or rank == 1 or (case.name == "reduce_scatter" and rank == 0)
        for kind, values in found[1].items():
            assert (values.tobytes() == found[2][kind].tobytes()) == sees


@pytest.mark.parametrize("case", three(BOTH) + three("randomk:k=0.1,block=32+nesterov:mu=0.5"), ids=str)
def test_a_momentum_that_overflows_does_not_spoil_later_calls(case: Case) -> None:
    """Rank 1 sends what overflows, and need not see it in its own result."""
    inputs, oracle = case.inputs(("normal",) * 5), case.oracle()
    for step in range(2):
        inputs[step][1][::7] = 3e38
    for xs in inputs:
        oracle.step(xs)
    for rank, (results, state) in enumerate(qccl.run_ranks(4, partial(run, case, inputs))):
        assert_state(state["a"]["values"], oracle.kept[rank], rank)
        assert all(np.isfinite(each).all() for each in (results[-1], *state["a"]["values"].values()))


@pytest.mark.parametrize("case", three("onebit:bucket=64,reconstruct=mean+ef"), ids=str)
def test_chunks_and_engines_do_not_matter(case: Case) -> None:
    inputs = case.inputs()
    wanted = qccl.run_ranks(4, partial(run, case, inputs))
    assert_same_runs(qccl.run_ranks(4, partial(run, replace(case, chunk=64), inputs)), wanted)
    if case.name == "peer_exchange":
        return  # its fake arrays need no test of their own: test_peer_exchange_on_the_device

    def on_device(comm: qccl.Communicator) -> tuple[list, dict]:
        found = []
        for xs in inputs:
            x = array(xs[comm.rank], comm.rank)
            how = {"codec": case.codec, "key": "a", "chunk": 640}
            if case.name == "reduce_scatter":
                y = array(np.zeros(case.counts[comm.rank], np.float32), comm.rank)
                comm.quantized_reduce_scatter(x, y, counts=case.counts, **how)
            else:
                y = x
                levels = {"node_ids": case.node_ids, "layout": case.layout, "algorithm": case.algorithm}
                comm.hierarchical_allreduce(x, **how, **levels)
            comm.check()
            found.append(y.get())
        return found, kept_by(comm)

    with installed(World(), work):
        assert_same_runs(gpu_ranks(4, on_device), wanted)


def assert_same_runs(found: list, wanted: list) -> None:
    for (results, state), (expected, state_expected) in zip(found, wanted, strict=True):
        assert [y.tobytes() for y in results] == [y.tobytes() for y in expected]
        values, values_expected = (each["a"]["values"] for each in (state, state_expected))
        assert {k: v.tobytes() for k, v in values.items()} == {k: v.tobytes() for k, v in values_expected.items()}


def test_peer_exchange_on_the_device() -> None:
    """With momentum, which overflows once; other tests of the device have it in all-reduces."""

    def steps(comm: qccl.Communicator, make: Callable[[np.ndarray], Any], take: Callable[[Any], np.ndarray]) -> tuple:
        found = []
        for step in range(4):
            values = np.random.default_rng([step, comm.rank]).standard_normal(700).astype(np.float32)
            if step < 2:
                values[:3] = 3e38
            z = make(values)
            model, replica = make(np.zeros(700, np.float32)), make(np.zeros(700, np.float32))
            other = 1 - comm.rank
            comm.peer_exchange(z, send_to=[other], replicas={other: replica}, applied=model, codec=BOTH, key="a")
            comm.check()
            found += [take(model), take(replica)]
        return found, kept_by(comm)

    wanted = qccl.run_ranks(2, lambda comm: steps(comm, np.array, np.array))
    with installed(World(), work):
        found = gpu_ranks(2, lambda comm: steps(comm, lambda x: array(x, comm.rank), lambda x: x.get()))
    assert_same_runs(found, wanted)


@pytest.mark.parametrize("case", three(BOTH), ids=str)
def test_state_goes_on_after_it_was_saved_and_loaded(case: Case) -> None:
    inputs = case.inputs()

    def first(comm: qccl.Communicator) -> tuple:
        for xs in inputs[:2]:
            case.call(comm, xs[comm.rank].copy(), None)
        saved = comm.state_dict()
        rest = [case.call(comm, xs[comm.rank].copy(), None).tobytes() for xs in inputs[2:]]
        comm.reset("a")
        again = [case.call(comm, xs[comm.rank].copy(), None).tobytes() for xs in inputs[2:]]
        assert again != rest or not rest[0]
        return saved, rest

    def second(comm: qccl.Communicator) -> list[bytes]:
        comm.load_state_dict(saved[comm.rank][0])
        return [case.call(comm, xs[comm.rank].copy(), None).tobytes() for xs in inputs[2:]]

    saved = qccl.run_ranks(4, first)
    for found, (_, rest) in zip(qccl.run_ranks(4, second), saved, strict=True):
        assert found == rest


def test_plans_and_pointers_take_keys() -> None:
    xs = [np.random.default_rng(rank).standard_normal(1000).astype(np.float32) for rank in range(2)]
    between = {"node_ids": [0, 1], "algorithm": "one_shot"}

    def call(comm: qccl.Communicator) -> None:
        x, out, part = xs[comm.rank], np.empty(1000, np.float32), np.empty(500, np.float32)
        for name, y, how in (("reduce_scatter", part, {}), ("hierarchical_allreduce", out, between)):
            method = comm.quantized_reduce_scatter if name == "reduce_scatter" else comm.hierarchical_allreduce
            wanted = [method(x, y, codec=BOTH, key=name, lr=lr, **how).tobytes() for lr in (0.5, 0.25)]
            plan = comm.plan(name, 1000, codec=BOTH, key=f"plan of {name}", **how)
            assert [plan(x, y, lr=lr).tobytes() for lr in (0.5, 0.25)] == wanted
        other, pointers = 1 - comm.rank, (x.ctypes.data, out.ctypes.data)
        for lr in (0.5, 0.25):
            qccl.hierarchical_allreduce(
                *pointers, 1000, "float32", "sum", comm, codec=BOTH, key="p", lr=lr, node_ids=[0, 1]
            )
        assert out.tobytes() == wanted[1]
        model, replica, model2, replica2 = (np.zeros(1000, np.float32) for _ in range(4))
        for _ in range(2):
            comm.peer_exchange(x, send_to=[other], replicas={other: replica}, applied=model, codec=BOTH, key="q")
            addresses = {"replicas": {other: replica2.ctypes.data}, "applied": model2.ctypes.data}
            qccl.peer_exchange(x.ctypes.data, 1000, "float32", comm, send_to=[other], codec=BOTH, key="r", **addresses)
        assert model.tobytes() == model2.tobytes() and replica.tobytes() == replica2.tobytes()

    qccl.run_ranks(2, call)


def test_a_key_belongs_to_one_call() -> None:
    def call(comm: qccl.Communicator) -> None:
        x, other = np.ones(4096, np.float32), 1 - comm.rank
        replicas, given = {other: np.zeros(4096, np.float32)}, {"codec": "minmax2+ef", "key": "a"}
        levels = {"node_ids": [0, 1], "algorithm": "two_round"}

        def refused(method: Callable, *arguments: Any, match: str, **how: Any) -> None:
            with pytest.raises(ArgumentError, match=match):
                method(*arguments, **given, **how)

        comm.quantized_reduce_scatter(x.copy(), **given)
        refused(comm.quantized_reduce_scatter, x.copy(), counts=[4000, 96], match=r"parts=None.*parts=\(4000, 96\)")
        refused(comm.quantized_allreduce, x.copy(), match="belongs to reduce_scatter.*this is allreduce")
        comm.reset("a")
        comm.hierarchical_allreduce(x.copy(), **levels, **given)
        refused(comm.hierarchical_allreduce, x.copy(), node_ids=[0, 1], match="algorithm=two_round.*algorithm=one_shot")
        comm.reset("a")
        comm.peer_exchange(x, send_to=[other], replicas=replicas, **given)
        refused(comm.peer_exchange, x, send_to=[], replicas={}, match=r"to \[[01]\].*to \[\], applied=False")
        comm.barrier()

    qccl.run_ranks(2, call)


def test_what_these_calls_refuse() -> None:
    def call(comm: qccl.Communicator) -> None:
        x = np.ones(100, np.float32)
        with pytest.raises(ArgumentError, match="needs a name for the array: pass key="):
            comm.quantized_reduce_scatter(x, codec="onebit+ef")
        for method in (comm.quantized_reduce_scatter, comm.hierarchical_allreduce):
            with pytest.raises(ArgumentError, match=r"with op max does not; use onebit, or a collective with state"):
                method(x, codec="onebit+ef", key="a", op="max")

    for ranks in (1, 2):
        qccl.run_ranks(ranks, call)


# -- the purpose: nothing is lost --------------------------------------------------------------------------------------

STEPS = 60


def undelivered(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """After STEPS calls with one input: what the sum of all results lacks, and what all residuals hold."""
    inputs = case.inputs(("normal",))[0]

    def calls(comm: qccl.Communicator) -> tuple[np.ndarray, np.ndarray]:
        received, sent = 0.0, np.zeros(case.count)
        for _ in range(STEPS):
            received = received + case.call(comm, inputs[comm.rank].copy(), None).astype(np.float64)
        values = kept_by(comm)["a"]["values"]
        return received, values["residual"].astype(np.float64) if "residual" in values else sent

    found = qccl.run_ranks(case.ranks, calls)
    results, held = [y for y, _ in found], [e for _, e in found]
    if case.name == "peer_exchange":
        return np.stack([STEPS * x - y for x, y in zip(inputs, results, strict=True)]), np.stack(held)
    whole = np.concatenate(results) if case.name == "reduce_scatter" else results[0]
    return STEPS * sum(x.astype(np.float64) for x in inputs) - whole, sum(held)


@pytest.mark.parametrize("case", three("minmax2:bucket=64+ef") + three("topk:k=0.1,block=128+ef"), ids=str)
def test_results_lack_exactly_what_the_residuals_hold(case: Case) -> None:
    """So the running mean becomes exact: what is missing does not grow with the number of calls."""
    lack, held = undelivered(case)
    assert np.abs(lack - held).max() < STEPS * 5 * 40 * 2.0**-24
    assert 0.1 < np.abs(held).max() < 60


def without_residuals(monkeypatch: pytest.MonkeyPatch, of_sums: bool) -> None:
    """Schedules without residuals of sums, or of own values."""

    def strip(op: Op) -> Op:
        if isinstance(op, Reduce) and op.state and op.state.residual and bool(op.srcs) == of_sums:
            return replace(op, state=replace(op.state, residual=None))
        return op

    def stripped(schedule: Schedule, guard: Any) -> Schedule:
        made = with_feedback(schedule, guard)
        return replace(made, ops=tuple(map(strip, made.ops)))

    monkeypatch.setattr(rounds_module, "with_feedback", stripped)


@pytest.mark.parametrize(
    "case, of_sums",
    [
        (case, of_sums)
        for case in three("minmax2:bucket=64+ef")
        for of_sums in ((False, True) if case.algorithm == "two_round" else (False,))
    ],
    ids=str,
)
def test_they_lack_more_without_residuals(case: Case, of_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_residuals(monkeypatch, of_sums)
    lack, _ = undelivered(case)
    assert np.abs(lack).max() > 10


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedules(case: Case) -> list[Schedule]:
    shared = case.count, case.dtype, case.codec, case.chunk
    if case.name == "reduce_scatter":
        specs = [ReduceScatterSpec.from_arguments(*shared, op=case.op, counts=case.counts)] * case.ranks
    elif case.name == "hierarchical_allreduce":
        levels = {"layout": case.layout, "node_ids": case.node_ids, "algorithm": case.algorithm}
        specs = [HierarchicalSpec.from_arguments(*shared, op=case.op, **levels)] * case.ranks
    else:
        specs = [
            PeerExchangeSpec.from_arguments(
                *shared, send_to=[(r + 1) % case.ranks], receive_from=[(r - 1) % case.ranks], applied=True
            )
            for r in range(case.ranks)
        ]
    return [spec.schedule(rank, case.ranks, in_place=case.in_place) for rank, spec in enumerate(specs)]


def check(case: Case, made: list[Schedule] | None = None) -> None:
    scale = 1 / case.ranks if case.op == "avg" else 1.0
    made = schedules(case) if made is None else made
    if case.name == "reduce_scatter":
        verify(made, expect=partial(expect.reduce_scatter, counts=case.counts, scale=scale))
    elif case.name == "hierarchical_allreduce":
        verify(made, expect=partial(expect.allreduce, scale=scale))
    else:
        back = [[(rank - 1) % case.ranks] for rank in range(case.ranks)]
        verify(made, expect=partial(expect.exchanged, receive_from=back), given=expect.given_replicas)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_verified(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", three(BOTH), ids=str)
def test_every_value_that_is_encoded_has_its_residual_and_own_values_their_momentum(case: Case) -> None:
    for rank, schedule in enumerate(schedules(case)):
        seen = {"residual": np.zeros(case.count, int), "momentum": np.zeros(case.count, int)}
        for op in schedule.ops:
            for kind, marks in seen.items():
                each = getattr(op.state, kind) if isinstance(op, Reduce) and op.state else None
                if each is not None:
                    marks[each.old.start : each.old.stop] += 1
        assert (seen["momentum"] == 1).all()
        not_own = np.zeros(case.count, int)
        for name, start, stop in sums_of(schedule):
            assert name == "residual"
            not_own[start:stop] = 1
        senders = np.zeros(case.count, int)
        for op in schedule.ops:
            if isinstance(op, Reduce) and not op.srcs and op.state and op.state.residual:
                senders[op.state.residual.old.start : op.state.residual.old.stop] = 1
        assert (not_own == 1 - senders).all() or "residual" not in schedule.buffers
        if case.name == "reduce_scatter":
            first = sum(case.counts[:rank])
            assert (seen["residual"] == 1 - not_own).all()
            assert not_own.sum() == not_own[first : first + case.counts[rank]].sum() == case.counts[rank]
        elif case.name == "peer_exchange":
            assert (seen["residual"] == 1).all() and not not_own.any()


def without_state(kind: str) -> Callable[[list[Op]], None]:
    def mutate(ops: list[Op]) -> None:
        place = next(i for i in places(ops, Reduce) if ops[i].state and getattr(ops[i].state, kind))
        ops[place] = replace(ops[place], state=replace(ops[place].state, **{kind: None}))

    return mutate


@pytest.mark.parametrize("case", three(BOTH), ids=str)
@pytest.mark.parametrize("kind", ["residual", "momentum"])
def test_the_verifier_finds_an_operation_without_its_state(case: Case, kind: str) -> None:
    made = changed(schedules(case), without_state(kind), (0,))
    with pytest.raises(qccl.QcclError, match=rf"{kind}.next.* was never written"):
        check(case, made)


def test_the_verifier_finds_state_that_is_not_kept() -> None:
    case = Case("reduce_scatter", 2, (64, 64), "minmax4:bucket=8+ef")
    rejected(
        changed(schedules(case), lambda ops: ops.pop()),
        "residual.* ends as",
        expect=partial(expect.reduce_scatter, counts=case.counts),
    )


def test_no_operation_keeps_a_stateful_codec() -> None:
    for case in itertools.chain(three(BOTH), three("onebit+ef"), three("onebit+nesterov")):
        for schedule in schedules(case):
            assert not any(getattr(op, "codec", get("none")).state_names for op in schedule.ops)


def test_ranks_that_encode_nothing_have_no_state() -> None:
    case = Case("hierarchical_allreduce", 4, (700,), "onebit+ef", node_ids=(0, 0, 1, 1))
    roles = [{b.role for b in schedule.buffers.values()} for schedule in schedules(case)]
    assert [Role.STATE in each for each in roles] == [True, False, True, False]
    one_node = replace(case, node_ids=(0, 0, 0, 0))
    assert not any(Role.STATE in {b.role for b in s.buffers.values()} for s in schedules(one_node))
    assert all(isinstance(op, Encode) or not getattr(op, "state", None) for s in schedules(one_node) for op in s.ops)
