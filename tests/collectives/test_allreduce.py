"""The laws of all-reduce, against an oracle that knows shards and rounds but neither chunks, slots nor schedules."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BUCKET, Case, law_cases
from laws import assert_same_bits, check_exact, expected, run

import qccl


@pytest.mark.parametrize("case", law_cases(), ids=str)
def test_laws(case):
    results = qccl.run_ranks(case.ranks, lambda comm: run(comm, case))
    wanted = expected(case)
    for rank, found in enumerate(results):
        assert_same_bits(found, wanted, f"rank {rank}")
    check_exact(case, results[0])


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_chunks_do_not_change_the_result(algorithm, rounding):
    cases = [
        Case(3, 7 * BUCKET + 5, "normal", "float32", "sum", f"minmax5:bucket={BUCKET},rounding={rounding}", *rest)
        for rest in [(algorithm, chunk, False) for chunk in (1, BUCKET, 3 * BUCKET, 10**6)]
    ]
    found = [qccl.run_ranks(3, lambda comm, c=case: run(comm, c))[0] for case in cases]
    for other in found[1:]:
        assert_same_bits(other, found[0], algorithm)


def test_stochastic_calls_differ_and_repeat():
    """Law 7: the call number keys the random numbers, so a second call rounds anew and a second run repeats both."""

    def two_calls(comm):
        case = Case(3, 2000, "normal", "float32", "sum", "minmax4:rounding=stochastic,seed=3", "two_round", None, False)
        return [run(comm, case), run(comm, case)], expected(case, call=1)

    first, again = qccl.run_ranks(3, two_calls), qccl.run_ranks(3, two_calls)
    for (a, b), second in first:
        assert (a != b).any()
        assert_same_bits(b, second, "second call")
    assert_same_bits(first[0][0][0], again[0][0][0], "repeated")
    assert_same_bits(first[0][0][1], again[0][0][1], "repeated")


def test_the_result_does_not_depend_on_timing():
    """Ranks that are slow at random places change nothing."""
    case = Case(4, 20 * BUCKET, "normal", "float32", "sum", f"minmax3:bucket={BUCKET}", "two_round", BUCKET, True)

    def jittery(comm):
        import time

        rng = np.random.default_rng(comm.rank)
        poll = comm.transport.poll

        def slow_poll(*, idle):
            time.sleep(float(rng.choice([0, 0, 0.002])))
            return poll(idle=idle)

        comm.transport.poll = slow_poll
        return run(comm, case)

    for found in qccl.run_ranks(4, jittery):
        assert_same_bits(found, expected(case), "jitter")
