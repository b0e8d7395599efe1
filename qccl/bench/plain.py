"""The all-reduce of the library under a transport, without compression: the baseline of ``qccl-bench allreduce``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from qccl.dtypes import get
from qccl.errors import ArgumentError, PeerLost

__all__ = ["plain_allreduce", "plain_nccl_allreduce"]

#: of NCCL
_NCCL_OPS = {"sum": 0, "max": 2, "min": 3}
_GATHER_SECONDS = 60.0

AllReduce = Callable[[int, int, int, str, str], object]


def plain_allreduce(transport: Any) -> AllReduce:
    """A blocking all-reduce ``(source, target, count, dtype, op)`` among the ranks of a host transport.

    Equal addresses mean in place. A transport without an all-reduce of its own gathers the values and combines them.
    """
    return {"mpi": _mpi, "torch": _gloo}.get(transport.name, _gathered)(transport)


def plain_nccl_allreduce(transport: Any, stream: int) -> AllReduce:
    """NCCL's all-reduce on ``stream``; as plain_allreduce(), but it does not block."""

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        transport.comm.allReduce(source, target, count, get(dtype).nccl, _chosen(_NCCL_OPS, op, "NCCL"), stream)

    return allreduce


def _chosen(table: dict[str, Any], name: str, library: str) -> Any:
    if name not in table:
        raise ArgumentError(f"the all-reduce of {library} is compared for {', '.join(table)}, not for {name}")
    return table[name]


def _mpi(transport: Any) -> AllReduce:
    """MPI_Allreduce, which has no deadline."""
    from mpi4py import MPI

    ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
    known = {"float32": MPI.FLOAT, "float16": MPI.FLOAT16_T, "bfloat16": MPI.BFLOAT16_T}
    datatypes = {name: datatype for name, datatype in known.items() if datatype != MPI.DATATYPE_NULL}

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        datatype = _chosen(datatypes, dtype, "this MPI library")
        mpi_op, nbytes = _chosen(ops, op, "MPI"), count * datatype.Get_size()
        given = MPI.IN_PLACE if source == target else [MPI.memory.fromaddress(source, nbytes), count, datatype]
        transport.comm.Allreduce(given, [MPI.memory.fromaddress(target, nbytes), count, datatype], mpi_op)

    return allreduce


def _gloo(transport: Any) -> AllReduce:
    import torch
    import torch.distributed as dist

    from qccl.transports.torch import bytes_at, keep_alive

    ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    dtypes = {"float32": torch.float32, "float16": torch.float16}

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        element, options = _chosen(dtypes, dtype, "gloo"), dist.AllreduceOptions()
        options.reduceOp = _chosen(ops, op, "gloo")
        if source != target:
            ctypes.memmove(target, source, count * element.itemsize)
        values = bytes_at(target, count * element.itemsize).view(element)
        try:
            keep_alive(transport.group.allreduce([values], options)).wait()
        except RuntimeError as error:
            raise PeerLost(f"gloo's all-reduce failed: {error}") from error

    return allreduce


def _gathered(transport: Any) -> AllReduce:
    combine = {"sum": np.add, "min": np.minimum, "max": np.maximum}

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        element = _chosen({"float32": np.float32, "float16": np.float16}, dtype, transport.name)
        function = _chosen(combine, op, transport.name)
        data = ctypes.string_at(source, count * np.dtype(element).itemsize)
        items = transport.allgather(data, _GATHER_SECONDS)
        values = np.frombuffer(items[0], element)
        for item in items[1:]:
            values = function(values, np.frombuffer(item, element))
        ctypes.memmove(target, values.ctypes.data, len(data))

    return allreduce
