"""A rank whose process ends behind a call that has barely begun still sends what others wait for. 2 or more ranks."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "gpu"))

import fake_cuda
import fake_kernels
import numpy as np
import processes

installed = fake_cuda.installed(fake_cuda.World(1), fake_kernels.work)
installed.__enter__()  # and it stays so to the end

from device import Apart  # noqa: E402

from qccl.communicator.communicator import Communicator  # noqa: E402
from qccl.engine.cuda import CudaBackend  # noqa: E402

comm = Communicator._from_transport(Apart(processes.connect()), 20.0, CudaBackend)
x = fake_cuda.array(np.random.default_rng(comm.rank).standard_normal(50_000).astype(np.float32), 0)
work = comm.hierarchical_allreduce(
    x, node_ids=range(comm.size), inter="host", algorithm="two_round", chunk=2048, async_op=True
)
if comm.rank:
    work.synchronize()
    print(f"rank {comm.rank} has {hashlib.sha256(x.get().tobytes()).hexdigest()}", flush=True)
