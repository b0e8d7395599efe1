"""The processes that run these checks in step: MPI's ranks, or with QCCL_TRANSPORT=ucx or wan those of any launcher."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import time
from typing import Any

from qccl.meeting import launchers, meetings
from qccl.meeting.network import Network
from qccl.transports.choice import wanted_transport
from qccl.transports.connect import connected_transport
from qccl.transports.connected import Protection

#: the transport that is tested
TRANSPORT = wanted_transport() or "mpi"
OVER_MPI = TRANSPORT == "mpi"
#: how the processes find each other over UCX: by the launcher's variables, or "torch" or "jax" by that library
FRAMEWORK = os.environ.get("QCCL_TEST_FRAMEWORK", "")

if OVER_MPI:
    import qccl.transports.mpi  # first: then qccl ends MPI, not mpi4py, which would do so in children of os.fork(), too

    MPI = qccl.transports.mpi.MPI
    RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    IS_OPEN_MPI = "Open MPI" in MPI.Get_library_version()
else:
    IS_OPEN_MPI = False
    launcher = launchers.detect()
    assert launcher is not None
    RANK, SIZE = launcher.rank, launcher.size

_SECONDS = 30.0


def connect(timeout: float = 20.0) -> Any:
    """Collective: a new transport of all processes."""
    if OVER_MPI:
        from qccl.transports.mpi import MpiTransport

        return MpiTransport.world(timeout)
    transport = connected_transport(TRANSPORT)
    how = (Network(is_local=True), Protection(bytes(range(32)))) if TRANSPORT == "wan" else ()
    return transport.meet(lambda address: _gather(address, timeout), timeout, *how)


def allgather(item: Any) -> list[Any]:
    """Collective: every process's item, apart from the transports that are tested."""
    if OVER_MPI:
        return MPI.COMM_WORLD.allgather(item)
    return [pickle.loads(each) for each in _gather(pickle.dumps(item), 5 * _SECONDS)]


def barrier() -> None:
    """Collective, and without a busy loop: a rank that spins would keep a core from those that still compute."""
    if not OVER_MPI:
        _gather(b"", 5 * _SECONDS)
        return
    others = MPI.COMM_WORLD.Ibarrier()
    while not others.Test():
        time.sleep(0.005)


def _connect_control() -> Any:
    from qccl.transports.ucx import UcxTransport

    if FRAMEWORK:
        distributed = importlib.import_module(f"{FRAMEWORK}.distributed")
        if FRAMEWORK == "torch":
            distributed.init_process_group("gloo")
        else:
            distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", SIZE, RANK)
    with contextlib.closing(meetings.of_launcher(launcher)) as meeting:
        return UcxTransport.meet(lambda address: meeting.gather(address, _SECONDS), _SECONDS)


def _gather(item: bytes, timeout: float) -> list[bytes]:
    return _control.allgather(item, timeout)


_control = None if OVER_MPI else _connect_control()
