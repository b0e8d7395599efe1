"""The computation of a training step, measured by some steps of a PyTorch module."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from qccl.costs.profile import Gradient, Profile

__all__ = ["forwarded", "measured"]

#: steps that are measured: at least, at most, and the time after which the least are enough
_LEAST_STEPS, _MOST_STEPS, _PATIENCE_SECONDS = 8, 40, 6.0
_WARM_STEPS = 4
#: of DDP's buckets for PowerSGD: in several, its reductions block each other in gloo's threads
_ONE_BUCKET_MB = 1000.0
#: the groups of one process, to its end. PowerSGD's callbacks refer to their group, and gloo's threads drop the
#: callbacks; a thread that drops the last reference to the group waits for itself, and std::terminate() ends it.
_GROUPS: list[Any] = []


def measured(
    model: Any, loss: Callable[[], Any] | None, optimizer: Any, bucket_mb: float, ranks: Sequence[int], threads: int
) -> Profile:
    """Run some steps of a PyTorch module in DistributedDataParallel, as a group of one process.

    ``loss()`` computes the loss of a batch by the module; None: the sum of all parameters, for the time of PowerSGD
    alone. ``optimizer`` may be None, or changes the parameters. PowerSGD is measured with each of ``ranks``. PyTorch
    has ``threads`` threads.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _alone():
            plain, total = _times(model, loss, optimizer, bucket_mb, None)
            with_powersgd = {}
            for rank in ranks:
                gc.collect()  # the last DistributedDataParallel, which would still reduce the same gradients
                _, with_powersgd[rank] = _times(model, loss, optimizer, bucket_mb, rank)
    finally:
        torch.set_num_threads(before)
    return replace(plain, powersgd={rank: max(0.0, each - total) for rank, each in with_powersgd.items()})


def _times(
    model: Any, loss: Callable[[], Any] | None, optimizer: Any, bucket_mb: float, powersgd: int | None
) -> tuple[Profile, float]:
    """Measure steps; with the hook of PowerSGD of that rank, or with one that notes the buckets and does nothing.

    Returns the medians of the parts, and of the whole steps.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    cap = bucket_mb if powersgd is None else _ONE_BUCKET_MB
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    seen: list[tuple[float, list[Any]]] = []

    def note(bucket: Any) -> Any:
        seen.append((time.perf_counter(), bucket.parameters()))
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if powersgd is None:
        wrapped.register_comm_hook(None, lambda state, bucket: note(bucket))
    else:
        state = powerSGD_hook.PowerSGDState(None, powersgd, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    names = {id(p): i for i, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    parts: list[tuple[float, float, float]] = []
    ready: list[list[float]] = [[] for _ in names]
    buckets = [0] * len(names)
    until = time.monotonic() + _PATIENCE_SECONDS
    with forwarded(model, wrapped):
        for number in range(_WARM_STEPS + _MOST_STEPS):
            seen.clear()
            times = [time.perf_counter()]
            wrapped.zero_grad()
            value = _sum_of(wrapped, model) if loss is None else loss()
            times.append(time.perf_counter())
            value.backward()
            times.append(time.perf_counter())
            if optimizer is not None:
                optimizer.step()
            times.append(time.perf_counter())
            if number < _WARM_STEPS:  # DDP has other buckets in its first step
                continue
            parts.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
            for bucket, (at, parameters) in enumerate(seen):
                for parameter in parameters:
                    buckets[names[id(parameter)]] = bucket
                    ready[names[id(parameter)]].append(at - times[1])
            if len(parts) >= _LEAST_STEPS and time.monotonic() > until:
                break
    forward, backward, optimiser = (statistics.median(each) for each in zip(*parts, strict=True))
    shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    gradients = tuple(
        Gradient(shape, min(backward, statistics.median(at)) if at else backward, bucket)
        for shape, at, bucket in zip(shapes, ready, buckets, strict=True)
    )
    profile = Profile(gradients, forward, backward, optimiser, is_measured=loss is not None)
    return profile, statistics.median(sum(each) for each in parts)


@contextlib.contextmanager
def forwarded(model: Any, wrapped: Any) -> Iterator[None]:
    """Inside, a call of the module is one of DDP, which must know of each forward pass: the user's loss calls it."""
    own, is_own = model.forward, "forward" in vars(model)
    is_inside = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return own(*args, **kwargs)
        is_inside = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            is_inside = False

    model.forward = forward
    try:
        yield
    finally:
        if is_own:
            model.forward = own
        else:
            del model.forward


def _sum_of(wrapped: Any, model: Any) -> Any:
    """A loss with a gradient for every parameter, which the module need not compute."""
    own = model.forward
    model.forward = lambda: sum(p.sum() for p in model.parameters() if p.requires_grad)
    try:
        return wrapped()
    finally:
        model.forward = own


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone, unless the program has one already."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
