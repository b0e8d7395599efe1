"""A job of MPI in which rank 1 of 3 fails, in the way that argv[1] names, while the others wait in an all-reduce."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import processes

import qccl
from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.transports import mpi

TIMEOUT = 2.0
PATIENCE = 30.0  # where no rank is to reach a deadline, however slow the machine is
FINALIZE_SECONDS = 20 if sys.argv[1] == "late" else 2  # the late rank comes while the others wait for it
mpi._FINALIZE_SECONDS = FINALIZE_SECONDS


def reduce(comm: qccl.Communicator, count: int) -> None:
    comm.quantized_allreduce(np.ones(count, np.float32), chunk=4096)


def fail(comm: qccl.Communicator, how: str) -> None:
    match how:
        case "raise" | "raise before a barrier" | "raise before an all-gather":
            raise ZeroDivisionError("on purpose")
        case "exit":
            sys.exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stop in the middle":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            while True:
                reduce(comm, 1 << 20)
        case "late":
            time.sleep(TIMEOUT + 3)
            reduce(comm, 1 << 20)
        case "late for a split":
            time.sleep(TIMEOUT + 3)
            comm.split(0)


def stay(comm: qccl.Communicator) -> None:
    """No failure: the others have long left."""
    comm.timeout = TIMEOUT  # of close()
    with comm:
        if comm.rank == 1:
            time.sleep(TIMEOUT + FINALIZE_SECONDS + 2)
    sys.stdout.write(f"rank {comm.rank} left\n")
    sys.stdout.flush()


def fork(comm: qccl.Communicator) -> None:
    """No failure: a child ends while a call is under way."""
    x = np.ones(1 << 20, np.float32)
    with comm:
        work = comm.quantized_allreduce(x, async_op=True)
        child = os.fork()
        if child == 0:
            try:
                work.wait()
            except qccl.EngineError:
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        work.wait()
        assert (x == 3).all()
        comm.barrier()
    sys.stdout.write(f"rank {comm.rank} left\n")
    sys.stdout.flush()


def main() -> None:
    how = sys.argv[1]
    comm = qccl.init(backend="host", timeout=PATIENCE)
    reduce(comm, 1000)
    processes.barrier()  # or a rank that is still in that call would hear of the failure there
    if how.startswith(("stop", "late")):
        comm.timeout = TIMEOUT
    if how == "stay":
        return stay(comm)
    if how == "fork":
        return fork(comm)
    if comm.rank == 1 and not how.startswith("late"):
        fail(comm, how)
    start = time.monotonic()
    try:
        if comm.rank == 1:
            fail(comm, how)
        if how == "late for a split":
            comm.split(0)
        if how == "raise before a barrier":
            comm.barrier()
        if how == "raise before an all-gather":
            comm.allgather(b"")
        while True:
            reduce(comm, 1 << 20)
    except (CollectiveTimeout, PeerLost) as error:
        seconds = time.monotonic() - start
        sys.stdout.write(f"rank {comm.rank} raised {type(error).__name__} after {seconds:.2f} s: {error}\n")
        sys.stdout.flush()
    if how == "late for a split" and comm.rank != 1:
        time.sleep(3 * TIMEOUT)  # live on: the end of the job would end the late rank's wait


main()
