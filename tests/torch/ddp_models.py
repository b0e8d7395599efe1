"""Models in DDP, their batches, steps and gradients, with and without qccl.torch.compress()."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import qccl.torch

#: DDP makes many buckets, and qccl several groups
SMALL = {"bucket_cap_mb": 0.01}
GROUPS = {"group_bytes": 40_000, "min_elements": 100}


def net(kind=None):
    """A model with the same parameters on all ranks; the order of use differs from that of the parameters."""
    torch.manual_seed(0)
    return (kind or Mixed)()


class Mixed(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.last = Linear(width, 4)
        self.first = Linear(16, width)
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.ModuleList(Linear(width, width) for _ in range(4))

    def forward(self, x):
        x = self.norm(self.first(x).relu())
        for layer in reversed(self.inner):
            x = x + layer(x).relu()
        return self.last(x)


class Branches(torch.nn.Module):
    """Rank 0 uses one branch, the others use the other one; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(Linear(16, 32) for _ in range(3))
        self.last = Linear(32, 4)

    def forward(self, x):
        return self.last(self.branches[min(dist.get_rank(), 1)](x))


def wrapped(model=None, **options):
    return DistributedDataParallel(net() if model is None else model, **SMALL, **options)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def gradients(model):
    return {name: p.grad for name, p in model.module.named_parameters()}


def backward(x, *models):
    """New gradients of each model, for the same batch."""
    for model in models:
        model.zero_grad()
        loss_of(model, x).backward()


def assert_close(plain, ours, names=None):
    """The gradients (of ``names``, or all) are the same up to the order of sums; None where the others are."""
    wanted, found = gradients(plain), gradients(ours)
    for name in wanted if names is None else names:
        assert (wanted[name] is None) == (found[name] is None), name
        assert wanted[name] is None or torch.allclose(wanted[name], found[name], rtol=1e-5, atol=1e-6), name


def train(model, steps, lr=0.02, **options):
    with qccl.torch.compress(model, **GROUPS | options):
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for x in batches(steps):
            step(model, optimizer, x)
    return model


def bits(model):
    return b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())


def on_all(item):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found


def assert_same_everywhere(model):
    assert len(set(on_all(bits(model)))) == 1
