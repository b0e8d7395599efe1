"""qccl.DiLoCo: error feedback, names, other communicators, bad input. test_diloco_streaming.py has the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

pytestmark = pytest.mark.usefixtures("threads_end")

RANKS = 3


def distance(codec: str, steps: int) -> float:
    """How far the mean of the delivered changes is from the exact mean, after ``steps`` equal rounds; relative."""
    changes = [np.random.default_rng(rank).standard_normal(500).astype(np.float32) for rank in range(RANKS)]
    exact = np.mean(changes, axis=0, dtype=np.float64)

    def run(comm: qccl.Communicator) -> np.ndarray:
        params = np.zeros(500, np.float32)
        outer = qccl.DiLoCo(comm, params, codec=codec, outer_lr=1, momentum=0)
        for _ in range(steps):
            params += changes[comm.rank]
            outer.step(params)
        return params / steps

    found = qccl.run_ranks(RANKS, run)[0]
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def test_error_feedback_keeps_the_mean_of_the_delivered_changes() -> None:
    """The part that is missing shrinks as 1/steps; without error feedback it stays."""
    codec = "minmax2:bucket=64"
    assert distance(f"{codec}+ef", 60) < 1.5 * distance(f"{codec}+ef", 10) / 6
    assert distance(codec, 60) > 0.5 * distance(codec, 10) > 5 * distance(f"{codec}+ef", 60)


@on_ranks(1)
def test_a_state_that_does_not_fit_changes_nothing(comm: qccl.Communicator) -> None:
    outer = qccl.DiLoCo(comm, [np.ones(4, np.float32), np.ones(2, np.float32)])
    state = outer.state_dict()
    for wrong, message in (
        ({}, "a state is the dict that"),
        (state | {"steps": [-1]}, 'the state\'s "steps" must be'),
        (state | {"common": state["common"][:1]}, "the state's common has 1 arrays, and DiLoCo was made for 2"),
        (state | {"momentum": state["common"][::-1]}, r"the state's momentum\[0\] are \('float32', \(2,\)\), and"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            outer.load_state_dict(wrong)
    assert (outer.params[0] == 1).all() and outer.steps == 0


def test_arrays_of_a_dict_belong_together_by_name() -> None:
    """Whatever the dict's order, which may differ between ranks, and after local steps: jax.jit() sorts dicts."""
    values = {"b": 1.0, "a": 2.0, "c": 3.0}

    def run(comm: qccl.Communicator) -> None:
        def given(names: str) -> dict[str, np.ndarray]:
            return {name: np.full(4, values[name], np.float32) for name in names}

        params = given("cab" if comm.rank else "bac")
        outer = qccl.DiLoCo(comm, params, codec="none", outer_lr=0.5, momentum=0)
        assert all((params[name] == value).all() for name, value in values.items())
        found = outer.step({name: array + 1 for name, array in given("abc").items()})
        assert list(found) == ["a", "b", "c"]
        assert all((found[name] == value + 0.5).all() for name, value in values.items())
        for wrong in (given("ab") | {"d": params["c"]}, list(params.values())):
            with pytest.raises(qccl.ArgumentError, match=r"params has the names .*, and DiLoCo was made for \['a', "):
                outer.step(wrong)
        with pytest.raises(qccl.MismatchError, match=r"ranks \[1\] have other parameters \(number, names, shapes"):
            qccl.DiLoCo(comm, given("bc" if comm.rank else "ab"))

    qccl.run_ranks(2, run)


def test_another_communicator_continues_from_the_rank_with_the_most_steps() -> None:
    """As after shrink(), where a rank may have missed a step that the others took; and a new rank joins them."""

    def run(comm: qccl.Communicator) -> bytes:
        both = comm.split(None if comm.rank == 2 else 0)
        params = np.full(6, comm.rank, np.float32)
        if both is not None:
            outer = qccl.DiLoCo(both, params)
            for _ in range(2):
                params += comm.rank + 1
                outer.step()
            if comm.rank == 0:  # rank 1 has taken a step more
                outer._taken, outer.common[0][...] = [1], 9
            else:
                params += 1  # local steps, which it keeps
            kept = outer.common[0].copy() + comm.rank
            outer.continue_on(comm)
            both.close()
            assert outer.steps == 2 and (comm.rank == 0 or params.tobytes() == kept.tobytes())
        else:
            outer = qccl.DiLoCo(comm, params)
            assert outer.steps == 2
        outer.step()
        return params.tobytes() + outer._velocity[0].tobytes()

    found = qccl.run_ranks(3, run)
    assert found[0] == found[1] == found[2]


def residuals(comm: qccl.Communicator) -> dict[tuple[str, str], bytes]:
    keys = comm.state_dict()["keys"].items()
    return {(key, n): v.tobytes() for key, entry in keys for n, v in entry["values"].items() if v.any()}


@on_ranks(2)
def test_an_exception_between_the_calls_of_a_step_changes_no_residuals(comm: qccl.Communicator) -> None:
    """The first call has begun then; the others would have been of further element types."""
    params = [np.zeros(64, np.float32), np.zeros(64, np.float16)]
    outer = qccl.DiLoCo(comm, params, codec="onebit+ef")
    allreduce, begun = comm.quantized_allreduce_coalesced, []

    def fails_once(arrays: Any, **how: Any) -> Any:
        if len(begun) == 3:  # the second call of the second step
            begun.append(None)
            raise KeyboardInterrupt
        begun.append(allreduce(arrays, **how))
        return begun[-1]

    vars(comm).update(quantized_allreduce_coalesced=fails_once)
    outer.step()
    params[0] += np.random.default_rng(comm.rank).standard_normal(64).astype(np.float32)
    before = residuals(comm)
    with pytest.raises(KeyboardInterrupt):
        outer.step()
    assert residuals(comm) == before and len(before) == 2
    outer.step()
    assert outer.steps == 2 and residuals(comm) != before


@on_ranks(2)
def test_refused(comm: qccl.Communicator) -> None:
    params = [np.ones(5, np.float32)]
    for arguments, message in (
        ({"outer_lr": 0}, "outer_lr must be a positive number"),
        ({"outer_lr": float("inf")}, "outer_lr must be a positive number"),
        ({"momentum": 1}, "momentum must be a number from 0 to below 1"),
        ({"nesterov": "yes"}, "nesterov must be True or False"),
        ({"key": 3}, "key must be a string that names the state of this DiLoCo, not 3"),
        ({"codec": "minmax4+ef+nesterov"}, "has momentum, and so has the outer step"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            qccl.DiLoCo(comm, params, **arguments)
    for wrong, message in (
        (iter(params), r"params must be an array, .* not list_iterator; pass a list"),
        ({"w": [1.0]}, r"params\['w'\] is of type list"),
        ([np.ones(5)], r"params\[0\] has element type float64"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            qccl.DiLoCo(comm, wrong)
    with pytest.raises(qccl.MismatchError, match=r"ranks \[1\] have other parameters .* or arguments of DiLoCo"):
        qccl.DiLoCo(comm, params, outer_lr=0.1 if comm.rank else 0.2)
    outer = qccl.DiLoCo(comm, params)
    for local, message in (
        ([np.ones(4, np.float32)], r"type and shape of params\[0\] are \('float32', \(4,\)\), and DiLoCo was made"),
        ([*params, *params], "params has 2 arrays, and DiLoCo was made for 1"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            outer.step(local)
    assert outer.steps == 0


@pytest.mark.parametrize("how", [{}, {"period": 2, "delay": 1}, {"period": 2, "fragments": 2}])
@on_ranks(2)
def test_the_same_memory_twice_is_refused(comm: qccl.Communicator, how: dict[str, Any]) -> None:
    """As that of tied weights, when it is made and in each step; a step would change that memory twice."""
    whole = np.ones(6, np.float32)
    for params in ({"a": whole, "b": whole}, {"a": whole[:4], "b": whole[3:]}):
        with pytest.raises(qccl.InvalidBufferError, match=r"params\['a'\] and params\['b'\] overlap in memory"):
            qccl.DiLoCo(comm, params, **how)
    params = {"a": whole[:3], "b": whole[3:]}
    outer = qccl.DiLoCo(comm, params, **how)
    with pytest.raises(qccl.InvalidBufferError, match="overlap in memory"):
        outer.step({"a": whole[:3], "b": whole[:3]})
    assert outer.steps == 0 and outer.step() is not None
