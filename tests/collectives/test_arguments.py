"""Arguments other than arrays: the documented error on every rank that gave a bad one, and nothing changes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

COUNT = 3000


def call_with(**arguments):
    """A rank's function: try the call, return the error, and check that x is as it was and the group still works."""

    def run(comm):
        x = np.arange(COUNT, dtype=np.float32)
        before = x.copy()
        with pytest.raises(qccl.QcclError) as caught:
            comm.quantized_allreduce(x, **arguments)
        np.testing.assert_array_equal(x, before)
        y = np.full(10, comm.rank + 1, np.float32)
        comm.quantized_allreduce(y)
        assert (y == 3).all()
        return caught.value

    return run


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"codec": "minmax9"}, qccl.CodecError, "1"),
        ({"codec": {"compressor": "minmax", "bits": "9"}}, qccl.CodecError, "bits"),
        ({"codec": 8}, qccl.CodecError, "string"),
        ({"op": "product"}, qccl.ArgumentError, "avg"),
        ({"op": 1}, qccl.ArgumentError, "sum (0)"),
        ({"algorithm": "ring"}, qccl.ArgumentError, "two_round"),
        ({"chunk": 0}, qccl.ArgumentError, "positive"),
        ({"chunk": True}, qccl.ArgumentError, "integer"),
        ({"op": False}, qccl.ArgumentError, "sum (0)"),
        ({"timeout": -1.0}, qccl.ArgumentError, "positive"),
        ({"timeout": float("inf")}, qccl.ArgumentError, "at most"),
        ({"timeout": "5"}, qccl.ArgumentError, "'5'"),
        ({"nonfinite": "ignore"}, qccl.ArgumentError, "propagate"),
        ({"dtype": "float16"}, qccl.InvalidBufferError, "float32"),
        ({"dtype": "float64"}, qccl.ArgumentError, "bfloat16"),
        ({"op": np.ones(2)}, qccl.ArgumentError, "avg"),
        ({"stream": np.ones(2)}, qccl.ArgumentError, "no streams"),
        ({"trace": 3}, qccl.ArgumentError, "a list"),
    ],
)
def test_arguments(arguments, kind, message):
    for error in qccl.run_ranks(2, call_with(**arguments)):
        assert type(error) is kind
        assert message in str(error)


@pytest.mark.parametrize("wrong", [{1: 2}, "1", b"1", 1], ids=repr)
@on_ranks(2)
def test_what_is_no_list_of_integers(comm, wrong):
    x = np.ones(8, np.float32)
    with pytest.raises(qccl.ArgumentError, match="send_to must be a list of integers, not"):
        comm.peer_exchange(x, send_to=wrong, replicas={})
    with pytest.raises(qccl.ArgumentError, match="counts must be a list of integers, not"):
        comm.quantized_reduce_scatter(x, counts=wrong)


@on_ranks(2, timeout=np.float64(20))
def test_numbers_of_other_libraries_are_taken_as_pythons(comm):
    x = np.full(64, comm.rank + 1, np.float32)
    found = comm.quantized_allreduce(
        *(x, np.empty_like(x)),
        **{"codec": "minmax8+ef", "key": "x", "lr": np.float32(0.5), "op": np.int64(0), "chunk": np.int32(64)},
        timeout=np.float32(20),
    )
    assert (found == 3).all()
    for lrs in ((np.array(0.5), 0.5), (1, 1.0), (np.float64(0.1), 0.1)):
        comm.quantized_allreduce(x, out=found, codec="minmax8+ef", key="x", lr=lrs[comm.rank])
    comm.quantized_broadcast(x, root=np.int64(1))
    assert (x == 2).all()
    for lr in (np.float32("nan"), np.ones(1), "0.5", True, np.True_):
        with pytest.raises(qccl.ArgumentError, match="lr must be"):
            comm.quantized_allreduce(x, codec="minmax8+ef", key="x", lr=lr)
    plan = comm.plan("allreduce", np.int64(64)).bind(x)
    for timeout in (np.float64("nan"), np.ones(1), -1):
        with pytest.raises(qccl.ArgumentError, match="timeout must be"):
            plan.start(timeout=timeout)
    with pytest.raises(qccl.ArgumentError, match="a list"):
        plan.start(trace=1)
    with pytest.raises(qccl.ArgumentError, match="no plan for"):
        comm.plan([], 5)
    work = plan.start(timeout=np.int64(20))
    for timeout in ("1", float("nan"), 0):
        with pytest.raises(qccl.ArgumentError, match="timeout must be"):
            work.wait(timeout)
    work.wait(np.float32(20))
    assert (x == 4).all()


#: what most ranks give, what rank 0 gives, and what the error says of rank 0's call
DISAGREEMENTS = {
    "count": ({}, {"count": COUNT + 1}, "count=3001,"),
    "count, zero": ({}, {"count": 0}, "count=0,"),
    "count, other number of chunks": ({}, {"count": 100 * COUNT}, "count=300000,"),
    "dtype": ({}, {"dtype": np.float16}, "dtype=float16"),
    "codec": ({}, {"codec": "minmax4"}, "codec=minmax4"),
    "codec parameter": ({"codec": "minmax8:bucket=512"}, {"codec": "minmax8:bucket=256"}, "bucket=256"),
    "op": ({}, {"op": "max"}, "op=max"),
    "chunk": ({}, {"chunk": 64}, "chunk=64"),
    "algorithm": ({"algorithm": "one_shot"}, {"algorithm": "two_round"}, "algorithm=two_round"),
}


@pytest.mark.parametrize("cached", [False, True], ids=["new plan", "plan cached on one rank"])
@pytest.mark.parametrize("what", DISAGREEMENTS)
@on_ranks(3, timeout=30.0)
def test_ranks_disagree(comm, agreed: threading.Barrier, what, cached):
    usual, other, text = DISAGREEMENTS[what]
    mine = dict(usual if comm.rank else other)
    x = np.ones(mine.pop("count", COUNT), mine.pop("dtype", np.float32))
    if cached:  # rank 0 has made its plan before, with others who agreed
        theirs = dict(other)
        y = np.ones(theirs.pop("count", COUNT), theirs.pop("dtype", np.float32))
        comm.quantized_allreduce(y, **theirs)
        agreed.wait(20)  # a rank still in this call would learn of the next one's failure in it
    with pytest.raises(qccl.MismatchError, match=r"rank \d.*called allreduce") as caught:
        comm.quantized_allreduce(x, timeout=20.0, **mine)
    assert text in str(caught.value)
    assert (x == 1).all()  # nothing was written
    with pytest.raises(qccl.MismatchError, match="earlier"):
        comm.quantized_allreduce(x)


def test_backend_that_does_not_exist():
    with pytest.raises(qccl.ArgumentError, match="host"):
        qccl.init(backend="tpu")
    with pytest.raises(qccl.ArgumentError, match="timeout"):
        qccl.init(backend="host", timeout=0)
    with pytest.raises(qccl.ArgumentError, match="device must be an integer, not 'gpu'"):
        qccl.init(device="gpu")


@pytest.mark.parametrize(("color", "key"), [(1 << 40, 0), (-1, 0), (0, 1 << 40), ("a", 0), (0, None)])
@on_ranks(1)
def test_groups_that_cannot_be(comm, color, key):
    with pytest.raises(qccl.ArgumentError, match=r"color|key"):
        comm.split(color, key)
    assert comm.split(0).size == 1
