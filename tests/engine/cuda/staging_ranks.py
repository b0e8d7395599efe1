"""Ranks on fake GPUs that met over loopback, and calls of theirs through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cuda_ranks
from cuda_ranks import values

import qccl
from qccl.transports.loopback import LoopbackGroup


def ranks(n: int, fn: Callable[[qccl.Communicator], Any], *, timeout: float = 60.0) -> list[Any]:
    """What ``fn(comm)`` returned or raised on each of ``n`` GPUs that met over loopback, as they would over MPI."""
    from qccl.engine.cuda import CudaBackend
    from qccl.engine.cuda.nccl import NcclTransport

    group = LoopbackGroup(n)

    def make(rank: int) -> qccl.Communicator:
        transport = NcclTransport.from_group(group.transport(rank), rank, timeout)
        return qccl.Communicator._from_transport(transport, timeout, CudaBackend)

    return cuda_ranks.ranks(n, fn, make=make)


def options(comm: qccl.Communicator) -> dict[str, Any]:
    """For ranks that are each alone in a node."""
    return {"node_ids": list(range(comm.size)), "codec": "minmax8", "inter": "host", "chunk": 256}


def staged(comm: qccl.Communicator, x: Any, out: Any = None, **how: Any) -> Any:
    """A call of such ranks."""
    return comm.hierarchical_allreduce(x, out, **options(comm) | how)


def exact(n: int, *, seeds: Sequence[int] = (0,), count: int = 3000, **how: Any) -> list[bytes]:
    """The host's results of such calls."""

    def run(comm: qccl.Communicator) -> list[bytes]:
        return [staged(comm, values(comm.rank, count, seed), **how).tobytes() for seed in seeds]

    return qccl.run_ranks(n, run)[0]
