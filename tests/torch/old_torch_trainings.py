"""Trainings with PyTorch, whose states ``old_torch_trainings.py FOLDER`` writes, on two ranks of torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from old_trainings import SAVED_AFTER, Training, gradient, sum_of_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qccl.torch

#: the shapes and element types of parameters; DDP's model has all, FSDP2's the float32 ones
SHAPES = {"a": (12, 20), "b": (9, 16), "bf16": (8, 16), "bias": (10,), "conv": (4, 3, 2, 2)}
LR = 0.25
Made = Callable[[ExitStack], Training]


class Scaled(torch.nn.Module):
    """Parameters whose gradients are the batch, to the bit on every machine."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            values = torch.zeros(SHAPES[name], dtype=torch.bfloat16 if name == "bf16" else torch.float32)
            if name == "conv":
                values = values.to(memory_format=torch.channels_last)
            setattr(self, name, torch.nn.Parameter(values))

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, p in self.named_parameters():
            batch = torch.from_numpy(gradient(dist.get_rank(), step, tuple(p.shape), sum(map(ord, name))))
            total = total + (p * batch.to(p.dtype)).float().sum()
        return total


class Units(torch.nn.Module):
    """Two modules for fully_shard(), and a parameter of their own root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled("a", "bias"), Scaled("b")
        self.root = torch.nn.Parameter(torch.zeros(6, 4))

    def forward(self, step: int) -> torch.Tensor:
        batch = torch.from_numpy(gradient(dist.get_rank(), step, (6, 4), 77))
        return self.first(step) + self.second(step) + (self.root * batch).sum()


def trained(model: Any) -> Callable[[int], np.ndarray]:
    """The step of a model: one backward pass, whose gradients it returns."""

    def step(number: int) -> np.ndarray:
        model.zero_grad()
        model(number).backward()
        grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
        return torch.cat([g.float().flatten() for g in grads]).numpy()

    return step


def _rank_file(path: str) -> str:
    return f"{path}.rank{dist.get_rank()}.pt"


def _training(model: Any, owner: Any) -> Training:
    return Training(
        trained(model),
        lambda path: torch.save(owner.state_dict(), _rank_file(path)),
        lambda path: owner.load_state_dict(torch.load(_rank_file(path))),
    )


def _whole(training: Training, owner: Any) -> Training:
    """The same, with the state of all ranks in one file."""

    def save(path: str) -> None:
        state = owner.full_state_dict()
        if dist.get_rank() == 0:
            torch.save(state, f"{path}.pt")

    return replace(training, save=save, load=lambda path: owner.load_state_dict(torch.load(f"{path}.pt")))


def _compressed(ends: ExitStack, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(Scaled("a", "b", "bf16", "bias", "conv"))
    return model, ends.enter_context(qccl.torch.compress(model, min_elements=0, **options))


def ddp(ends: ExitStack) -> Training:
    codecs = {
        "b": "topk:k=0.1+ef+nesterov:mu=0.5",
        "bf16": "minmax4:bucket=64,rounding=stochastic,seed=3+ef",
        "bias": "none+nesterov:mu=0.5",
    }
    return _training(*_compressed(ends, codec="minmax2:bucket=32+ef", codecs=codecs))


def ddp_full(ends: ExitStack) -> Training:
    model, handle = _compressed(ends, codec="minmax4:bucket=32+ef")
    return _whole(_training(model, handle), handle)


def ddp_auto(ends: ExitStack) -> Training:
    """The file is of compress(codec="auto"), which is gone: the new model names the codecs that the ranks chose."""
    codecs = {"conv": "trellis2+ef", "bf16": "minmax2:bucket=256+ef", "b": "minmax4+ef"}
    return _training(*_compressed(ends, codec="trellis2+ef", codecs=codecs))


def ddp_low_rank(ends: ExitStack) -> Training:
    return _training(*_compressed(ends, codec="minmax8", low_rank=2))


def ddp_low_rank_full(ends: ExitStack) -> Training:
    model, handle = _compressed(ends, codec="minmax8", low_rank=2)
    return _whole(_training(model, handle), handle)


def _sharded(ends: ExitStack, key: dict[str, str]) -> Training:
    mesh = init_device_mesh("cpu", (2,))
    model = Units()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    comm = ends.enter_context(qccl.Communicator.from_torch(mesh.get_group()))
    codec = "minmax3:bucket=32,rounding=stochastic,seed=5+ef+nesterov:mu=0.5"
    reduction = qccl.torch.ReduceScatter(codec, comm, **key)
    reduction.install(model)
    return _training(model, reduction)


def fsdp(ends: ExitStack) -> Training:
    return _sharded(ends, {})


def fsdp_named(ends: ExitStack) -> Training:
    return _sharded(ends, {"key": "policy"})


def _replicated(ends: ExitStack, **key: str) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Units()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh["shard"])
    comm = ends.enter_context(qccl.Communicator.from_torch(mesh["replicate"].get_group()))
    codecs = {"second.*": "minmax4:bucket=32+ef+nesterov:mu=0.5"}
    reduction = qccl.torch.AllReduce("minmax2:bucket=32+ef", comm, codecs=codecs, min_elements=0, **key)
    reduction.install(model)
    return model, reduction


def hsdp(ends: ExitStack) -> Training:
    return _training(*_replicated(ends))


def hsdp_named(ends: ExitStack) -> Training:
    return _training(*_replicated(ends, key="policy"))


def hsdp_full(ends: ExitStack) -> Training:
    model, reduction = _replicated(ends)
    return _whole(_training(model, reduction), reduction)


TRAININGS: tuple[Made, ...] = (
    *(ddp, ddp_full, ddp_auto, ddp_low_rank, ddp_low_rank_full),
    *(fsdp, fsdp_named, hsdp, hsdp_named, hsdp_full),
)


def write(made: Made, folder: Path) -> None:
    """Save after some steps; what a training that goes on computes is written, too."""
    path = f"{folder / made.__name__}"
    with ExitStack() as ends:
        training = made(ends)
        for number in range(SAVED_AFTER):
            training.step(number)
        training.save(path)
        if not made.__name__.endswith("_full"):
            write_sum(path, sum_of_steps(training))
            return
    dist.barrier()
    with ExitStack() as ends:  # a full state goes on with other bits: those of a run that loaded it
        training = made(ends)
        training.load(path)
        write_sum(path, sum_of_steps(training))


def write_sum(path: str, found: np.ndarray) -> None:
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, found)
    if dist.get_rank() == 0:
        np.savez_compressed(f"{path}.sums.npz", *sums)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for made in TRAININGS:
        write(made, Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
