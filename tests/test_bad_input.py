"""Bad input gets the documented error, on every rank that gave it, and changes nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

import qccl
from qccl.arguments import op_of

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
        ({"codec": "minmax0"}, qccl.CodecError, "8"),
        ({"codec": "minmax8:bucket=0"}, qccl.CodecError, "bucket"),
        ({"codec": "minmax8:bucket=12"}, qccl.CodecError, "multiples of 8"),
        ({"codec": "minmax8:buckt=64"}, qccl.CodecError, "'bucket'"),
        ({"codec": "minmx8"}, qccl.CodecError, "'minmax'"),
        ({"codec": "minmax8:rounding=up"}, qccl.CodecError, "stochastic"),
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


def arrays():
    read_only = np.zeros(COUNT, np.float32)
    read_only.flags.writeable = False
    return {
        "float64": (np.zeros(COUNT), "float64; .* convert it"),
        "int32": (np.zeros(COUNT, np.int32), "int32"),
        "uint16": (np.zeros(COUNT, np.uint16), 'dtype="bfloat16"'),
        "strided": (np.zeros(2 * COUNT, np.float32)[::2], "contiguous"),
        "reversed": (np.zeros(COUNT, np.float32)[::-1], "contiguous"),
        "a hole": (np.zeros((30, 100), np.float32)[:, :50], "contiguous"),
        "read only": (read_only, "out="),
        "a list": ([0.0] * COUNT, "list"),
        "None": (None, "NoneType"),
        "a number": (np.float32(1), "x is read-only.* a single number"),
        "text": ("minmax4", "x is the text 'minmax4'; .* codec='minmax4'"),
    }


@pytest.mark.parametrize("which", arrays())
def test_arrays(which):
    x, message = arrays()[which]

    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match=message):
            comm.quantized_allreduce(x)
        if which not in ("read only", "None"):  # as out they are another error, or none at all
            with pytest.raises(qccl.InvalidBufferError):
                comm.quantized_allreduce(np.zeros(COUNT, np.float32), out=x)

    qccl.run_ranks(2, run)


def test_one_array_where_a_list_is_needed():
    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match=r"xs\[0\] is read-only.* a single number.* pass \[x\]"):
            comm.quantized_allreduce_coalesced(np.zeros(COUNT, np.float32))

    qccl.run_ranks(1, run)


def test_a_wrong_size_is_shown_beside_that_of_the_other_array():
    def run(comm):
        x = np.zeros(100, np.float32)
        with pytest.raises(qccl.ArgumentError, match=r"x has 100 elements, .* needs 50 on rank .; out has 100"):
            comm.quantized_all_gather(x, out=np.empty_like(x))
        part = np.zeros(60, np.float32)
        with pytest.raises(qccl.ArgumentError, match=r"out has 60 elements, .* needs 50 on rank .; x has 100"):
            comm.quantized_reduce_scatter(x, out=part)

    qccl.run_ranks(2, run)


def test_an_unreadable_array_is_told_why_once():
    """With the reason of its library."""

    class Broken:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **given):
            raise BufferError("it is on fire")

    def run(comm):
        for x, message in (
            ([0.0], "x is of type list, .* (it has neither __dlpack__ nor a buffer); pass"),
            (Broken(), "x is of type Broken, .* (it is on fire); pass"),
            (np.zeros(2, "M8[s]"), "x is of type ndarray, .* (DLPack only supports .*); pass"),
        ):
            pattern = message.replace("(", r"\(").replace(")", r"\)")
            with pytest.raises(qccl.InvalidBufferError, match=pattern) as caught:
                comm.quantized_allreduce(x)
            assert str(caught.value).count("access to its memory") == 1

    qccl.run_ranks(1, run)


def test_a_sharded_jax_array():
    """It needs two devices, which JAX must be told of when it starts."""
    pytest.importorskip("jax")
    program = """
import jax, numpy as np, qccl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(jax.devices(), ("a",))
def run(comm):
    errors = []
    for spec in (PartitionSpec("a"), PartitionSpec()):
        x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, spec))
        try:
            comm.quantized_allreduce(x, out=np.empty(8, np.float32))
        except qccl.InvalidBufferError as error:
            errors.append(str(error))
        part = x.addressable_shards[0].data
        assert (comm.quantized_allreduce(part, out=np.empty(part.shape, np.float32)) == 2).all()
    return errors
for errors in qccl.run_ranks(2, run):
    print(*errors, sep="\\n")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("on 2 devices" in line and "x.addressable_shards[0].data" in line for line in lines)


def test_out_does_not_fit():
    def run(comm):
        x = np.ones(COUNT, np.float32)
        memory = np.zeros(2 * COUNT, np.float32)
        with pytest.raises(qccl.ArgumentError, match=r"3000 .* 2999"):
            comm.quantized_allreduce(x, out=np.zeros(COUNT - 1, np.float32))
        with pytest.raises(qccl.InvalidBufferError, match="overlap in part"):
            comm.quantized_allreduce(memory[:COUNT], out=memory[1 : COUNT + 1])
        with pytest.raises(qccl.InvalidBufferError, match="float16"):
            comm.quantized_allreduce(x, out=np.zeros(COUNT, np.float16))
        with pytest.raises(qccl.ArgumentError, match="lie differently"):
            comm.quantized_allreduce(np.ones((30, 100), np.float32), out=np.ones((30, 100), np.float32, order="F"))
        assert (memory == 0).all()

    qccl.run_ranks(2, run)


def test_numbers_of_other_libraries_are_taken_as_pythons():
    def run(comm):
        x = np.full(64, comm.rank + 1, np.float32)
        found = comm.quantized_allreduce(
            *(x, np.empty_like(x)),
            **{"codec": "minmax8+ef", "key": "x", "lr": np.float32(0.5), "op": np.int64(0), "chunk": np.int32(64)},
            timeout=np.float32(20),
        )
        assert (found == 3).all()
        comm.quantized_allreduce(x, out=found, codec="minmax8+ef", key="x", lr=np.array(0.5) if comm.rank else 0.5)
        comm.quantized_broadcast(x, root=np.int64(1))
        assert (x == 2).all()
        for lr in (np.float32("nan"), np.ones(1), "0.5", True, np.True_, 0):
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

    qccl.run_ranks(2, run, timeout=np.float64(20))


def test_reductions_of_torch():
    distributed = pytest.importorskip("torch.distributed")
    reduce_op = distributed.ReduceOp
    given = {
        "sum": [0, "sum", reduce_op.SUM, reduce_op(reduce_op.SUM)],
        "avg": [4, "avg", "mean", reduce_op.AVG, reduce_op(reduce_op.AVG)],
        "min": [3, "min", reduce_op.MIN, reduce_op(reduce_op.MIN)],
        "max": [np.int64(2), "max", reduce_op.MAX, reduce_op(reduce_op.MAX)],
    }
    for name, each in given.items():
        assert {op_of(op) for op in each} == {name}
    for op in (reduce_op.PRODUCT, reduce_op(reduce_op.BXOR), distributed._make_nccl_premul_sum(2.0)):
        with pytest.raises(qccl.ArgumentError, match="is not supported"):
            op_of(op)

    def run(comm):
        x = np.full(8, comm.rank, np.float32)
        assert (comm.quantized_allreduce(x.copy(), op=reduce_op.MAX, codec="none") == 1).all()
        assert (
            comm.quantized_allreduce(x.copy(), op="mean" if comm.rank else reduce_op.AVG, codec="none") == 0.5
        ).all()
        y = np.empty_like(x)
        qccl.quantized_allreduce(x.ctypes.data, y.ctypes.data, 8, "float32", reduce_op.MIN, comm, codec="none")
        assert (y == 0).all()

    qccl.run_ranks(2, run)


def test_raw_pointers():
    def run(comm):
        x = np.ones(COUNT, np.float32)
        p = x.ctypes.data

        def call(*arguments, **more):
            return qccl.quantized_allreduce(*arguments, comm, **more)

        for arguments, message in {
            (0, p, COUNT, "float32", "sum"): "null",
            (p, 0, COUNT, "float32", "sum"): "null",
            (p + 1, p + 1, COUNT, "float32", "sum"): "aligned",
            (p, p + 4, COUNT - 1, "float32", "sum"): "overlap",
            (16, 16, COUNT, "float32", "sum"): "not all memory",
            (p, p, 1 << 44, "float32", "sum"): "not all memory",
            (p, p, (1 << 61) - 1, "float32", "sum"): "not all memory",
            (p, p, 1 << 61, "float32", "sum"): "not all memory",
            (p, p, 1 << 62, "float32", "sum"): "64-bit",
            (p, p, (1 << 63) + 1, "float16", "sum"): "64-bit",
            (p, p, 1 << 80, "float32", "sum"): "64-bit",
            (p + (1 << 64), p, COUNT, "float32", "sum"): "64-bit",
            (-16, -16, 0, "float32", "sum"): "64-bit",
            (1 << 64, 1 << 64, 0, "float32", "sum"): "64-bit",
            ("x", p, COUNT, "float32", "sum"): "an int, a ctypes.c_void_p or an array of ctypes, not str",
        }.items():
            with pytest.raises(qccl.InvalidBufferError, match=message):
                call(*arguments)
        for arguments, message in {
            (p, p, -1, "float32", "sum"): "-1",
            (p, p, 2.5, "float32", "sum"): "2.5",
            (p, p, COUNT, "float8", "sum"): "float8",
            (p, p, COUNT, 3, "sum"): "NCCL 7",
            (p, p, COUNT, "float32", 1): "sum",
        }.items():
            with pytest.raises(qccl.ArgumentError, match=message):
                call(*arguments)
        with pytest.raises(qccl.ArgumentError, match="stream"):
            call(p, p, COUNT, "float32", "sum", stream=5)
        with pytest.raises(qccl.ArgumentError, match="comm must be a Communicator"):
            qccl.quantized_allreduce(p, p, COUNT, "float32", "sum", None)
        with pytest.raises(qccl.ArgumentError, match="replicas must be a dict of pointers by rank, not list"):
            qccl.peer_exchange(p, COUNT, "float32", comm, send_to=[], replicas=[p])
        assert (x == 1).all()
        assert call(np.uint64(p), np.uint64(p), np.int64(COUNT), np.int8(7), np.int8(0)) is None
        assert (x == 2).all()
        call(0, 0, 0, "float32", "sum")  # nothing to read: null is fine

        arrays, address = [np.full(COUNT, value, np.float32) for value in range(20)], np.array(0)
        for array in arrays:  # another address at the same place in memory
            address[()] = array.ctypes.data
            call(address, address, COUNT, "float32", "sum", codec="none")
        assert [array[0] for array in arrays] == [2 * value for value in range(20)]

    qccl.run_ranks(2, run)


def test_raw_pointers_across_a_hole():
    """Both ends are memory of this process, and something between is not."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    size, private = ctypes.c_size_t(5 * page), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, ctypes.c_long(0))

    def unmap(first, pages):
        assert libc.munmap(ctypes.c_void_p(start + first * page), ctypes.c_size_t(pages * page)) == 0

    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match="not all memory"):
            qccl.quantized_allreduce(start, start, 5 * page // 4, "float32", "sum", comm)
        qccl.quantized_allreduce(start, start, 2 * page // 4, "float32", "sum", comm)
        qccl.quantized_allreduce(start + 3 * page, start + 3 * page, 2 * page // 4, "float32", "sum", comm)

    unmap(2, 1)
    try:
        qccl.run_ranks(1, run)
    finally:
        unmap(0, 2)
        unmap(3, 2)


def test_pointers_of_ctypes():
    def run(comm):
        x = (ctypes.c_float * 8)(*range(8))
        y = np.zeros(8, np.float32)
        call = partial(qccl.quantized_allreduce, datatype="float32", op="sum", comm=comm, codec="none")
        call(x, y.ctypes.data_as(ctypes.c_void_p), 8)
        assert (y == 2 * np.arange(8)).all()
        call(ctypes.c_void_p(y.ctypes.data), x, 8)
        assert list(x) == list(4 * np.arange(8))
        with pytest.raises(qccl.InvalidBufferError, match="null"):
            call(ctypes.c_void_p(), x, 8)
        with pytest.raises(qccl.InvalidBufferError, match="array of 32 bytes, but the call needs 36"):
            call(x, x, 9)
        work = call(y.ctypes.data, (ctypes.c_float * 8)(), 8, async_op=True)  # the Work keeps the array
        work.wait()

    qccl.run_ranks(2, run)


DISAGREEMENTS = {
    "count": ({}, {"count": COUNT + 1}),
    "count, zero": ({}, {"count": 0}),
    "count, other number of chunks": ({}, {"count": 100 * COUNT}),
    "dtype": ({}, {"dtype": np.float16}),
    "codec": ({}, {"codec": "minmax4"}),
    "codec parameter": ({"codec": "minmax8:bucket=512"}, {"codec": "minmax8:bucket=256"}),
    "op": ({}, {"op": "max"}),
    "algorithm": ({"algorithm": "one_shot"}, {"algorithm": "two_round"}),
}


@pytest.mark.parametrize("cached", [False, True], ids=["new plan", "plan cached on one rank"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_disagree(what, ranks, cached):
    usual, other = DISAGREEMENTS[what]
    agreed = threading.Barrier(ranks)

    def run(comm):
        mine = usual if comm.rank else other
        mine = dict(mine)
        x = np.ones(mine.pop("count", COUNT), mine.pop("dtype", np.float32))
        if cached:  # rank 0 has made its plan before, with others who agreed
            theirs = dict(other)
            y = np.ones(theirs.pop("count", COUNT), theirs.pop("dtype", np.float32))
            comm.quantized_allreduce(y, **theirs)
            agreed.wait(20)  # a rank still in this call would learn of the next one's failure in it
        with pytest.raises(qccl.MismatchError, match=r"rank \d"):
            comm.quantized_allreduce(x, timeout=20.0, **mine)
        assert (x == 1).all()  # nothing was written
        with pytest.raises(qccl.MismatchError, match="earlier"):
            comm.quantized_allreduce(x)

    qccl.run_ranks(ranks, run, timeout=30.0)


def test_rank_raises_before_the_call():
    def run(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        with pytest.raises(qccl.PeerLost):
            comm.quantized_allreduce(np.ones(COUNT, np.float32), timeout=20.0)

    with pytest.raises(KeyError, match="mine"):
        qccl.run_ranks(3, run, timeout=30.0)


def test_rank_stays_away():
    missed = threading.Semaphore(0)

    def run(comm):
        x = np.ones(COUNT, np.float32)
        if comm.rank != 1:
            with pytest.raises((qccl.CollectiveTimeout, qccl.PeerLost)) as caught:
                comm.quantized_allreduce(x, timeout=0.5)
            missed.release()
            return type(caught.value)
        assert all(missed.acquire(timeout=60) for _ in range(2))
        return None

    assert qccl.CollectiveTimeout in qccl.run_ranks(3, run, timeout=30.0)


def test_closed():
    def run(comm):
        comm.close()
        comm.close()
        for call in (
            lambda: comm.quantized_allreduce(np.ones(3, np.float32)),
            lambda: comm.plan("allreduce", 3),
            lambda: comm.split(0),
            comm.barrier,
        ):
            with pytest.raises(qccl.ArgumentError, match="closed"):
                call()

    qccl.run_ranks(2, run)


def test_groups_that_cannot_be():
    def run(comm):
        for color, key in [(1 << 40, 0), (-1, 0), (0, 1 << 40), ("a", 0), (0, None)]:
            with pytest.raises(qccl.ArgumentError, match=r"color|key"):
                comm.split(color, key)
        assert comm.split(0).size == 2

    qccl.run_ranks(2, run)


def test_plan_misuse():
    def run(comm):
        with pytest.raises(qccl.ArgumentError, match="allreduce"):
            comm.plan("alltoall", 3)
        plan = comm.plan("allreduce", COUNT)
        with pytest.raises(qccl.ArgumentError, match="bind"):
            plan.start()
        with pytest.raises(qccl.ArgumentError, match="start"):
            plan.wait()
        with pytest.raises(qccl.ArgumentError, match="3000"):
            plan.bind(np.ones(COUNT + 1, np.float32))
        plan.bind(np.ones(COUNT, np.float32))
        work = plan.start()
        with pytest.raises(qccl.ArgumentError, match="running"):
            plan.start()
        with pytest.raises(qccl.ArgumentError, match="running"):
            plan.bind(np.ones(COUNT, np.float32))
        assert plan.wait() is work.wait()

    qccl.run_ranks(2, run)


def test_a_plan_of_a_closed_communicator_says_so():
    def run(comm):
        plan = comm.plan("allreduce", COUNT).bind(np.ones(COUNT, np.float32))
        comm.close()
        with pytest.raises(qccl.ArgumentError, match="this communicator is closed"):
            plan.start()

    qccl.run_ranks(2, run)


def test_a_refused_bind_leaves_the_plan_as_it_was():
    def run(comm):
        memory = np.ones(COUNT + 10, np.float32)
        x, out = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
        plan = comm.plan("allreduce", COUNT).bind(x, out)
        with pytest.raises(qccl.InvalidBufferError, match="overlap"):
            plan.bind(memory[:COUNT], memory[10:])
        plan.start().wait()
        return out.tolist() == [2.0] * COUNT and memory.tolist() == [1.0] * (COUNT + 10)

    assert qccl.run_ranks(2, run) == [True] * 2


def test_backend_that_does_not_exist():
    with pytest.raises(qccl.ArgumentError, match="host"):
        qccl.init(backend="tpu")
    with pytest.raises(qccl.ArgumentError, match="timeout"):
        qccl.init(backend="host", timeout=0)
    with pytest.raises(qccl.ArgumentError, match="device must be an integer, not 'gpu'"):
        qccl.init(device="gpu")
