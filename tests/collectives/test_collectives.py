"""Every collective, bit for bit, against an oracle that knows parts and codes but neither chunks nor schedules."""

from __future__ import annotations

import time

import numpy as np
import pytest
from collective_cases import ORACLES, Case, call, compare, long_cases, plain_allreduces, run, run_all
from drawn_cases import cases
from hypothesis import given
from hypothesis import strategies as st

import qccl


@pytest.mark.parametrize("name", ORACLES)
@given(data=st.data())
def test_the_oracles_bits(name: str, data: st.DataObject) -> None:
    """Results, state, arrays that are read alone, and memory beside all arrays."""
    case = data.draw(cases(name))
    compare(case, run_all(case))


@pytest.mark.parametrize(
    "case", [*plain_allreduces()], ids=lambda case: f"{case.codec}-{case.algorithm}-{case.data[0]}"
)
def test_each_codec_in_an_allreduce(case: Case) -> None:
    """Of the cases that test_the_oracles_bits draws, most have state, and nearly none of float32 is not finite."""
    compare(case, run_all(case))


@pytest.mark.parametrize("case", long_cases(4), ids=lambda case: case.codec)
def test_many_chunks(case: Case) -> None:
    compare(case, run_all(case))


def test_stochastic_calls_differ_and_repeat() -> None:
    """The call's number keys the random numbers: a second call rounds anew, and a second run repeats both."""
    codec = "minmax4:rounding=stochastic,seed=3"
    case = Case("allreduce", 3, (2000,), codec, algorithm="two_round", data=("normal",) * 2)

    def calls(comm: qccl.Communicator) -> list[bytes]:
        x = case.inputs()[0][comm.rank]
        return [call(case, comm, x)[0].tobytes() for _ in range(2)]

    first, second = qccl.run_ranks(3, calls), qccl.run_ranks(3, calls)
    assert first == second and all(a != b for a, b in first)
    compare(case, run_all(case))


def test_the_result_does_not_depend_on_timing() -> None:
    """Ranks that are slow at random places change nothing."""
    case = Case("allreduce", 4, (5120,), "minmax3:bucket=256", algorithm="two_round", chunk=256, data=("normal",))

    def jittery(comm: qccl.Communicator) -> tuple:
        rng, poll = np.random.default_rng(comm.rank), comm.transport.poll

        def slow_poll(*, idle):
            time.sleep(float(rng.choice([0, 0, 0.002])))
            return poll(idle=idle)

        comm.transport.poll = slow_poll
        return run(case, case.inputs(), comm)

    compare(case, qccl.run_ranks(4, jittery))
