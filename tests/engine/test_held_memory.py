"""The memory of a call's arrays lives as long as the call uses it, whatever becomes of the arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qccl

PROGRAM = Path(__file__).parents[1] / "support" / "swapped_memory.py"
WAYS = ["torch data", "torch set_", "torch resize_", "torch storage", "numpy resize", "jax delete", "jax donation"]


@pytest.fixture(scope="module")
def harmless() -> list[str]:
    """The ways that did no harm; where one ends the process, those after it are missing, too."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    print(done.returncode, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.parametrize("way", WAYS)
def test_taken_away_in_the_middle_of_a_call(harmless: list[str], way: str) -> None:
    assert way in harmless


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_calls_that_go_on_alone_forbid_resizing(dtype: str) -> None:
    torch = pytest.importorskip("torch")

    def run(comm: qccl.Communicator) -> None:
        x = torch.ones(100, dtype=getattr(torch, dtype), requires_grad=True)
        comm.quantized_allreduce(x)
        assert x.untyped_storage().resizable()
        comm.quantized_allreduce(x, async_op=True).wait()
        assert not x.untyped_storage().resizable()

    qccl.run_ranks(2, run)


def test_a_bound_tensor_whose_memory_changed_is_refused() -> None:
    torch = pytest.importorskip("torch")

    def run(comm: qccl.Communicator) -> None:
        for change in (
            lambda x: x.resize_(1 << 22),
            lambda x: x.set_(torch.zeros(100)),
            lambda x: setattr(x, "data", torch.zeros(100)),
        ):
            x = torch.ones(100)
            plan = comm.plan("allreduce", 100).bind(x)
            change(x)
            with pytest.raises(qccl.InvalidBufferError, match=r"x has other memory .* plan\.bind"):
                plan.start()
            y = torch.ones(100)
            plan.bind(y).start().wait()
            assert (y == 2).all()

    qccl.run_ranks(2, run)


def test_views_that_stand_for_other_values_are_refused() -> None:
    torch = pytest.importorskip("torch")
    views = {
        "resolve_neg": [torch.arange(4.0)._neg_view(), (torch.ones(1) * 2j).conj().imag],
        "resolve_conj": [(torch.ones(1) * 2j).conj()],
    }

    def run(comm: qccl.Communicator) -> None:
        for method, each in views.items():
            for x in each:
                with pytest.raises(qccl.InvalidBufferError, match=rf"x\.{method}\(\)"):
                    comm.quantized_allreduce(x)
                with pytest.raises(qccl.InvalidBufferError, match=rf"out\.{method}\(\)"):
                    comm.quantized_allreduce(np.ones(4, np.float32), out=x)
                with pytest.raises(qccl.InvalidBufferError, match=rf"xs\[0\]\.{method}\(\)"):
                    comm.quantized_allreduce_coalesced([x])
        x = views["resolve_neg"][0].resolve_neg()
        assert (comm.quantized_allreduce(x, codec="none") == torch.arange(4.0) * -2).all()

    qccl.run_ranks(2, run)


def test_masked_arrays_are_refused() -> None:
    """The values under the mask would be summed, too; an array of the type without a mask may get one later."""
    x = np.ma.array(np.ones(4, np.float32), mask=[True, False, False, True])

    def run(comm: qccl.Communicator) -> None:
        for each in (x, np.ma.array(np.ones(4, np.float32))):
            for call in (comm.quantized_allreduce, comm.quantized_reduce_scatter, comm.plan("allreduce", 4)):
                with pytest.raises(qccl.InvalidBufferError, match=r"x is a masked array.* x\.filled\(0\)"):
                    call(each)
        assert (comm.quantized_allreduce(x.filled(0), codec="none") == [0, 1, 1, 0]).all()
        assert (comm.quantized_allreduce(x.data, codec="none") == 1).all()

    qccl.run_ranks(1, run)


def test_tensors_without_their_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    freed = torch.zeros(4)
    part = freed[1:]
    freed.untyped_storage().resize_(0)

    def run(comm: qccl.Communicator) -> None:
        for x, message in (
            (freed, "no memory"),
            (part, "needs 12 bytes, but its storage has 0 bytes"),
            (torch._efficientzerotensor(4), "no memory"),
        ):
            with pytest.raises(qccl.InvalidBufferError, match=message):
                comm.quantized_allreduce(np.zeros(x.numel(), np.float32), out=x)

    qccl.run_ranks(1, run)
