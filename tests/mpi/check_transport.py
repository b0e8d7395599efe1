"""The MPI transport. Run by tests/test_mpi.py on 1 to 4 ranks, which execute the same tests in step."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI
from threads import address

from qccl.bench.plain import plain_allreduce
from qccl.errors import ArgumentError, EngineError, MismatchError
from qccl.transports.mpi import MpiTransport


@pytest.fixture
def transport():
    made = MpiTransport.world(20)
    yield made
    made.close()


def wait_for(transport, tokens):
    left, idle = set(tokens), 0
    deadline = time.monotonic() + 10
    while left:
        left -= set(transport.poll(idle=idle))
        idle += 1
        assert time.monotonic() < deadline, left


def memory_of(x):
    return address(x), x.nbytes


def test_ranks(transport):
    world = MPI.COMM_WORLD
    assert (transport.name, transport.rank, transport.size) == ("mpi", world.rank, world.size)
    assert (transport.local_rank, transport.local_size) == (world.rank, world.size)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_000])
def test_everyone_to_everyone(transport, nbytes):
    t = transport
    peers = [p for p in range(t.size) if p != t.rank]
    sent = {p: np.full(nbytes, 16 * t.rank + p, np.uint8) for p in peers}
    got = {p: np.zeros(nbytes, np.uint8) for p in peers}
    for p in peers:
        t.receive(p, 5, *memory_of(got[p]), ("in", p))
    for p in peers:
        t.send(p, 5, *memory_of(sent[p]), ("out", p))
    wait_for(t, [("in", p) for p in peers] + [("out", p) for p in peers])
    assert all((got[p] == 16 * p + t.rank).all() for p in peers)
    assert not t.poll(idle=0)


def test_order_of_equal_tags(transport):
    t = transport
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    out = [np.full(8, i, np.uint8) for i in range(20)]
    got = [np.zeros(8, np.uint8) for _ in range(20)]
    for i in range(20):
        t.send(after, 5, *memory_of(out[i]), i)
        t.receive(before, 5, *memory_of(got[i]), 100 + i)
    wait_for(t, [*range(20), *range(100, 120)])
    assert [int(g[0]) for g in got] == list(range(20))


@pytest.mark.parametrize(("sent", "posted"), [(4, 8), (8, 4), (0, 4), (200_000, 100_000), (100_000, 200_000)])
def test_unequal_sizes(sent, posted):
    if sent > posted and "Open MPI" in MPI.Get_library_version():
        pytest.skip("Open MPI writes past the end of a receive that is too small (the engine never posts one)")
    t = MpiTransport.world(20)
    try:
        x, y, other = np.ones(sent, np.uint8), np.zeros(posted, np.uint8), np.zeros(3, np.uint8)
        if t.rank == 0 and t.size > 1:
            t.receive(1, 1, *memory_of(y), "bad")
            t.receive(1, 2, *memory_of(other), "good")
            t.allgather(b"", 10)
            with pytest.raises(MismatchError, match="sent"):
                wait_for(t, ["bad"])
            wait_for(t, ["good"])
        else:
            t.allgather(b"", 10)
            if t.rank == 1:
                t.send(0, 1, *memory_of(x), "x")
                t.send(0, 2, *memory_of(other), "other")
                wait_for(t, ["x", "other"])
        t.allgather(b"", 10)
    finally:
        t.close()


def test_allgather_and_split(transport):
    t = transport
    assert t.allgather(bytes([t.rank]) * t.rank, 10) == [bytes([r]) * r for r in range(t.size)]
    part = t.split(t.rank % 2, -t.rank, 10)
    mine = [r for r in range(t.size) if r % 2 == t.rank % 2][::-1]
    assert (part.rank, part.size) == (mine.index(t.rank), len(mine))
    assert part.allgather(bytes([t.rank]), 10) == [bytes([r]) for r in mine]
    part.close()
    part.close()
    alone = t.split(0 if t.rank == 0 else None, 0, 10)
    assert (alone is None) == (t.rank != 0)
    if alone:
        alone.close()


def test_many_groups_leave_nothing_behind():
    """MPICH has about 2000 communicators for all; more ranks than cores make each slow."""
    for _ in range(2100 if MPI.COMM_WORLD.size == 1 else 20):
        MpiTransport.world(20).close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_plain_allreduce(transport, op, dtype):
    t = transport
    inputs = np.stack([np.arange(9).astype(dtype) * (r + 1) * (-1) ** r for r in range(t.size)])
    x, y = inputs[t.rank].copy(), np.zeros(9, dtype)
    allreduce = plain_allreduce(t)
    allreduce(address(x), address(y), 9, dtype, op)
    allreduce(address(x), address(x), 9, dtype, op)
    np.testing.assert_array_equal(y, getattr(inputs, op)(axis=0))
    np.testing.assert_array_equal(x, y)


def test_refusals(transport):
    with pytest.raises(ArgumentError, match="avg"):
        plain_allreduce(transport)(0, 0, 1, "float32", "avg")
    with pytest.raises(ArgumentError, match="intracommunicator"):
        MpiTransport.from_mpi("world")
    with pytest.raises(ArgumentError, match="intracommunicator"):
        MpiTransport.from_mpi(MPI.COMM_NULL)


def test_mpi_errors_keep_message_and_code(transport):
    with pytest.raises(EngineError, match=r"MPI: .*rank") as info:
        transport.send(transport.size, 1, *memory_of(np.zeros(1, np.uint8)), 0)
    assert MPI.Get_error_class(info.value.code) == MPI.ERR_RANK
    assert isinstance(info.value.__cause__, MPI.Exception)


def test_nothing_is_written_after_an_abort():
    """The memory of a receive that was posted is the caller's again."""
    world = MPI.COMM_WORLD
    t = MpiTransport.world(20)
    x = np.zeros(1000, np.uint8)
    if t.rank == 0 and t.size > 1:
        t.receive(1, 5, *memory_of(x), "in")
        t.abort("on purpose")
    world.Barrier()
    if t.rank == 1:
        t.send(0, 5, *memory_of(np.ones(1000, np.uint8)), "out")
        t.poll(idle=0)
    for _ in range(20):  # MPI moves what has been sent
        world.Barrier()
        time.sleep(0.005)
    assert not x.any()
    t.close()


def test_a_closed_transport_refuses():
    t = MpiTransport.world(20)
    t.close()
    with pytest.raises(EngineError, match="closed"):
        t.send(0, 1, *memory_of(np.zeros(1, np.uint8)), 0)


def test_groups_of_one_rank_on_purpose():
    world = MPI.COMM_WORLD
    for comm in (MPI.COMM_SELF, MPI.COMM_SELF.Dup(), world.Split(world.rank)):
        made = MpiTransport.from_mpi(comm, 20)
        assert (made.rank, made.size) == (0, 1)
        made.close()
