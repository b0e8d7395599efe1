"""All-reduce in two levels on given nodes: bytes between and inside nodes, plans, arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sent_bytes import sent_by_each
from thread_ranks import on_ranks

import qccl
from qccl.base.dtypes import FLOAT32
from qccl.codecs import get


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


@on_ranks(3)
def test_a_plan_and_the_machines_own_nodes(comm: qccl.Communicator) -> None:
    """Loopback ranks are all on one node, where nothing is quantised."""
    assert comm.nodes == (0, 0, 0)
    x = np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)
    plain, y = comm.quantized_allreduce(x.copy(), codec="none"), x.copy()
    comm.plan("hierarchical_allreduce", 1000, layout="sharded")(y)
    np.testing.assert_array_equal(y, plain)


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
@on_ranks(2)
def test_bad_arguments(comm: qccl.Communicator, arguments, reason: str) -> None:
    with pytest.raises(qccl.QcclError, match=reason):
        comm.hierarchical_allreduce(np.ones(8, np.float32), **({"node_ids": [0, 1]} | arguments))
    comm.barrier()
