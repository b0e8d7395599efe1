"""What a group that follows another one takes over: the state of stateful codecs; and transports that cannot."""

from __future__ import annotations

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl import codecs
from qccl.base.dtypes import BFLOAT16, FLOAT32
from qccl.codecs.floats import from_float32
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.feedback import sums_of
from qccl.communicator.state import Forms, StateStore
from qccl.engine.control import Block

CALL = "allreduce(algorithm=two_round)"


def schedule(rank: int, size: int, algorithm: str, codec: str = "minmax4+ef+nesterov"):
    spec = AllReduceSpec.from_arguments(10_000, "float32", codecs.get(codec), 1024, algorithm=algorithm)
    return spec.schedule(rank, size, in_place=True)


def covered(parts, count: int = 10_000) -> np.ndarray:
    marks = np.zeros(count, np.int64)
    for name, start, stop in parts:
        assert name == "residual"
        marks[start:stop] += 1
    return marks


@pytest.mark.parametrize("size", [2, 3])
def test_each_element_of_a_sum_has_one_owner(size):
    marks = sum(covered(sums_of(schedule(rank, size, "two_round"))) for rank in range(size))
    assert (marks == 1).all()


def test_where_nobody_encodes_sums_there_is_no_owner():
    assert not sums_of(schedule(0, 3, "one_shot"))
    assert not sums_of(schedule(0, 3, "two_round", "minmax4"))


def values(store: StateStore, key: str = "k") -> dict[str, np.ndarray]:
    return store.save()[key]["values"]


def used(rank: int, size: int, forms: Forms, sums, *, lr: float | None = None) -> StateStore:
    """A state whose values are all ones."""
    store = StateStore(rank, size, Block)
    for array in store.take("k", CALL, forms, lr, sums).memory.values():
        array.memory.write(from_float32(np.ones(array.count, np.float32), array.dtype).tobytes())
    return store


def test_residuals_of_own_values_stay_and_those_of_sums_are_zero():
    forms = {"residual": (100, BFLOAT16), "momentum": (100, FLOAT32)}
    old = used(2, 3, forms, [("residual", 60, 80), ("residual", 80, 100)], lr=0.5)
    new = StateStore(1, 2, Block)
    new.carry_over(old)
    assert (values(new)["residual"] == [1] * 60 + [0] * 40).all() and (values(new)["momentum"] == 1).all()
    assert (values(old)["residual"] == 1).all(), "it is a copy"
    # the first call may choose another algorithm, and this rank owns other elements
    with pytest.raises(qccl.ArgumentError, match="were made with lr"):
        new.take("k", "allreduce(algorithm=one_shot)", forms, None, [("residual", 50, 100)])
    new.take("k", "allreduce(algorithm=one_shot)", forms, 0.5, [("residual", 50, 100)])
    assert (values(new)["residual"] == [1] * 50 + [0] * 50).all() and (values(new)["momentum"] == 1).all()
    with pytest.raises(qccl.ArgumentError, match="belongs to allreduce"):
        new.take("k", CALL, forms, 0.5)
    third = StateStore(0, 1, Block)
    third.carry_over(new)
    assert (values(third)["residual"] == [1] * 50 + [0] * 50).all()


def test_state_that_does_not_fit_the_call_is_dropped():
    new = StateStore(0, 1, Block)
    new.carry_over(used(0, 2, {"residual": (100, FLOAT32)}, []))
    new.take("k", CALL, {"residual": (50, FLOAT32)}, None)
    assert (values(new)["residual"] == np.zeros(50)).all()


def test_momenta_stay_while_a_rank_is_alone_and_has_no_residuals():
    both, alone = {"residual": (100, BFLOAT16), "momentum": (100, FLOAT32)}, {"momentum": (100, FLOAT32)}
    one = StateStore(0, 1, Block)
    one.carry_over(used(0, 2, both, [("residual", 0, 50)]))
    one.take("k", "alone", alone, None)
    assert [*values(one)] == ["momentum"] and (values(one)["momentum"] == 1).all()
    two = StateStore(0, 2, Block)
    two.carry_over(one)
    two.take("k", CALL, both, None, [("residual", 0, 50)])
    assert (values(two)["momentum"] == 1).all() and (values(two)["residual"] == 0).all()


def test_state_that_no_call_has_used_is_not_carried_over():
    """Nobody knows which of its residuals are those of sums."""
    loaded = StateStore(0, 2, Block)
    loaded.load(used(0, 2, {"residual": (10, FLOAT32)}, []).save())
    new = StateStore(0, 1, Block)
    new.carry_over(loaded)
    assert new.save() == {}


@pytest.mark.parametrize("name", ["shrink", "grow"])
@on_ranks(2)
def test_threads_cannot_make_another_group(comm, name):
    with pytest.raises(qccl.EngineError, match=rf"{name}\(\) is not possible over loopback; use UCX"):
        getattr(comm, name)()
    assert comm.quantized_allreduce(np.ones(10, np.float32))[0] == 2
