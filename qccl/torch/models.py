"""The parameters of a DistributedDataParallel model, their order in its buckets, and models that are refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qccl.base.errors import ArgumentError
from qccl.torch.hook import is_of_a_copy

__all__ = ["frozen_parameters", "like_in_bucket", "parameters_of", "uncompiled"]


def like_in_bucket(parameter: Any, **options: Any) -> Any:
    """Make an empty tensor of the parameter's shape, with the strides of its gradient in DDP's bucket.

    A bucket keeps the strides of parameters that are dense in memory, and stores other parameters row-major (PyTorch's
    Reducer::initialize_bucket_views). ``options``: ``dtype`` and ``device``, by default the parameter's.
    """
    # empty_like() changes the strides of a tensor that is not dense, and only of such a tensor
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    order = torch.preserve_format if is_dense else torch.contiguous_format
    return torch.empty_like(parameter, requires_grad=False, memory_format=order, **options)


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
    if model._use_python_reducer:
        raise ArgumentError(
            "the model was wrapped in DDP with torch._dynamo.config.optimize_ddp = 'python_reducer', which has no "
            "buckets; leave that setting at its default ('ddp_optimizer'), and wrap the model again"
        )
    hooks = [hook for hook in model._comm_hooks if not is_of_a_copy(hook)]
    if hooks:
        hook = getattr(hooks[0][0], "__qualname__", "?")
        raise ArgumentError(
            f"the model already has a communication hook ({hook}), for example from an earlier compress(), torchft or "
            f"Accelerate's comm_hook, and DDP takes only one; wrap the model in DDP again, without that hook"
        )
    sparse = [
        f"{name}.weight".removeprefix(".")
        for name, module in model.module.named_modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    ]
    named = {name: p for name, p in _not_ignored(model).items() if p.requires_grad}
    if any(name in named for name in sparse):
        raise ArgumentError(
            f"{', '.join(sparse)} has sparse gradients, which have no fixed size; make the module with sparse=False"
        )
    if len({p.device for p in named.values()}) > 1:
        raise ArgumentError("the model's parameters are on several devices; compress() needs them on one")
    _check_unchanged(model, named.values())
    return named


def frozen_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a DDP model, by name, that it leaves out because they need no gradients."""
    return {name: p for name, p in _not_ignored(model).items() if not p.requires_grad}


def _not_ignored(model: Any) -> dict[str, Any]:
    # DDP writes a dot before the names of the outermost module's parameters, so names without a dot ignore nothing
    ignored = {name for name in model.parameters_to_ignore if "." in name}
    return {name: p for name, p in model.module.named_parameters() if name not in ignored}


def uncompiled(model: Any) -> Any:
    """The module inside the result of torch.compile(); another ``model`` unchanged."""
    while isinstance(model, torch.nn.Module) and "_orig_mod" in model._modules:
        model = model._orig_mod
    return model


def _check_unchanged(model: Any, parameters: Collection[Any]) -> None:
    """Raise ArgumentError unless DDP, which keeps the list of its constructor, reduces these parameters."""
    made = model._get_ddp_logging_data()
    theirs = made["num_parameter_tensors"], made["total_parameter_size_bytes"]
    ours = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
    if ours != theirs:
        raise ArgumentError(
            f"the model's parameters have changed since it was wrapped in DDP: DDP reduces {theirs[0]} of "
            f"{theirs[1]} bytes, and {ours[0]} of {ours[1]} bytes need gradients now; freeze, unfreeze or replace "
            f"parameters first, then wrap the model, then call compress()"
        )
