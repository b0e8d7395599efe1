"""Calls on several nodes with several ranks each: the schedule that is chosen, its results, and its bytes."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from cases import hard_data
from kernel_calls import assert_same_bits
from thread_ranks import on_ranks

import qccl
from qccl.base.dtypes import BFLOAT16, FLOAT32, DType
from qccl.codecs import get
from qccl.collectives import (
    AllGatherSpec,
    AllReduceSpec,
    CoalescedSpec,
    CollectiveSpec,
    ReduceScatterSpec,
    for_nodes,
    ways,
)
from qccl.collectives.topology import costs

#: each of these makes all three collectives choose two levels
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1, 2, 2, 2), (0, 0, 1, 1, 2, 2, 3, 3), (3, 3, 3, 1, 1)]


def busiest(spec: CollectiveSpec, node_ids: tuple[int, ...]) -> int:
    """Bytes that the node sends to others that sends most."""
    size, sent = len(node_ids), dict.fromkeys(node_ids, 0)
    for rank in range(size):
        sent[node_ids[rank]] += spec.schedule(rank, size, in_place=True).moved_nbytes(node_ids)[0]
    return max(sent.values())


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_a_node_sends_no_more_than_with_a_ring(nodes: int, ranks: int, dtype: DType) -> None:
    """NCCL's ring sends 2 (n-1)/n of the vector from each node in an all-reduce, and (n-1)/n in its halves."""
    node_ids = tuple(rank // ranks for rank in range(nodes * ranks))
    size, count, codec = len(node_ids), 1024 * 512, get("minmax8")
    shared = count, dtype, codec, None
    halves = (AllReduceSpec.from_arguments(*shared), 2), (ReduceScatterSpec.from_arguments(*shared), 1)
    halves += ((AllGatherSpec.from_arguments(*shared), 1), (CoalescedSpec.from_arguments(*shared, each=[count]), 2))
    for spec, hops in halves:
        ring = 0 if nodes == 1 else hops * (size - 1) * codec.encoded_nbytes(count, dtype) // size
        assert busiest(for_nodes(spec, node_ids), node_ids) <= ring, spec.name


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "all_gather"])
def test_the_choice(name: str) -> None:
    """Two levels where nodes have several ranks and the call is large; what the program names is kept."""
    makers = {"allreduce": AllReduceSpec, "reduce_scatter": ReduceScatterSpec, "all_gather": AllGatherSpec}

    def chosen(count: int, node_ids: tuple[int, ...], **own: str) -> bool:
        spec = makers[name].from_arguments(count, "float32", "minmax8", None, **own)
        found = for_nodes(spec, node_ids)
        assert found == for_nodes(spec, list(node_ids)), "the same on all ranks"
        return found != spec

    large = 120 << 13
    assert all(chosen(large, node_ids) for node_ids in LAYOUTS)
    assert chosen(large, (0, 0, 0, 1)) == (name == "allreduce"), "in its halves one node's three codes are needed"
    assert not any(chosen(large, ids) for ids in [(0,), (0, 0, 0, 0), (0, 1, 2, 3)])
    assert not chosen(1024, (0, 0, 1, 1)), "a further hop costs more"
    if name == "allreduce":
        assert not any(chosen(large, (0, 0, 1, 1), algorithm=each) for each in ("one_shot", "two_round"))


def test_a_nonfinite_sum_of_the_node_changes_no_residual() -> None:
    """Also on a rank whose own values and result are finite."""
    node_ids, count = (0, 0, 1, 1), 400_000

    def run(comm: qccl.Communicator) -> list[np.ndarray]:
        comm.nodes, found = node_ids, []
        for step in range(2):
            x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
            if step == 1 and comm.rank == 0:
                x[-1] = np.nan  # the part of rank 3, which rank 1 encodes for this node
            comm.quantized_reduce_scatter(x, codec="minmax4+ef", key="a")
            found.append(comm.state_dict()["keys"]["a"]["values"]["residual"])
        return found

    before, after = qccl.run_ranks(4, run)[1]
    assert before.any()
    assert_same_bits(after, before, "the residual of rank 1")


@pytest.mark.parametrize("node_ids", LAYOUTS, ids=str)
def test_the_call_by_default_has_the_schedule_of_the_one_by_hand(node_ids: tuple[int, ...]) -> None:
    """So neither is faster."""

    def run(comm: qccl.Communicator) -> None:
        comm.nodes = node_ids
        by_default = comm.plan("allreduce", 1 << 20, op="avg")
        by_hand = comm.plan("hierarchical_allreduce", 1 << 20, op="avg", node_ids=node_ids)
        assert by_default.spec == by_hand.spec
        assert by_default.schedule(in_place=True) == by_hand.schedule(in_place=True)

    qccl.run_ranks(len(node_ids), run)


@pytest.mark.parametrize("node_ids", LAYOUTS, ids=str)
def test_a_coalesced_all_reduce_has_the_bits_of_two_levels(node_ids: tuple[int, ...]) -> None:
    """Those of hierarchical_allreduce: several arrays whose lengths are whole buckets are one vector."""
    size, count = len(node_ids), 1 << 18

    def run(comm: qccl.Communicator) -> list[np.ndarray]:
        x = hard_data("normal", count, np.dtype(np.float32), comm.rank)
        wanted, found = np.empty_like(x), np.empty_like(x)
        options = {"codec": "minmax8+ef", "op": "avg"}
        for _ in range(2):
            comm.hierarchical_allreduce(x, wanted, node_ids=node_ids, key="h", **options)
        comm.reset()
        comm.nodes = node_ids
        for _ in range(2):
            edges = [0, 1 << 10, 1 << 12, 1 << 12, count]
            arrays = [[a[i:j] for i, j in pairwise(edges)] for a in (x, found)]
            comm.quantized_allreduce_coalesced(*arrays, key="a", **options)
        return [wanted, found]

    results = qccl.run_ranks(size, run)
    for wanted, found in results:
        assert_same_bits(found, wanted, "coalesced")
        assert_same_bits(found, results[0][1], "all ranks")


@on_ranks(4)
def test_state_of_another_algorithm_is_refused(comm: qccl.Communicator) -> None:
    """With both calls in the message; the named algorithm still takes it."""
    node_ids = (0, 0, 1, 1)
    x = np.ones(1 << 18, np.float32)
    options = {"codec": "minmax8+ef", "key": "a"}
    comm.quantized_allreduce(x, algorithm="two_round", **options)
    saved = comm.state_dict()
    comm.nodes = node_ids
    comm.load_state_dict(saved)
    with pytest.raises(qccl.ArgumentError, match=r"belongs to allreduce.*this is hierarchical_allreduce.*algorithm="):
        comm.quantized_allreduce(x, **options)
    comm.quantized_allreduce(x, algorithm="two_round", **options)


@pytest.mark.parametrize(
    "node_ids, name, options, wanted",
    [
        ((0, 0, 1, 1), "allreduce", {}, r"2 nodes of 2 ranks: two levels, with one_shot between nodes, because one"),
        ((0, 0, 1, 1), "allreduce", {"algorithm": "two_round"}, r"one level, two_round, as the call says"),
        ((0, 0, 0, 1), "reduce_scatter", {}, r"1 node of 1 rank and 1 node of 3 ranks: one level, reduce_scatter, "),
        ((0, 0, 1, 1), "all_gather", {}, r"two levels, because one level has 1 hop and .* 24,576 bytes"),
        ((0, 1, 2, 3), "allreduce", {}, r"4 nodes of 1 rank: one level, two_round, because no ranks share a node"),
        ((0, 0, 0, 0), "allreduce", {}, r"because there are no other nodes.\n.*sends 0 bytes to other nodes"),
        ((0, 0, 1, 1), "broadcast", {}, r"because this collective has no other"),
        ((0, 0, 1, 1), "hierarchical_allreduce", {}, r"two levels, with one_shot between nodes, as the call says"),
        ((0, 1, 1, 1), "hierarchical_allreduce", {"node_ids": (0, 0, 1, 1)}, r"^2 nodes of 2 ranks: two levels"),
    ],
)
def test_a_plan_explains_itself(node_ids: tuple[int, ...], name: str, options: dict, wanted: str) -> None:
    def run(comm: qccl.Communicator) -> str:
        comm.nodes = node_ids
        return comm.plan(name, 1 << 20, **options).explain()

    found = qccl.run_ranks(4, run)[0]
    assert re.search(wanted, found, re.MULTILINE), found
    sent = [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) bytes to other nodes", found)]
    assert len(sent) == 1 and (sent[0] > 0) == (len(set(node_ids)) > 1)


@pytest.mark.parametrize("node_ids", LAYOUTS, ids=str)
@pytest.mark.parametrize("codec", ["minmax8", "minmax4/minmax8", "none"])
def test_the_costs_that_decide_are_the_bytes_of_the_schedules(node_ids: tuple[int, ...], codec: str) -> None:
    """Within 2% on large vectors, whose shards are as good as equal; they differ by a bucket."""
    size = len(node_ids)
    shared = size << 16, "float32", codec, None
    parts = [size - rank << 16 for rank in range(size)]
    given = sum(parts), *shared[1:]
    specs = [AllReduceSpec.from_arguments(*shared), ReduceScatterSpec.from_arguments(*given, counts=parts)]
    for spec in (*specs, AllGatherSpec.from_arguments(*given, counts=parts)):
        flat, levels = costs(spec, node_ids)
        assert flat.nbytes == pytest.approx(busiest(spec, node_ids), rel=0.02), spec.name
        in_levels = ways(spec, node_ids)["two levels"]
        assert levels.nbytes == pytest.approx(busiest(in_levels, node_ids), rel=0.02), spec.name
