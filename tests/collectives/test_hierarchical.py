"""All-reduce in two levels on given nodes: its result bit for bit, and its bytes between nodes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracle
import pytest
from cases import NUMPY, any_codec, hard_data
from codec_table import oracle_of
from laws import assert_same_bits, oracle_codec, shards, stored
from sent_bytes import sent_by_each

import qccl
from qccl.codecs import get
from qccl.collectives.hierarchical import intra_of
from qccl.dtypes import FLOAT32
from qccl.dtypes import get as dtype_of

SHAPES = [
    [0],
    [0, 0],
    [0, 1],
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [5, 5, 5, 2, 2],
    [0, 1, 1, 2, 2, 2],
    [0, 0, 1, 1, 2, 2, 3, 3],
]
#: codecs inside nodes, which take turns
INTRA = (
    *("none", "minmax8:bucket=256", "float16", "none", "onebit:reconstruct=mean,bucket=64", "minmax3:bucket=shard"),
    "topk:k=0.2,block=64",
)


@dataclass(frozen=True)
class Case:
    """One call on ranks of given nodes."""

    node_ids: tuple[int, ...]
    count: int
    dtype: str
    codec: str
    intra: str
    op: str
    layout: str
    algorithm: str
    chunk: int | None
    in_place: bool
    data: str

    def input(self, rank: int) -> np.ndarray:
        return hard_data(self.data, self.count, NUMPY[self.dtype], rank)

    @property
    def nodes(self) -> list[list[int]]:
        ids = list(dict.fromkeys(self.node_ids))
        return [[rank for rank, node in enumerate(self.node_ids) if node == each] for each in ids]


def cases() -> list[Case]:
    draw, found = random.Random(5), []
    for i in range(48):
        codec = any_codec(draw)
        intra = INTRA[i % len(INTRA)]
        found.append(
            Case(
                *(tuple(SHAPES[i % len(SHAPES)]), draw.choice([0, 1, 255, 1024, 5000, draw.randint(0, 20000)])),
                *(
                    draw.choice(list(NUMPY)),
                    *(codec, intra),
                    draw.choice(
                        ["sum", "avg"] if get(codec).sparse or "topk" in intra else ["sum", "avg", "min", "max"]
                    ),
                ),
                *(draw.choice(["leader", "sharded"]), draw.choice(["one_shot", "two_round"])),
                *(draw.choice([None, 1024, 3000]), draw.random() < 0.5),
                draw.choice(["normal", "nonfinite", "negative", "outliers", "subnormal"]),
            )
        )
    return found


def expected(case: Case) -> np.ndarray:
    """The result that every rank must hold."""
    codec, nodes, dtype = oracle_codec(case.codec), case.nodes, case.dtype
    intra = oracle_of(intra_of(case.intra, dtype_of(dtype)))
    inputs = [stored(case.input(rank)) for rank in range(len(case.node_ids))]
    op, scale = ("sum", 1 / len(inputs)) if case.op == "avg" else (case.op, 1.0)
    if len(inputs) == 1:
        return inputs[0]
    parts = 1 if case.layout == "leader" else min(map(len, nodes))
    splits = len(nodes) if case.algorithm == "two_round" else 1
    granule = math.lcm(get(case.codec).granule, intra_of(case.intra, dtype_of(dtype)).granule)
    result = np.empty_like(inputs[0])
    for number, shard in enumerate(shards(case.count, parts * splits, granule)):
        part, split = divmod(number, splits)
        owners = [node[part] for node in nodes]
        count = shard.stop - shard.start
        if not count:
            continue
        sums = []
        for node, owner in zip(nodes, owners, strict=True):
            wires = [oracle.encode(intra, inputs[rank][shard], dtype) for rank in node if rank != owner]
            options = {"op": op, "scale": scale if len(nodes) == 1 else 1.0, "encoded": False}
            own = inputs[owner][shard]
            sums.append(oracle.reduce(intra, wires, own, node.index(owner), count, dtype, **options)[1])
        [total, *others] = sums
        if others:
            senders = [i for i in range(len(nodes)) if splits == 1 or i != split]
            makers = [oracle.RngCounter(0, 1, owners[i], shard.start) for i in senders]
            wires = [oracle.encode(codec, sums[i], dtype, m) for i, m in zip(senders, makers, strict=True)]
            own = None if splits == 1 else sums[split]
            options = {"op": op, "scale": scale, "encoded": splits > 1, "makers": makers}
            counter = oracle.RngCounter(0, 2, owners[split], shard.start)
            total = oracle.reduce(codec, wires, own, split, count, dtype, counter=counter, **options)[1]
        if any(len(node) > 1 for node in nodes):
            total = oracle.reduce(intra, [], total, 0, count, dtype, encoded=True)[1]
        result[shard] = total
    return result


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_oracles_bits(case: Case) -> None:
    options = {name: getattr(case, name) for name in ("codec", "intra", "op", "layout", "algorithm", "chunk")}
    options["node_ids"] = case.node_ids

    def run(comm: qccl.Communicator) -> np.ndarray:
        x = case.input(comm.rank)
        if case.in_place:
            assert comm.hierarchical_allreduce(x, **options) is x
            return x
        out = np.empty_like(x)
        assert comm.hierarchical_allreduce(x, out, **options) is out
        assert x.tobytes() == case.input(comm.rank).tobytes()
        return out

    wanted = expected(case)
    for rank, found in enumerate(qccl.run_ranks(len(case.node_ids), run)):
        assert_same_bits(stored(found), wanted, f"rank {rank}")


@pytest.mark.parametrize("intra", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["leader", "sharded"])
@pytest.mark.parametrize("node_ids", [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1, 1, 2, 2, 2]], ids=str)
def test_what_moves_inside_nodes_is_rounded(intra: str, layout: str, node_ids: list[int]) -> None:
    """Others' values once on the way up, and the result once, also in nodes of one rank: all hold the same bits."""
    count, n = 5000, len(node_ids)
    inputs = [hard_data("normal", count, NUMPY["float32"], rank) for rank in range(n)]
    nodes = [[r for r in range(n) if node_ids[r] == node] for node in dict.fromkeys(node_ids)]
    parts = 1 if layout == "leader" else min(map(len, nodes))

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(NUMPY[intra]).astype(np.float32)

    wanted = np.empty(count, np.float32)
    for part, shard in enumerate(shards(count, parts, 1024)):
        total = np.float32(0)
        for i, node in enumerate(nodes):
            terms = [inputs[r][shard] if r == node[part] else rounded(inputs[r][shard]) for r in node]
            mine = terms[0]
            for term in terms[1:]:
                mine = mine + term
            total = mine if i == 0 else total + mine
        wanted[shard] = rounded(total * np.float32(1 / n))

    def run(comm: qccl.Communicator) -> np.ndarray:
        x = inputs[comm.rank].copy()
        options = {"intra": intra, "layout": layout, "node_ids": node_ids, "algorithm": "one_shot"}
        return comm.hierarchical_allreduce(x, codec="none", op="avg", **options)

    for rank, found in enumerate(qccl.run_ranks(n, run)):
        assert_same_bits(found, wanted, f"rank {rank}")


def test_bytes_between_nodes() -> None:
    """Bytes that owners send: (m-1) E / parts in one round, 2 (m-1)/m E / parts in two; inside nodes, the values."""
    codec, count = get("minmax4"), 1024 * 48
    whole, encoded = 4 * count, codec.encoded_nbytes(count, FLOAT32)
    ids = [0, 0, 1, 1, 2, 2]
    found = {
        (layout, algorithm): sent_by_each(
            6,
            lambda c, a=algorithm, lay=layout: c.hierarchical_allreduce(
                np.ones(count, np.float32), codec=codec, layout=lay, algorithm=a, node_ids=ids
            ),
        )
        for layout in ("leader", "sharded")
        for algorithm in ("one_shot", "two_round")
    }
    assert found["leader", "one_shot"] == [2 * encoded + whole, whole] * 3
    assert found["leader", "two_round"] == [2 * 2 * encoded // 3 + whole, whole] * 3
    assert found["sharded", "one_shot"] == [2 * encoded // 2 + whole] * 6
    assert found["sharded", "two_round"] == [2 * 2 * encoded // 3 // 2 + whole] * 6


@pytest.mark.parametrize("layout", ["leader", "sharded"])
def test_bytes_inside_nodes(layout: str) -> None:
    """Inside a node of L ranks, with I the encoded size: (L-1) I from the leader, 2 (L-1)/L I from each in sharded."""
    intra, count = get("minmax4"), 1024 * 48
    encoded = intra.encoded_nbytes(count, FLOAT32)
    options = {"codec": "none", "intra": intra, "layout": layout, "node_ids": [0, 0, 0]}
    found = sent_by_each(3, lambda comm: comm.hierarchical_allreduce(np.ones(count, np.float32), **options))
    assert found == ([2 * encoded, encoded, encoded] if layout == "leader" else [2 * 2 * encoded // 3] * 3)


def test_every_rank_of_a_node_communicates_by_default() -> None:
    """As with layout="sharded": with "leader" the ranks of a node would send different amounts."""

    def call(**layout: str) -> Callable[[qccl.Communicator], object]:
        x, node_ids = np.ones(4096, np.float32), [0, 0, 1, 1]
        return lambda comm: comm.hierarchical_allreduce(x.copy(), node_ids=node_ids, **layout)

    default = sent_by_each(4, call())
    assert default == sent_by_each(4, call(layout="sharded")) == default[:1] * 4
    assert default != sent_by_each(4, call(layout="leader"))


def test_the_mean_is_global() -> None:
    """The mean over ranks of uneven nodes, not the mean of the nodes' means."""

    def run(comm: qccl.Communicator) -> float:
        x = np.full(100, comm.rank, np.float32)
        comm.hierarchical_allreduce(x, codec="none", op="avg", node_ids=[0, 1, 1, 1, 1])
        return float(x[0])

    assert qccl.run_ranks(5, run) == [2.0] * 5


def test_a_plan_and_the_machines_own_nodes() -> None:
    """Loopback ranks are all on one node, where nothing is quantised."""

    def run(comm: qccl.Communicator) -> None:
        assert comm.nodes == (0, 0, 0)
        x = np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)
        plain, y = comm.quantized_allreduce(x.copy(), codec="none"), x.copy()
        comm.plan("hierarchical_allreduce", 1000, layout="sharded")(y)
        np.testing.assert_array_equal(y, plain)

    qccl.run_ranks(3, run)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"node_ids": [0]}, "node_ids has 1 numbers; there must be 2, one for each rank"),
        ({"node_ids": [0, 1, 1]}, "node_ids has 3 numbers"),
        ({"node_ids": ["a", "b"]}, "each of node_ids must be an integer"),
        ({"node_ids": 2}, "node_ids must be a list of integers, not 2"),
        ({"intra": None}, "codec"),
        ({"layout": "ring"}, "layout 'ring' is not one of leader, sharded"),
        ({"intra": "float64"}, "float64"),
        ({"intra": "minmax4:rounding=stochastic"}, "draws random numbers, so the ranks of different nodes would get"),
        ({"intra": "minmax4+ef"}, r"keeps its residual from call to call, .* use intra=minmax4, and \+ef or"),
        ({"intra": "topk:k=0.1", "op": "max"}, "op 'max' is not possible with intra=topk.*, which sends only some"),
        ({"inter": "gpu"}, "inter='gpu' cannot be had"),
        ({"codec": "minmax8+ef"}, "keeps its residual from call to call"),
    ],
)
def test_bad_arguments(arguments, reason: str) -> None:
    def run(comm: qccl.Communicator) -> None:
        with pytest.raises(qccl.QcclError, match=reason):
            comm.hierarchical_allreduce(np.ones(8, np.float32), **({"node_ids": [0, 1]} | arguments))
        comm.barrier()

    qccl.run_ranks(2, run)


def test_ranks_with_other_nodes_disagree() -> None:
    def run(comm: qccl.Communicator) -> None:
        x = np.ones(8, np.float32)
        with pytest.raises(qccl.MismatchError, match=r"node_ids=\[0, 0\]"):
            comm.hierarchical_allreduce(x, node_ids=[0, comm.rank])
        assert (x == 1).all()

    qccl.run_ranks(2, run)


def test_raw_pointers_give_the_same_bits() -> None:
    def run(comm: qccl.Communicator) -> None:
        x = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
        out, options = np.empty_like(x), {"node_ids": [0, 0, 1], "codec": "minmax4"}
        qccl.hierarchical_allreduce(x.ctypes.data, out.ctypes.data, 5000, "float32", "avg", comm, **options)
        assert out.tobytes() == comm.hierarchical_allreduce(x, op="avg", **options).tobytes()

    qccl.run_ranks(3, run)
