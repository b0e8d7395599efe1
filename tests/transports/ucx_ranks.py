"""What tests whose bodies are ranks over UCX share: they connect, call, and go on in a next group."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import machines
import numpy as np
import patience

import qccl


def connect(rank: int, size: int, address: str, timeout: float = 30.0) -> qccl.Communicator:
    machines.pretend(rank)
    comm = qccl.init("host", timeout * patience.factor(), rank=rank, size=size, address=address)
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (rank, size, rank, size)
    assert comm.transport.name == (os.environ.get("QCCL_TRANSPORT", "ucx") if size > 1 else "loopback")
    return comm


def processes_of(comm: qccl.Communicator) -> list[int]:
    """The ranks' processes."""
    return [int(note) for note in comm.allgather(str(os.getpid()).encode())]


def wait_for_the_end(*processes: int) -> None:
    """Until these have ended, and the test has reaped them."""
    patience.wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


def call_until_it_fails(comm: qccl.Communicator, count: int = 200_000) -> Exception:
    x = np.ones(count, np.float32)
    try:
        while True:
            comm.quantized_allreduce(x, op="avg")
    except qccl.QcclError as error:
        return error


def check_sum(comm: qccl.Communicator) -> None:
    x = np.full(50_000, comm.rank + 1, np.float32)
    assert (comm.quantized_allreduce(x) == comm.size * (comm.size + 1) / 2).all()


def next_group(comm: qccl.Communicator) -> qccl.Communicator:
    """Every rank has made its calls before one of them ends the group."""
    with contextlib.suppress(qccl.PeerLost):
        comm.barrier()
    return comm.shrink()
