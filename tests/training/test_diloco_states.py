"""qccl.DiLoCo: states while an outer step is under way, refused and interrupted outer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.training import parameters

pytestmark = pytest.mark.usefixtures("threads_end")

#: outer steps whose result is the average of the ranks' parameters
AVERAGES: dict[str, Any] = {"codec": "none", "outer_lr": 1, "momentum": 0}


@on_ranks(2)
def test_a_loaded_state_under_way_goes_on_without_the_local_parameters(comm: qccl.Communicator) -> None:
    """Nothing else was saved, so each rank goes on from its parameters when the outer step began, not behind them."""
    params, again = np.zeros(3, np.float32), np.zeros(3, np.float32)
    how = AVERAGES | {"period": 4, "delay": 2}
    outer = qccl.DiLoCo(comm, params, **how)
    for _ in range(4):
        params += 1 + comm.rank
        outer.after_local_step()
    other = qccl.DiLoCo(comm, again, **how)
    other.load_state_dict(outer.state_dict())
    assert (again == 4 + 4 * comm.rank).all() and not other.common[0].any()
    other.finish()
    assert (again == 6).all() and (other.common[0] == 6).all()
    other.step()
    assert (again == 6).all() and (other.common[0] == 6).all()
    outer.finish()


def test_a_state_with_local_parameters_is_that_of_its_rank() -> None:
    def run(comm: qccl.Communicator) -> None:
        params = np.zeros(3, np.float32)
        outer = qccl.DiLoCo(comm, params, **AVERAGES, period=4, delay=2)
        for _ in range(4):
            params += 1 + comm.rank
            outer.after_local_step()
        states[comm.rank] = outer.state_dict()
        comm.barrier()
        outer.finish()
        if comm.rank == 1:
            with pytest.raises(qccl.ArgumentError, match="under_way belongs to rank 0; rank 1 needs its own"):
                outer.load_state_dict(states[0])
            assert not outer._under_way and (outer.common[0] == 6).all()

    states: dict[int, Any] = {}
    qccl.run_ranks(2, run)


def test_a_move_that_is_interrupted_leaves_the_local_parameters() -> None:
    class Interrupts:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    local = np.full(3, 5, np.float32)
    with pytest.raises(KeyboardInterrupt):
        parameters.move(local, np.full(3, 2, np.float32), Interrupts())
    assert (local == 5).all()
    parameters.move(local, np.full(3, 2, np.float32), np.float32(10))
    assert (local == 13).all()


def interrupted(outer: qccl.DiLoCo) -> None:
    """Take an outer step that Ctrl-C ends after the common parameters have changed."""

    def deliver(*_: Any) -> Any:
        raise KeyboardInterrupt

    vars(outer)["_deliver"] = deliver
    with pytest.raises(KeyboardInterrupt):
        outer.step()
    del vars(outer)["_deliver"]


@pytest.mark.parametrize("by", ["continue_on", "load_state_dict"])
def test_no_step_follows_an_interrupted_one(by: str) -> None:
    """Until the rank has the state of the others, or all have loaded one."""

    def run(comm: qccl.Communicator) -> bytes:
        params = np.zeros(3, np.float32)
        outer = qccl.DiLoCo(comm, params, period=2)
        state = outer.state_dict()
        params += 1 + comm.rank
        if comm.rank == 0:
            interrupted(outer)
            for call in (outer.step, outer.after_local_step, outer.finish, outer.state_dict):
                with pytest.raises(
                    qccl.ArgumentError, match=r"interrupted a change .* continue_on\(\) or load a state"
                ):
                    call()
        else:
            outer.step()
        if by == "continue_on":
            outer.continue_on(comm)
            assert outer.steps == 1 and params.all() and (params == outer.common[0]).all()
        else:
            outer.load_state_dict(state)
            assert outer.steps == 0 and not params.any()
        params += 1 + comm.rank
        outer.step()
        return params.tobytes() + outer._velocity[0].tobytes()

    found = qccl.run_ranks(2, run)
    assert found[0] == found[1]


@on_ranks(2)
def test_ranks_that_were_all_interrupted_need_a_state(comm: qccl.Communicator) -> None:
    params = np.ones(3, np.float32)
    outer = qccl.DiLoCo(comm, params)
    state = outer.state_dict()
    params += 1
    interrupted(outer)
    for _ in range(2):
        with pytest.raises(qccl.ArgumentError, match="on every rank; load a state on all ranks"):
            outer.continue_on(comm)
    outer.load_state_dict(state)
    outer.step()
    assert (params == 1).all() and outer.steps == 1
