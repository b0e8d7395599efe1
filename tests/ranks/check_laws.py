"""The laws of all-reduce over processes: the cases of tests/collectives/test_allreduce.py for this number of ranks."""

from __future__ import annotations

import processes
import pytest
from cases import law_cases
from laws import assert_same_bits, check_exact, expected, run
from processes import RANK, SIZE

import qccl

CASES = [case for case in law_cases(max_ranks=4 if SIZE <= 4 else 8) if case.ranks == SIZE]


@pytest.fixture(scope="module")
def results():
    """Each case's call number, result, and whether all ranks have its bits. All calls run before the first check."""
    with qccl.init(backend="host", timeout=30) as comm:
        found = [(comm._session.numbers.sequence, run(comm, case)) for case in CASES]
    same = [len(set(processes.allgather(result.tobytes()))) == 1 for _, result in found]
    yield [(*each, equal) for each, equal in zip(found, same, strict=True)]
    processes.barrier()


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_laws(results, number):
    """The ranks share the work: each compares its share of the cases with the oracle."""
    case, (call, found, same) = CASES[number], results[number]
    assert same, "the ranks' results differ"
    if number % SIZE == RANK:
        assert_same_bits(found, expected(case, call), f"rank {RANK}")
        check_exact(case, found)
