"""The laws of all-reduce over MPI: the cases of tests/test_allreduce.py for this number of ranks, in step."""

from __future__ import annotations

import pytest
from cases import law_cases
from mpi4py import MPI
from test_allreduce import assert_same_bits, check_exact, expected, run

import qccl

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture(scope="module")
def comm():
    with qccl.init(backend="host", timeout=30) as comm:
        yield comm


@pytest.mark.parametrize("case", [case for case in law_cases(max_ranks=4) if case.ranks == SIZE], ids=str)
def test_laws(comm, case):
    call = comm._sequence
    found = run(comm, case)
    assert_same_bits(found, expected(case, call), f"rank {RANK}")
    check_exact(case, found)
