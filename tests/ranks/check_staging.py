"""hierarchical_allreduce(inter="host") over processes: each has a fake GPU and is a node of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import fake_cuda
import fake_kernels
import numpy as np
import processes
import pytest

import qccl

CALLS: tuple[tuple[int, dict[str, Any]], ...] = (
    (5000, {"algorithm": "one_shot", "chunk": 512}),
    (50_000, {"algorithm": "two_round", "codec": "minmax4:bucket=64,rounding=stochastic,seed=3", "chunk": 2048}),
    (1, {"op": "avg", "layout": "sharded"}),
    (0, {}),
    (300_000, {"codec": "none", "op": "max"}),
)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent.parent / "gpu")])
    made = fake_cuda.World(3)
    with fake_cuda.installed(made, fake_kernels.work):
        yield made
    sys.modules.pop("device", None)


@pytest.fixture
def comm(world):
    from device import Apart

    from qccl.engine.cuda import CudaBackend

    transport = Apart(processes.connect(60.0))
    with qccl.Communicator._from_transport(transport, 60.0, CudaBackend) as made:
        yield made


def values(rank: int, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32)


def results(comm: qccl.Communicator, array: Any, read: Any) -> list[bytes]:
    found = []
    for seed, (count, how) in enumerate(CALLS):
        for _ in range(3):
            found.append(array(values(comm.rank, count, seed)))
            comm.hierarchical_allreduce(found[-1], node_ids=range(comm.size), inter="host", **how)
    comm.check()
    return [read(x) for x in found]


def test_the_hosts_bytes(comm):
    with qccl.init(backend="host", timeout=60.0) as host:
        expected = results(host, lambda x: x, lambda x: x.tobytes())
    assert results(comm, lambda x: fake_cuda.array(x, 0), lambda x: x.get().tobytes()) == expected


def test_a_deadline(comm, world):
    """Rank 0 is away: where it is missed, the streams that wait for it are let go."""
    if comm.size == 1:
        pytest.skip("there is nobody to wait for")
    x = fake_cuda.array(values(comm.rank, 5000, 0), 0)
    comm.hierarchical_allreduce(x, node_ids=range(comm.size), inter="host")
    comm.check()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(1.5)
        comm.abort("it was away")
        return
    with pytest.raises((qccl.CollectiveTimeout, qccl.PeerLost)):
        comm.hierarchical_allreduce(
            x, node_ids=range(comm.size), inter="host", timeout=0.5, async_op=True
        ).synchronize()
    world.finish(lambda: world.is_idle(0))
