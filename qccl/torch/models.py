"""The parameters of a DistributedDataParallel model, and which models cannot be compressed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qccl.errors import ArgumentError

__all__ = ["parameters_of"]


def parameters_of(model: Any) -> dict[str, Any]:
    """The parameters that DDP reduces, by name. Raises ArgumentError for a model that cannot be compressed."""
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"compress() takes a model wrapped in torch.nn.parallel.DistributedDataParallel, not "
            f"{type(model).__name__}; wrap it first: compress(DistributedDataParallel(module))"
        )
    if model.mixed_precision is not None:
        raise ArgumentError(
            "DDP's mixed_precision= has a communication hook of its own; use torch.autocast, or a model in bfloat16"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise ArgumentError(
            f"the model has a communication hook already ({hook}), for example of an earlier compress(), of torchft or "
            f"of Accelerate's comm_hook, and DDP takes only one; wrap it in DDP again, without that hook"
        )
    sparse = [
        f"{name}.weight".removeprefix(".")
        for name, module in model.module.named_modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    ]
    # DDP compares the names of ignored parameters with a dot in front of those of the outermost module
    ignored = {name for name in model.parameters_to_ignore if "." in name}
    named = {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}
    if any(name in named for name in sparse):
        raise ArgumentError(
            f"{', '.join(sparse)} has sparse gradients, which have no fixed size; make the module with sparse=False"
        )
    if len({p.device for p in named.values()}) > 1:
        raise ArgumentError("the model's parameters are on several devices; compress() needs them on one")
    _check_unchanged(model, named.values())
    return named


def _check_unchanged(model: Any, parameters: Collection[Any]) -> None:
    """Raise ArgumentError unless DDP reduces these parameters: it keeps the list that it made in its constructor."""
    made = model._get_ddp_logging_data()
    theirs = made["num_parameter_tensors"], made["total_parameter_size_bytes"]
    ours = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
    if ours != theirs:
        raise ArgumentError(
            f"the model's parameters have changed since it was wrapped in DDP: DDP reduces {theirs[0]} of "
            f"{theirs[1]} bytes, and {ours[0]} of {ours[1]} bytes need gradients now; freeze, unfreeze or replace "
            f"parameters first, then wrap the model, then call compress()"
        )
