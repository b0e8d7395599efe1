"""What the ranks of test_torch_fsdp.py and test_torch_hsdp.py share: a sharded model, its training and the start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, ReLU, Sequential

STATEFUL = "minmax3:bucket=64,rounding=stochastic,seed=5+ef+nesterov:mu=0.5"


def net(mesh: DeviceMesh, dtype=torch.float32, seed=0, **options):
    """A model with the same parameters in all processes, with lengths that 2 and 4 do not divide; four groups.

    On two ranks its last layer leaves a shard empty.
    """
    torch.manual_seed(seed)
    model = Sequential(Linear(20, 64), ReLU(), Linear(64, 33), ReLU(), Linear(33, 1)).to(dtype)
    for layer in model:
        if isinstance(layer, Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Branch(torch.nn.Module):
    """A second layer that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(4, 4), Linear(4, 4)

    def forward(self, x, whole: bool):
        return self.second(self.first(x)) if whole else self.first(x)


def batch(step: int, dtype=torch.float32):
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()), dtype=dtype)


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def backward(model, step: int) -> float:
    """One backward pass; returns the loss."""
    loss = loss_of(model, batch(step, next(model.parameters()).dtype))
    loss.backward()
    return float(loss.detach())


def train(model, steps, lr=0.02) -> float:
    """Steps of SGD; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    loss = 0.0
    for step in steps:
        optimizer.zero_grad()
        loss = backward(model, step)
        optimizer.step()
    return loss


def bits(model) -> bytes:
    return b"".join(p.to_local().detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.to_local().flatten() for p in model.parameters()])


def run_named(functions: Mapping[str, Callable[[], None]]) -> None:
    """Run the functions that the command line names behind the folder, in a process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        functions[name]()
        dist.barrier()
        print(f"{name} done", flush=True)
    dist.destroy_process_group()
