"""The laws of all-reduce over MPI: the cases of tests/test_allreduce.py for this number of ranks."""

from __future__ import annotations

import time

import pytest
from cases import law_cases
from mpi4py import MPI
from test_allreduce import assert_same_bits, check_exact, expected, run

import qccl

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
CASES = [case for case in law_cases(max_ranks=4) if case.ranks == SIZE]


@pytest.fixture(scope="module")
def results():
    """Each case's call number, result, and whether all ranks have its bits. All calls run before the first check."""
    with qccl.init(backend="host", timeout=30) as comm:
        found = [(comm._session.sequence, run(comm, case)) for case in CASES]
    same = [len(set(MPI.COMM_WORLD.allgather(result.tobytes()))) == 1 for _, result in found]
    yield [(*each, equal) for each, equal in zip(found, same, strict=True)]
    others = MPI.COMM_WORLD.Ibarrier()
    while not others.Test():  # a rank in Barrier() would keep a core from those that still compute
        time.sleep(0.01)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_laws(results, number):
    """The ranks share the work: each compares its share of the cases with the oracle."""
    case, (call, found, same) = CASES[number], results[number]
    assert same, "the ranks' results differ"
    if number % SIZE == RANK:
        assert_same_bits(found, expected(case, call), f"rank {RANK}")
        check_exact(case, found)
