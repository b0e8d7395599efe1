"""The computation of a training step: measured by some steps of a PyTorch module, or estimated from sizes."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qccl.deadline import Deadline
from qccl.dtypes import FLOAT32

__all__ = ["Computation", "Gradient", "estimated", "forwarded", "measured"]

#: the part of a step in which gradients become ready, and the part after it, where they are not measured
_BACKWARD, _OPTIMISER = 0.55, 0.15
#: steps that are measured: at least, at most, and the time after which the least are enough
_LEAST_STEPS, _MOST_STEPS, _PATIENCE_SECONDS = 8, 40, 6.0
_WARM_STEPS = 4


@dataclass(frozen=True)
class Gradient:
    """A gradient.

    Attributes:
        shape: of its parameter; one dimension where only the size is known.
        ready: seconds from the start of the backward pass until DistributedDataParallel hands over its bucket.
        bucket: the number of that bucket.
    """

    shape: tuple[int, ...]
    ready: float
    bucket: int

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Computation:
    """A step of one rank alone; all times are seconds.

    Attributes:
        gradients: in the order in which the model has its parameters.
        forward, backward, optimiser: the parts of the step.
        is_measured: the times are those of a real backward pass.
        spread: how many times as long as the measured step the median of the steps took; 1 if none was measured.
    """

    gradients: tuple[Gradient, ...]
    forward: float
    backward: float
    optimiser: float
    is_measured: bool = False
    spread: float = 1.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward + self.backward + self.optimiser

    def scaled(self, seconds: float) -> Computation:
        """The same step on a machine that takes ``seconds`` for it."""
        factor = seconds / self.seconds
        gradients = tuple(replace(g, ready=g.ready * factor) for g in self.gradients)
        forward, backward, optimiser = (part * factor for part in (self.forward, self.backward, self.optimiser))
        return Computation(gradients, forward, backward, optimiser, self.is_measured, self.spread)


def estimated(shapes: Sequence[tuple[int, ...]], seconds: float, bucket_nbytes: int) -> Computation:
    """A step whose backward pass takes a usual part of it, and reaches the last parameter first, at an even pace."""
    backward, total = _BACKWARD * seconds, sum(map(math.prod, shapes))
    at, filled, bucket = 0, 0, 0
    order: list[tuple[int, int]] = []  # the bucket of each gradient, and the elements that are ready with it
    ends: dict[int, int] = {}
    for shape in reversed(shapes):
        count = math.prod(shape)
        at, filled = at + count, filled + count * FLOAT32.itemsize
        order.append((bucket, at))
        ends[bucket] = at
        if filled >= bucket_nbytes:
            bucket, filled = bucket + 1, 0
    gradients = [
        Gradient(shape, backward * ends[number] / total, number)
        for shape, (number, _) in zip(reversed(shapes), order, strict=True)
    ]
    optimiser = _OPTIMISER * seconds
    return Computation(tuple(reversed(gradients)), seconds - backward - optimiser, backward, optimiser)


def measured(model: Any, loss: Callable[[], Any], optimizer: Any, bucket_mb: float, threads: int) -> Computation:
    """Run some steps of a PyTorch module in DistributedDataParallel, as a group of one process.

    ``loss()`` computes the loss of a batch by the module. ``optimizer`` may be None, or changes the parameters. PyTorch
    has ``threads`` threads. The parts are those of the fastest step, because others can only be disturbed ones.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _alone():
            return _fastest(model, loss, optimizer, bucket_mb)
    finally:
        torch.set_num_threads(before)


def _fastest(model: Any, loss: Callable[[], Any], optimizer: Any, bucket_mb: float) -> Computation:
    """The fastest of some steps, with a hook that notes the buckets and reduces nothing."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    seen: list[tuple[float, list[Any]]] = []

    def note(bucket: Any) -> Any:
        seen.append((time.perf_counter(), bucket.parameters()))
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, lambda _, bucket: note(bucket))
    needed = [p for p in model.parameters() if p.requires_grad]
    steps: list[Computation] = []
    patience = Deadline(_PATIENCE_SECONDS)
    with forwarded(model, wrapped):
        for number in range(_WARM_STEPS + _MOST_STEPS):
            seen.clear()
            times = [time.perf_counter()]
            wrapped.zero_grad()
            value = loss()
            times.append(time.perf_counter())
            value.backward()
            times.append(time.perf_counter())
            if optimizer is not None:
                optimizer.step()
            times.append(time.perf_counter())
            if number < _WARM_STEPS:  # DDP has other buckets in its first step
                continue
            forward, backward, optimiser = (after - begin for begin, after in itertools.pairwise(times))
            ready = {id(p): (at - times[1], bucket) for bucket, (at, each) in enumerate(seen) for p in each}
            found = ((tuple(p.shape), *ready.get(id(p), (backward, 0))) for p in needed)
            gradients = tuple(Gradient(shape, min(backward, at), bucket) for shape, at, bucket in found)
            steps.append(Computation(gradients, forward, backward, optimiser, is_measured=True))
            if len(steps) >= _LEAST_STEPS and patience.is_over:
                break
    fastest = min(steps, key=lambda step: step.seconds)
    return replace(fastest, spread=statistics.median(step.seconds for step in steps) / fastest.seconds)


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


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone, unless the program has one already."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
