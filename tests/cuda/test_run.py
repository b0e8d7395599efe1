"""Runs on a GPU, as seen by the host."""

from __future__ import annotations

from types import SimpleNamespace

from qccl.cuda.run import CudaRun
from qccl.deadline import Deadline


def test_a_step_asks_cuda_for_errors_until_the_run_has_ended():
    asked = list[str]()
    pending = SimpleNamespace(sweep=lambda: asked.append("flags"), check_device=lambda: asked.append("CUDA"))
    run = CudaRun(pending, "a call", 0, Deadline(10, counts=False), 0, captured=False)
    assert not run.step() and asked == ["flags", "CUDA"]
    run.done = True
    assert run.step() and asked == ["flags", "CUDA", "flags"]
