"""Every collective over processes: random cases of tests/collectives for this number of ranks."""

from __future__ import annotations

import random

import collective_cases
import processes
import pytest
from processes import RANK, SIZE

import qccl


@pytest.fixture(scope="module")
def everyone():
    # others wait while a rank compares a long case with the oracle
    with qccl.init(backend="host", timeout=300) as comm:
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


@pytest.mark.parametrize("name", collective_cases.ORACLES)
def test_the_oracles_bits(name):
    """The ranks share the work: each compares its share of the cases with the oracle."""
    drawn = [random.Random(f"{name} {SIZE} {i}").choice for i in range(30 if name == "allreduce" else 10)]
    cases = [collective_cases.draw_case(choose, name, SIZE) for choose in drawn]
    cases += collective_cases.long_cases(SIZE) if name == "allreduce" else []
    for i, case in enumerate(cases):
        results = collective_cases.run_all(case)
        if i % SIZE == RANK:
            collective_cases.compare(case, results)
