"""What only MPI's transport has."""

from __future__ import annotations

import numpy as np
import processes
import pytest
from processes import RANK, SIZE
from threads import address

import qccl
from qccl.base.errors import ArgumentError, EngineError
from qccl.bench.sweep.plain import plain_allreduce

if not processes.OVER_MPI:
    pytest.skip("these ranks have no MPI", allow_module_level=True)

from mpi4py import MPI

from qccl.transports.mpi import MpiTransport


@pytest.fixture
def transport():
    made = MpiTransport.world(20)
    yield made
    made.close()


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
        transport.send(transport.size, 1, address(np.zeros(1, np.uint8)), 1, 0)
    assert MPI.Get_error_class(info.value.code) == MPI.ERR_RANK
    assert isinstance(info.value.__cause__, MPI.Exception)


def test_many_groups_leave_nothing_behind():
    """MPICH has about 2000 communicators for all; more ranks than cores make each slow."""
    for _ in range(2100 if SIZE == 1 else 20):
        MpiTransport.world(20).close()


def test_groups_of_one_rank_on_purpose():
    for comm in (MPI.COMM_SELF, MPI.COMM_SELF.Dup(), MPI.COMM_WORLD.Split(RANK)):
        made = MpiTransport.from_mpi(comm, 20)
        assert (made.rank, made.size) == (0, 1)
        made.close()


def test_reductions_of_mpi4py():
    with qccl.Communicator.from_mpi(MPI.COMM_WORLD) as comm:
        for op, wanted in ((MPI.SUM, SIZE * (SIZE - 1) / 2), (MPI.MIN, 0), (MPI.MAX, SIZE - 1)):
            x = np.full(8, RANK, np.float32)
            assert (comm.quantized_allreduce(x, op=op, codec="none") == wanted).all()
        for op in (MPI.PROD, MPI.LOR, MPI.OP_NULL):
            with pytest.raises(qccl.ArgumentError, match="is not supported"):
                comm.quantized_allreduce(x, op=op)
