"""The verifier accepts the schedules of every collective: many sizes, counts, codecs and roots, in place or not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from case_schedules import check, schedules
from collective_cases import ORACLES, Case, draw_case
from drawn_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from qccl.collectives.analysis.verify import VerificationError

CODEC = "minmax4:bucket=8"


@pytest.mark.parametrize("name", ORACLES)
@given(data=st.data())
@settings(max_examples=2 * settings.default.max_examples)
def test_accepts_random_cases(name: str, data: st.DataObject) -> None:
    """Also with state, in chunks of which several are under way, and peer exchanges without a model of their own."""
    case, depth, applied = data.draw(cases(name)), data.draw(st.integers(1, 5)), data.draw(st.booleans())
    case = replace(case, chunk=data.draw(st.sampled_from([8, 40, 1000, None])))
    check(case, schedules(case, depth=depth, applied=applied))


def drawn(name: str, seed: str, node_ids: tuple[int, ...] = (), *, ranks: int, longest: int = 3000) -> Case:
    case = draw_case(random.Random(seed).choice, name, ranks)
    return replace(case, counts=tuple(n % longest for n in case.counts), node_ids=node_ids or case.node_ids)


@pytest.mark.parametrize("name", ORACLES)
def test_accepts_sizes_to_31(name: str) -> None:
    for size in (9, 13, 16, 31):
        check(drawn(name, f"{name} {size}", ranks=size, longest=200))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_accepts_64_ranks(name: str) -> None:
    check(drawn(name, name, ranks=64, longest=200))


BROADCAST = Case("broadcast", 3, (40,), CODEC, chunk=8, algorithm="chain")


def test_rejects_the_wrong_expectation() -> None:
    """The result of one root does not fulfil the postcondition of another."""
    with pytest.raises(VerificationError, match="without the contribution of rank 1"):
        check(replace(BROADCAST, root=1), schedules(BROADCAST))


# -- two levels --------------------------------------------------------------------------------------------------------


def nodes_of(shape: list[int]) -> tuple[int, ...]:
    return tuple(node for node, size in enumerate(shape) for _ in range(size))


@pytest.mark.parametrize("shape", [[1] * 6, [2] * 8, [3] * 5, [1, 2, 3], [8] * 8, [16] * 4, [4, 7, 4]], ids=str)
def test_accepts_node_sizes(shape: list[int]) -> None:
    for seed in range(2):
        check(drawn("hierarchical_allreduce", f"{shape} {seed}", nodes_of(shape), ranks=sum(shape)))


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("shape", [[1, 1, 1], [2], [2, 2], [3, 2], [1, 2, 3], [2] * 4], ids=str)
def test_accepts_parts_in_levels(shape: list[int], name: str) -> None:
    for seed in range(12):
        check(drawn(name, f"{shape} {seed}", nodes_of(shape), ranks=sum(shape)))


def test_accepts_parts_of_ranks_that_are_dealt_to_nodes() -> None:
    for name, node_ids in (
        (name, ids) for name in ("reduce_scatter", "all_gather") for ids in ((0, 1, 0, 1), (3, 1, 3))
    ):
        for seed in range(12):
            check(drawn(name, str(seed), node_ids, ranks=len(node_ids)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "layout", "chunks"),
    [("one_shot", "leader", 3), ("one_shot", "sharded", 3), ("two_round", "sharded", 1)],
)
def test_accepts_256_ranks(algorithm: str, layout: str, chunks: int, no_collector: None) -> None:
    """32 nodes of 8 ranks."""
    count = 1024 * (8 if layout == "sharded" else 1) * chunks * (32 if algorithm == "two_round" else 1)
    how = {"chunk": 1024, "algorithm": algorithm, "layout": layout, "node_ids": nodes_of([8] * 32)}
    check(Case("hierarchical_allreduce", 256, (count,), "minmax4", **how))
