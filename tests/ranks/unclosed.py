"""Ranks that end one after another without close(), where mpi4py, and not qccl, ends MPI.

With MALLOC_MMAP_THRESHOLD_=4096 the memory of a receive that is freed is inaccessible, and a message into it a crash.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI  # before qccl

import numpy as np  # isort: skip
import qccl  # isort: skip

how = sys.argv[1]
comm = qccl.Communicator.from_mpi(MPI.COMM_WORLD, timeout=20)
x = np.ones(2000, np.float32)
assert (comm.quantized_allreduce(x) == comm.size).all()
MPI.COMM_WORLD.Barrier()
if how == "closed early" and comm.rank == 0:
    comm.timeout = 0.01  # close() waits no longer for the others
    comm.close()
elif how == "in a call" and comm.rank == 0:
    work = comm.quantized_allreduce(x, async_op=True)
time.sleep(0.1 * comm.rank)
sys.stdout.write(f"rank {comm.rank} ends\n")
