"""Calls in functions that torch.compile() has compiled: the values of other calls, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

import qccl


def coalesced(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    return comm.quantized_allreduce_coalesced([x, x.clone()], codec="none")[1] + 1


def gathered(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    return comm.quantized_all_gather(x, x.new_empty(comm.size * x.numel()), codec="none") + 1


def asynchronous(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    work = comm.quantized_allreduce(x, codec="minmax4", async_op=True)
    y = torch.ones(100) * comm.rank
    work.wait()
    return x + y


def stateful(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    return comm.quantized_allreduce(x.sin(), codec="minmax2+ef", key="a", lr=0.5) + 1


def planned(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    plan = comm.plan("allreduce", 100, "float32", codec="none")
    plan.bind(x)
    return plan.run() + plan(x.clone())


def outer_step(comm: qccl.Communicator, x: torch.Tensor) -> torch.Tensor:
    parameter = torch.zeros(100)
    diloco = qccl.DiLoCo(comm, [parameter], codec="minmax4")
    parameter += x
    diloco.step()
    return parameter


CALLS = [coalesced, gathered, asynchronous, stateful, planned, outer_step]


@pytest.mark.parametrize("call", CALLS)
def test_compiled_calls_have_the_values_of_others(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    def steps(comm: qccl.Communicator, run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return [run(comm, torch.arange(100.0) * (comm.rank + step)).clone() for step in range(3)]

    def compiled(comm: qccl.Communicator) -> list[torch.Tensor]:
        return steps(comm, torch.compile(call, backend="eager"))

    torch._dynamo.reset()
    wanted = qccl.run_ranks(2, lambda comm: steps(comm, call))
    for found, expected in zip(qccl.run_ranks(2, compiled), wanted, strict=True):
        assert all(map(torch.equal, found, expected))


@on_ranks(1)
def test_a_whole_graph_is_refused_by_name(comm: qccl.Communicator) -> None:
    run = torch.compile(lambda x: comm.quantized_allreduce(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="qccl's calls run outside of compiled graphs"):
        run(torch.ones(100))


@pytest.mark.parametrize("first", ["torch", "qccl"])
def test_either_may_be_imported_first(first: str) -> None:
    """And an import of PyTorch does not load TorchDynamo, which takes seconds."""
    imports = ("torch", "qccl") if first == "torch" else ("qccl", "torch")
    program = f"""
import sys
import {imports[0]}, {imports[1]}
def call(comm):
    assert "torch._dynamo" not in sys.modules
    return torch.compile(lambda x: comm.quantized_allreduce(x, codec="none") + 1, backend="eager")(torch.ones(9))
print(float(qccl.run_ranks(1, call)[0].sum()))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["18.0"], found.stderr
