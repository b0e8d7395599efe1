"""The other collectives over processes: cases of test_collectives.py and its like for this number of ranks."""

from __future__ import annotations

import feedback_cases
import processes
import pytest
import test_collectives
import test_hierarchical
import test_peer_exchange
from feedback_cases import Case
from processes import RANK, SIZE

import qccl

CALLS = {
    "reduce_scatter": (test_collectives.test_reduce_scatter, 30),
    "all_gather": (test_collectives.test_all_gather, 30),
    "all_to_all": (test_collectives.test_all_to_all, 30),
    "broadcast": (test_collectives.test_broadcast, 30),
    "reduce": (test_collectives.test_reduce, 40),
    "coalesced": (test_collectives.test_coalesced, 40),
}


@pytest.fixture(scope="module")
def everyone():
    with qccl.init(backend="host", timeout=30) as comm:
        yield comm


@pytest.fixture(autouse=True)
def ranks_are_processes(everyone, monkeypatch):
    """Each call of run_ranks() is one on all processes, on a communicator that has drawn no random numbers yet."""

    def run_ranks(n, run, **arguments):
        assert n == SIZE
        with everyone.split(0) as comm:
            mine = run(comm)
        return processes.allgather(mine)

    monkeypatch.setattr(qccl, "run_ranks", run_ranks)


@pytest.mark.parametrize("name", CALLS)
def test_the_oracles_bits(name):
    test, number = CALLS[name]
    for case in test_collectives.random_cases(name, number // 5, (SIZE,)):
        test(case)


def test_two_levels():
    for case in test_hierarchical.cases():
        if len(case.node_ids) == SIZE:
            test_hierarchical.test_the_oracles_bits(case)


@pytest.mark.parametrize("codec", ["minmax8:bucket=64", "minmax2:rounding=stochastic"])
def test_peer_exchange_keeps_replicas_equal(codec):
    test_peer_exchange.test_the_oracles_bits(SIZE, codec, "float32")


@pytest.mark.parametrize("name", ["reduce_scatter", "hierarchical_allreduce", "peer_exchange"])
def test_error_feedback(name):
    """The ranks share the work: each compares its share of the cases with the oracle."""
    if (name, SIZE) == ("peer_exchange", 1):
        return
    counts, node_ids = (1300,) * (SIZE if name == "reduce_scatter" else 1), tuple(range(SIZE))
    both = Case(name, SIZE, counts, feedback_cases.BOTH, node_ids=node_ids, algorithm="two_round")
    others = [case for case in feedback_cases.cases() if (case.name, case.ranks) == (name, SIZE)]
    for number, case in enumerate([both, *others[:5]]):
        results = feedback_cases.run_all(case)
        if number % SIZE == RANK:
            feedback_cases.compare(case, results)
