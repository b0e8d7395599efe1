"""Error feedback and momentum in calls on the fake GPU. test_ptx_kernels.py has the kernels."""

from __future__ import annotations

import threading

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import on_gpus, ranks

import qccl

CODEC = "minmax3:bucket=64+ef:beta=0.9,dtype=bfloat16+nesterov"


def steps(comm: qccl.Communicator, device: bool) -> tuple[list[bytes], dict]:
    found = []
    for step in range(6):
        x = np.random.default_rng([step, comm.rank]).standard_normal(3000).astype(np.float32)
        x[17] = np.nan if step == 2 and comm.rank == 0 else 0
        array = fake_cuda.array(x, comm.rank) if device else x
        how = {"key": "ab"[step % 2], "lr": (0.5, 0, 0.2, 0.1, 0, 0.3)[step], "chunk": 640, "algorithm": "two_round"}
        comm.quantized_allreduce(array, codec=CODEC, **how)
        found.append(array)
    state = {key: each["values"] for key, each in comm.state_dict()["keys"].items()}
    return [each.get().tobytes() if device else each.tobytes() for each in found], state


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 0), (3, 1)])
def test_calls_and_state_are_the_hosts_whatever_the_order(n, seed, world, cupy) -> None:
    world.random.seed(seed)
    on_device = ranks(n, lambda comm: steps(comm, True))
    on_host = qccl.run_ranks(n, lambda comm: steps(comm, False))
    for (bytes_there, state_there), (bytes_here, state_here) in zip(on_device, on_host, strict=True):
        assert bytes_there == bytes_here
        np.testing.assert_equal(state_there, state_here)


@on_gpus(2)
def test_a_call_that_fails_keeps_the_state_before_it(comm, missed: threading.Event, world, cupy) -> None:
    """The transfers of a call that is aborted leave garbage, which must not become a residual."""
    xs = [fake_cuda.array(np.arange(300, dtype=np.float32), comm.rank) for _ in range(2)]
    comm.quantized_allreduce(xs[0], codec=CODEC, key="a")
    comm.check()
    before = comm.state_dict()["keys"]["a"]["values"]
    comm.barrier()
    if comm.rank == 1:
        assert missed.wait(60)
        return
    comm.quantized_allreduce(xs[1], codec=CODEC, key="a", timeout=0.3)
    with pytest.raises(qccl.CollectiveTimeout):
        comm.check()
    missed.set()
    world.finish(lambda: world.is_idle(0))
    assert np.isnan(xs[1].get()).all() and before["residual"].any()
    np.testing.assert_equal(comm.state_dict()["keys"]["a"]["values"], before)


@on_gpus(2)
def test_state_is_saved_loaded_and_forgotten_on_the_device(comm: qccl.Communicator, cupy) -> None:
    def call() -> bytes:
        x = fake_cuda.array(np.arange(300, dtype=np.float32), comm.rank)
        comm.quantized_allreduce(x, codec=CODEC, key="a")
        comm.check()
        return x.get().tobytes()

    first = call()
    saved = comm.state_dict()
    second = call()
    assert second != first
    comm.load_state_dict(saved)
    found, wanted = (state["keys"]["a"]["values"]["residual"] for state in (comm.state_dict(), saved))
    assert np.array_equal(found, wanted)
    assert call() == second
    comm.reset("a")
    assert call() == first
