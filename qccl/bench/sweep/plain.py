"""The baseline of ``qccl-bench allreduce``: the all-reduce of a communication library, without compression."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qccl.base.dtypes import get
from qccl.base.errors import ArgumentError, PeerLost
from qccl.meeting.launchers import detect

if TYPE_CHECKING:
    from qccl.communicator.communicator import Communicator

__all__ = ["LIBRARIES", "baseline", "load_mpi", "plain_allreduce", "plain_nccl_allreduce"]

#: NCCL's numbers of the operations
_NCCL_OPS = {"sum": 0, "max": 2, "min": 3}

AllReduce = Callable[[int, int, int, str, str], object]


def baseline(comm: Communicator, wanted: str | None = None) -> str:
    """Collective: choose the library whose all-reduce is the baseline: "mpi", "gloo", "nccl", or "none".

    It is the library under the transport. UCX and loopback have no all-reduce: then it is MPI if the ranks are also
    MPI's, and otherwise "none", qccl's own all-reduce without compression, the fastest one without MPI. ``wanted``,
    "mpi" or "none", takes precedence. Raises ArgumentError for "mpi" if the ranks are not MPI's.
    """
    own = str(comm.transport.name)
    if wanted == "none" or (own in (*LIBRARIES, "nccl") and wanted in (None, own)):
        return wanted or own
    for rank, reason in enumerate(comm.allgather(_no_mpi(comm).encode())):
        if reason and wanted:
            raise ArgumentError(f"--plain mpi: rank {rank}: {reason.decode()}; use --plain none, or leave --plain out")
        if reason:
            return "none"
    return "mpi"


def _no_mpi(comm: Communicator) -> str:
    """Say why the ranks of ``comm`` are not MPI's; an empty text if they are."""
    launcher = detect()
    if comm.size == 1 or launcher is None or not launcher.is_of_mpi or launcher.name == "srun":
        return "mpiexec did not start the ranks"
    if reason := load_mpi():
        return reason
    from mpi4py import MPI

    found = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    return "" if found == (comm.rank, comm.size) else "MPI's ranks are others: {} of {}".format(*found)


def load_mpi() -> str:
    """Load and initialize mpi4py's MPI. Returns the reason if that is impossible, otherwise an empty text."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be loaded ({error})"
    return "" if MPI.Is_initialized() else "MPI is not initialized"


def plain_allreduce(transport: Any, library: str | None = None) -> AllReduce:
    """Make a blocking all-reduce ``(source, target, count, dtype, op)`` among the ranks of a host transport.

    Equal addresses mean in place. ``library`` is "mpi" or "gloo"; None: the transport's.
    """
    return LIBRARIES[library or transport.name](transport)


def plain_nccl_allreduce(transport: Any, stream: int) -> AllReduce:
    """Make NCCL's all-reduce on ``stream``, like plain_allreduce(); it does not block."""

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        transport.comm.allReduce(source, target, count, get(dtype).nccl, _chosen(_NCCL_OPS, op, "NCCL"), stream)

    return allreduce


def _chosen(table: dict[str, Any], name: str, library: str) -> Any:
    if name not in table:
        raise ArgumentError(f"the all-reduce of {library} is compared for {', '.join(table)}, not for {name}")
    return table[name]


def _mpi(transport: Any) -> AllReduce:
    """Make MPI_Allreduce, which has no deadline, on MPI's world if the transport is not MPI."""
    from mpi4py import MPI

    comm = transport.comm if transport.name == "mpi" else MPI.COMM_WORLD
    ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
    known = {"float32": MPI.FLOAT, "float16": MPI.FLOAT16_T, "bfloat16": MPI.BFLOAT16_T}
    datatypes = {name: datatype for name, datatype in known.items() if datatype != MPI.DATATYPE_NULL}

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        datatype = _chosen(datatypes, dtype, "this MPI library")
        mpi_op, nbytes = _chosen(ops, op, "MPI"), count * datatype.Get_size()
        given = MPI.IN_PLACE if source == target else [MPI.memory.fromaddress(source, nbytes), count, datatype]
        comm.Allreduce(given, [MPI.memory.fromaddress(target, nbytes), count, datatype], mpi_op)

    return allreduce


def _gloo(transport: Any) -> AllReduce:
    import torch
    import torch.distributed as dist

    from qccl.transports.gloo import bytes_at, keep_alive

    ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    dtypes = {"float32": torch.float32, "float16": torch.float16}

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        element, options = _chosen(dtypes, dtype, "gloo"), dist.AllreduceOptions()
        options.reduceOp = _chosen(ops, op, "gloo")
        if source != target:
            ctypes.memmove(target, source, count * element.itemsize)
        values = bytes_at(target, count * element.itemsize).view(element)
        try:
            keep_alive(transport.group, transport.group.allreduce([values], options)).wait()
        except RuntimeError as error:
            raise PeerLost(f"gloo's all-reduce failed: {error}") from error

    return allreduce


#: libraries with an all-reduce, by the names of their transports
LIBRARIES: dict[str, Callable[[Any], AllReduce]] = {"mpi": _mpi, "gloo": _gloo}
