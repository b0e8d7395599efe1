"""Sharded models of test_fsdp.py and test_hsdp.py, and their training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from rank_calls import error_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, ReLU, Sequential

import qccl

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


#: sets of experts, of equal and of other sizes, that overlap or not
SETS = ((0,), (1,), (0, 1, 2), (2, 1), (0, 2), (0, 1, 2), (2,))


class Experts(torch.nn.Module):
    """Layers of one form, of which each step uses some; the gradients of each have a scale of its own."""

    SCALES = (100.0, 1.0, 0.01)

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.ModuleList(Linear(32, 64, bias=False) for _ in range(number))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return sum(self.SCALES[i] * self.experts[i](x) for i in used)


class Sums:
    """For each expert the sum of the gradients that steps leave, and of the true means over all ranks.

    The results of a codec with error feedback differ from the means by what the last step lost, so the errors of their
    sums are small, unless residuals have reached other elements.
    """

    def __init__(self, model: Experts) -> None:
        self.model, self.steps = model, 0
        self._found = [torch.zeros(64, 32) for _ in model.experts]
        self._wanted = [torch.zeros(64, 32) for _ in model.experts]

    def step(self, used: Sequence[int] = (0,)) -> None:
        """A backward pass through some experts."""
        pairs = [self._pair(rank) for rank in range(dist.get_world_size())]
        x, factor = pairs[dist.get_rank()]
        (self.model(x, used) * factor).sum().backward()
        for i in used:
            weight = self.model.experts[i].weight
            if weight.requires_grad:
                self._found[i] += weight.grad.full_tensor()
                self._wanted[i] += self.model.SCALES[i] * sum(factor.t() @ x for x, factor in pairs) / len(pairs)
        self.model.zero_grad()
        self.steps += 1

    def _pair(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * self.steps + rank)
        return torch.randn(5, 32, generator=generator), torch.randn(5, 64, generator=generator)

    def check(self) -> None:
        """The norms of the errors, relative to those of the sums of means, are small."""
        pairs = zip(self._found, self._wanted, strict=True)
        errors = [float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs]
        assert max(errors) < 1, errors

    def check_owed(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """The sums lack exactly the residuals of all ranks."""
        for i, (found, wanted) in enumerate(zip(self._found, self._wanted, strict=True)):
            error = (found + residuals[f"experts.{i}.weight"] - wanted).norm() / wanted.norm()
            assert error < 1e-5, (i, error)


def raises(reason: str, call, *arguments, **options) -> None:
    text = error_of(lambda: call(*arguments, **options), qccl.ArgumentError)
    assert reason in text, text
