"""Calls of every collective, drawn at random, and compared with the oracle: results, state, and what must not change.

Cases are drawn by a function that chooses one of several values: Hypothesis', which shrinks what fails, or that of
``random.Random``, with which several processes draw the same ones. The first value is the simplest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import oracle_collectives
from cases import NUMPY, hard_data, stored
from codec_table import with_small_buckets
from kernel_calls import assert_same_bits
from oracle import f32, to_float
from oracle_collectives import Kept, Oracle

import qccl
from qccl.codecs import get

Choose = Callable[[Sequence[Any]], Any]

ORACLES = {
    "allreduce": oracle_collectives.AllReduce,
    "coalesced": oracle_collectives.Coalesced,
    "reduce_scatter": oracle_collectives.ReduceScatter,
    "all_gather": oracle_collectives.AllGather,
    "all_to_all": oracle_collectives.AllToAll,
    "broadcast": oracle_collectives.Broadcast,
    "reduce": oracle_collectives.Reduce,
    "hierarchical_allreduce": oracle_collectives.Hierarchical,
    "peer_exchange": oracle_collectives.PeerExchange,
}
#: the collectives that take codecs with state
STATEFUL = ("allreduce", "reduce_scatter", "hierarchical_allreduce", "peer_exchange")
#: the collectives that take a codec for each round
PAIRS = ("allreduce", "reduce_scatter", "all_gather", "hierarchical_allreduce")
#: the collectives whose arrays may have axes in another order
ANY_ORDER = ("allreduce", "coalesced", "broadcast", "hierarchical_allreduce")
BUCKETED = [row.spec for row in with_small_buckets(264)]
DATA = ("normal", "zeros", "constant", "negative", "outliers", "subnormal", "huge", "nonfinite")
COUNTS = (0, 1, 2, 7, 63, 65, 255, 256, 257, 1000, 2563)
#: codecs inside nodes
INTRA = ("none", "float16", "bfloat16", "minmax8:bucket=256", "minmax3:bucket=shard",
         "onebit:reconstruct=mean,bucket=64", "topk:k=0.2,block=64")  # fmt: skip
BOTH = "minmax2:bucket=64+ef+nesterov:mu=0.5"


@dataclass(frozen=True)
class Case:
    """Calls of one collective, one for each kind of data; ``counts`` are of its parts or arrays, or one number."""

    name: str
    ranks: int
    counts: tuple[int, ...]
    codec: str
    dtype: str = "float32"
    op: str = "sum"
    chunk: int | None = None
    algorithm: str = "one_shot"
    data: tuple[str, ...] = ("normal", "outliers", "zeros", "negative", "normal", "outliers")
    lrs: tuple[float, ...] = ()
    in_place: bool = False
    offset: int = 0
    transposed: bool = False
    root: int = 0
    node_ids: tuple[int, ...] = ()
    layout: str = "leader"
    intra: str = "none"
    graph: tuple[tuple[int, ...], ...] = ()  # by rank, whom it sends to
    model: float = 0.0  # what all elements of all models are before an exchange

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def has_state(self) -> bool:
        return bool(get(self.codec).state_names)

    def oracle(self) -> Oracle:
        levels = {name: getattr(self, name) for name in ("node_ids", "layout", "intra")}
        more = {"hierarchical_allreduce": levels, "peer_exchange": {"model": self.model}}
        shared = self.codec, self.ranks, self.counts, self.dtype, self.op, self.algorithm
        return ORACLES[self.name](*shared, **more.get(self.name, {"root": self.root}))

    def row(self, rank: int) -> tuple[int, ...]:
        """The numbers of elements that a rank sends to each in an all-to-all."""
        return self.counts[self.ranks * rank : self.ranks * (rank + 1)]

    def inputs(self) -> list[list[Any]]:
        """By call and rank: an array, or several of "coalesced"."""
        lengths = {"all_gather": lambda r: self.counts[r], "all_to_all": lambda r: sum(self.row(r))}
        length, found = lengths.get(self.name, lambda _: self.count), []
        for step, kind in enumerate(self.data):
            make = partial(hard_data, kind, dtype=NUMPY[self.dtype])
            if self.name == "coalesced":
                rows = [[make(n, rank=r + 10 * i) for i, n in enumerate(self.counts)] for r in range(self.ranks)]
                found.append(rows)
            else:
                found.append([make(length(r), rank=100 * step + r) for r in range(self.ranks)])
        return found


# -- draws -------------------------------------------------------------------------------------------------------------


def any_codec(choose: Choose, *, state: bool = False, pair: bool = False) -> str:
    """A codec: none, min-max, or one that encodes bucket by bucket; with feedback or momentum if it may have state.

    ``pair``: perhaps one for each round.
    """
    spec = choose(["none", "minmax", "bucketed"])
    if spec == "minmax":
        spec = f"minmax{choose(range(1, 9))}:bucket={choose([8, 64, 256, 4096, 'shard'])}"
        spec += choose(["", ",rounding=stochastic,seed=3"])
    elif spec == "bucketed":
        spec = choose(BUCKETED)
    if pair and choose([False, False, True]):
        spec += f"/{any_codec(choose)}"
    if state and choose([True, False]):
        feedback = choose(["+ef", "+ef:beta=0.95", "+ef:beta=0.5,dtype=bfloat16", ""])
        spec += feedback + choose(["+nesterov:mu=0.5"] if not feedback else ["", "+nesterov:mu=0.5", "+nesterov"])
    return spec


def draw_case(choose: Choose, name: str, ranks: int | None = None) -> Case:
    size = choose([1, 2, 3, 4, 5, 8]) if ranks is None else ranks
    codec = any_codec(choose, state=name in STATEFUL, pair=name in PAIRS)
    state, own = bool(get(codec).state_names), {}
    parts = {"coalesced": choose(range(1, 6)), "all_to_all": size * size}
    parts |= dict.fromkeys(("reduce_scatter", "all_gather"), size)
    counts = tuple(choose([*COUNTS, None]) for _ in range(parts.get(name, 1)))
    counts = tuple(choose(range(1500)) if n is None else n for n in counts)
    if name == "all_to_all":
        counts = tuple(n % 900 for n in counts)
    if name == "hierarchical_allreduce":
        own = {"node_ids": tuple(choose(range(4)) for _ in range(size)), "intra": choose(INTRA)}
        own["layout"] = choose(["leader", "sharded"])
    if name == "peer_exchange":
        others = [[peer for peer in range(size) if peer != rank] for rank in range(size)]
        own["graph"] = tuple(tuple(peer for peer in row if choose([True, False])) for row in others)
        own["model"] = choose([0.0, 0.7, -300.0])
    sparse = any(each.plain.sparse for each in get(codec).rounds) or "topk" in own.get("intra", "")
    steps = 4 if state else 1
    calls = {"data": tuple(choose(DATA) for _ in range(steps))}
    if state and choose([False, True]):
        calls["lrs"] = tuple(choose([0.1, 0.02, 3.0, 0.0]) for _ in range(steps))
    algorithms = ["chain", "binomial"] if name == "broadcast" else ["one_shot", "two_round"]
    return Case(
        *(name, size, counts, codec, choose(list(NUMPY))),
        op="sum"
        if name == "peer_exchange"
        else choose(["sum", "avg"] if sparse or state else ["sum", "avg", "min", "max"]),
        chunk=choose([None, 8, 256, 500, 3000]),
        algorithm=choose(algorithms),
        in_place=choose([False, True]),
        offset=choose([0, 1, 3, 16]),
        transposed=name in ANY_ORDER and choose([False, True]),
        root=choose(range(size)),
        **(calls | own),
    )


def plain_allreduces() -> Iterator[Case]:
    """All-reduces of every codec without state by both algorithms, with each kind of data; the rest is drawn."""
    rounded = [
        f"minmax{bits}:bucket=256,rounding={how},seed=5" for bits in range(1, 9) for how in ("nearest", "stochastic")
    ]
    specs = ["none", "minmax2:bucket=shard", *rounded, *BUCKETED]
    for i, (spec, algorithm, turn) in enumerate(itertools.product(specs, ("two_round", "one_shot"), range(2))):
        choose = random.Random(i).choice
        is_float32 = turn == 0  # what is not finite must stay in its bucket, which only float32 shows
        yield Case(
            *("allreduce", choose([2, 3, 4, 5, 7, 8]), (choose([257, 1000, 2563]),), spec),
            dtype="float32" if is_float32 else choose(list(NUMPY)),
            op=choose(["sum", "avg"] if get(spec).sparse else ["sum", "avg", "min", "max"]),
            chunk=choose([None, 256]),
            algorithm=algorithm,
            data=("nonfinite",) if is_float32 else (choose(DATA),),
            in_place=choose([False, True]),
        )


def long_cases(ranks: int) -> list[Case]:
    """Vectors of many chunks."""
    shared = {"data": ("outliers",), "in_place": True, "algorithm": "two_round"}
    rows = (("minmax8", "float32"), ("minmax4:rounding=stochastic", "bfloat16"), ("minmax3:bucket=64", "float16"))
    return [Case("allreduce", ranks, (1_000_003,), codec, dtype, **shared) for codec, dtype in rows]


def with_state(codec: str, **how: Any) -> list[Case]:
    """The collectives that take a codec with state, on four ranks."""
    return [
        *(Case("allreduce", 4, (700,), codec, algorithm=name, **how) for name in ("two_round", "one_shot")),
        Case("reduce_scatter", 4, (300, 0, 65, 700), codec, **how),
        Case("hierarchical_allreduce", 4, (700,), codec, node_ids=(0, 0, 1, 1), **how),
        Case("hierarchical_allreduce", 4, (3700,), codec, node_ids=(0, 0, 1, 1), algorithm="two_round", **how),
        Case("hierarchical_allreduce", 4, (3700,), codec, node_ids=(0, 1, 1, 2), layout="sharded", **how),
        Case("peer_exchange", 4, (700,), codec, graph=((1,), (2, 3), (3,), (0,)), **how),
    ]


# -- calls -------------------------------------------------------------------------------------------------------------


class Views:
    """Arrays within guarded memory: from any element on, and with axes in another order."""

    def __init__(self, case: Case) -> None:
        self._case, self._all = case, []

    def __call__(self, content: np.ndarray) -> np.ndarray:
        start, size = (8 + self._case.offset) * content.itemsize, content.nbytes
        memory = np.full(size + 32 * content.itemsize, 0xA5, np.uint8)
        self._all.append((memory, slice(start, start + size)))
        view = memory[start : start + size].view(content.dtype)
        view[:] = content
        return view.reshape(-1, 2).T if self._case.transposed and view.size and view.size % 2 == 0 else view

    def empty(self, count: int) -> np.ndarray:
        return self(np.full(count, 7, NUMPY[self._case.dtype]))

    def check(self) -> None:
        for memory, inside in self._all:
            assert (np.delete(memory, inside) == 0xA5).all(), "memory beside an array was written"


def flat(x: np.ndarray) -> np.ndarray:
    return stored(x.T.reshape(-1))


def call(case: Case, comm: qccl.Communicator, given: Any, lr: float | None = None, key: str = "a") -> list[np.ndarray]:
    """One call; the results of this rank. What is no result has not changed."""
    views = Views(case)
    how = {"codec": case.codec, "chunk": case.chunk} | ({"key": key, "lr": lr} if case.has_state else {})
    results = [flat(y).copy() for y in CALLS[case.name](case, comm, given, views, how)]
    views.check()
    return results


def _vectors(method: str, more: tuple[str, ...]) -> Callable[..., Iterator[np.ndarray]]:
    """A call of a vector that is reduced everywhere."""

    def vector(case: Case, comm: qccl.Communicator, given: np.ndarray, views: Views, how: dict) -> Iterator[np.ndarray]:
        x, how = views(given), how | {name: getattr(case, name) for name in more}
        out = x if case.in_place else views.empty(x.size)
        assert getattr(comm, method)(x, *([] if case.in_place else [out]), **how) is out
        assert case.in_place or flat(x).tobytes() == given.tobytes()
        yield out

    return vector


def _coalesced(case: Case, comm: qccl.Communicator, given: list, views: Views, how: dict) -> Iterator[np.ndarray]:
    xs = [views(x) for x in given]
    outs = xs if case.in_place else [views.empty(x.size) for x in xs]
    options = how | {"op": case.op, "algorithm": case.algorithm}
    assert comm.quantized_allreduce_coalesced(xs, None if case.in_place else outs, **options) is outs
    assert case.in_place or all(flat(x).tobytes() == y.tobytes() for x, y in zip(xs, given, strict=True))
    yield from outs


def _reduce_scatter(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    x, first = views(given), sum(case.counts[: comm.rank])
    own = slice(first, first + case.counts[comm.rank])
    out = x[own] if case.in_place else views.empty(case.counts[comm.rank])
    arguments = (x,) if case.in_place and comm.rank % 2 else (x, out)
    found = comm.quantized_reduce_scatter(*arguments, counts=case.counts, op=case.op, **how)
    assert found is arguments[-1]
    kept = slice(0, 0) if not case.in_place else own
    assert np.delete(x, kept).tobytes() == np.delete(given, kept).tobytes()
    yield out


def _all_gather(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    out, first = views.empty(case.count), sum(case.counts[: comm.rank])
    x = out[first : first + given.size] if case.in_place else views(given)
    x[:] = given
    assert comm.quantized_all_gather(x, out, counts=case.counts, **how) is out
    yield out


def _all_to_all(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    received = [case.row(rank)[comm.rank] for rank in range(case.ranks)]
    x, out = views(given), views.empty(sum(received))
    if len({*case.counts}) > 1 or not case.in_place:  # equal parts need no numbers
        how |= {"send_counts": case.row(comm.rank), "recv_counts": received}
    assert comm.quantized_all_to_all(x, out, **how) is out
    assert x.tobytes() == given.tobytes()
    yield out


def _broadcast(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    is_root, how = comm.rank == case.root, how | {"root": case.root, "algorithm": case.algorithm}
    out = views(given) if is_root and case.in_place else views.empty(given.size)
    x = out if case.in_place else views(given) if is_root else None
    assert comm.quantized_broadcast(x, *([] if case.in_place else [out]), **how) is out
    assert case.in_place or x is None or flat(x).tobytes() == given.tobytes()
    yield out


def _reduce(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    x, is_root = views(given), comm.rank == case.root
    out = None if case.in_place else views.empty(given.size)
    options = how | {"root": case.root, "op": case.op, "algorithm": case.algorithm}
    assert comm.quantized_reduce(x, out, **options) is ((x if out is None else out) if is_root else None)
    assert (is_root and out is None) or x.tobytes() == given.tobytes()
    if is_root:
        yield x if out is None else out


def _exchange(case: Case, comm: qccl.Communicator, given: Any, views: Views, how: dict) -> Iterator[np.ndarray]:
    """A model that the decoded code of ``given`` is added to, and replicas of other ranks' models."""
    z, before, to = views(given), np.full_like(given, case.model), case.graph[comm.rank]
    mine, back = views(before), [rank for rank in range(case.ranks) if comm.rank in case.graph[rank]]
    replicas = {rank: views(before) for rank in back}
    assert comm.peer_exchange(z, send_to=to, replicas=replicas, applied=mine, **how) is mine
    models = comm.allgather(mine.tobytes())
    assert all(models[rank] == replica.tobytes() for rank, replica in replicas.items())
    assert z.tobytes() == given.tobytes()
    yield mine


CALLS: dict[str, Callable[..., Iterator[np.ndarray]]] = {
    "allreduce": _vectors("quantized_allreduce", ("op", "algorithm")),
    "hierarchical_allreduce": _vectors("hierarchical_allreduce", ("op", "algorithm", "node_ids", "layout", "intra")),
    "coalesced": _coalesced,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "peer_exchange": _exchange,
}


# -- what is compared --------------------------------------------------------------------------------------------------


def kept_by(comm: qccl.Communicator) -> dict:
    return comm.state_dict()["keys"]


def run(case: Case, inputs: list, comm: qccl.Communicator) -> tuple[list[list[np.ndarray]], dict]:
    """The results of all calls, and the state at the end."""
    lrs = case.lrs or (None,) * len(inputs)
    found = [call(case, comm, xs[comm.rank], lr) for xs, lr in zip(inputs, lrs, strict=True)]
    return found, kept_by(comm)


def run_all(case: Case) -> list[tuple[list[list[np.ndarray]], dict]]:
    """The results of all calls, and the state at the end, of each rank."""
    return qccl.run_ranks(case.ranks, partial(run, case, case.inputs()))


def as_stored(x: Any) -> Any:
    return [stored(each) for each in x] if isinstance(x, list) else stored(x)


def assert_state(values: dict, kept: Kept, rank: int) -> None:
    """The state is the oracle's; where the oracle has only zeros, the rank may have none."""
    for kind in ("residual", "momentum"):
        wanted = getattr(kept, kind)
        if kind in values:
            assert_same_bits(values[kind] + f32(0), wanted + f32(0), f"rank {rank}, {kind}")
        else:
            assert wanted is None or not wanted.any(), f"rank {rank} has no {kind}"


def compare(case: Case, found_by_rank: list[tuple[list[list[np.ndarray]], dict]]) -> None:
    """Compare with the oracle, and a single all-reduce with the exact result."""
    inputs, oracle = [[as_stored(x) for x in xs] for xs in case.inputs()], case.oracle()
    lrs = case.lrs or (None,) * len(inputs)
    wanted = [oracle.step(xs, lr) for xs, lr in zip(inputs, lrs, strict=True)]
    for rank, (results, state) in enumerate(found_by_rank):
        for step, found in enumerate(results):
            for i, (x, y) in enumerate(zip(found, wanted[step][rank], strict=True)):
                assert_same_bits(x, y, f"rank {rank}, call {step}, array {i}")
        if case.has_state:
            assert_state(state["a"]["values"] if "a" in state else {}, oracle.kept[rank], rank)
    if case.name == "allreduce" and not case.has_state:
        check_exact(case, inputs[0], found_by_rank[0][0][0][0])


def check_exact(case: Case, inputs: list[np.ndarray], result: np.ndarray) -> None:
    """Not finite where the exact result is not; and what is not finite spoils its bucket alone."""
    given = np.stack([to_float(x, case.dtype).astype(np.float64) for x in inputs])
    combine = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max}[case.op]
    with np.errstate(invalid="ignore", over="ignore"):
        exact = combine(given, axis=0)
    found = to_float(result, case.dtype)
    assert not np.isfinite(found[~np.isfinite(exact)]).any()
    if case.data == ("nonfinite",) and case.dtype == "float32":
        bucket = case.count if "shard" in case.codec else 1 if case.codec == "none" else get(case.codec).granule
        clean = np.ones(case.count, bool)
        for i in np.flatnonzero(~np.isfinite(given).all(axis=0)):
            clean[i // bucket * bucket : (i // bucket + 1) * bucket] = False
        assert np.isfinite(found[clean]).all(), "the damage left its bucket"
