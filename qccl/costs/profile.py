"""The computation of a training step: when each gradient is ready, as measured or as estimated from sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qccl.dtypes import FLOAT32

__all__ = ["Gradient", "Profile", "estimated"]

#: the part of a step in which gradients become ready, and the part after it, where they are not measured
_BACKWARD, _OPTIMISER = 0.55, 0.15


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
class Profile:
    """The computation of a step; all times are seconds.

    Attributes:
        gradients: in the order in which the model has its parameters.
        forward, backward, optimiser: the parts of the step.
        powersgd: what PyTorch's PowerSGD computes in a step, by its rank; empty where it was not measured.
        is_measured: the times are those of a real backward pass.
    """

    gradients: tuple[Gradient, ...]
    forward: float
    backward: float
    optimiser: float
    powersgd: dict[int, float] = field(default_factory=dict)
    is_measured: bool = False

    @property
    def computation(self) -> float:
        """Seconds of the step without communication."""
        return self.forward + self.backward + self.optimiser

    def scaled(self, computation: float) -> Profile:
        """The same step on a machine that takes ``computation`` seconds for it."""
        factor = computation / self.computation
        gradients = tuple(replace(g, ready=g.ready * factor) for g in self.gradients)
        forward, backward, optimiser = (part * factor for part in (self.forward, self.backward, self.optimiser))
        powersgd = {rank: seconds * factor for rank, seconds in self.powersgd.items()}
        return Profile(gradients, forward, backward, optimiser, powersgd, self.is_measured)


def estimated(shapes: Sequence[tuple[int, ...]], computation: float, bucket_nbytes: int) -> Profile:
    """A step whose backward pass takes a usual part of it, and reaches the last parameter first, at an even pace."""
    backward, total = _BACKWARD * computation, sum(Gradient(shape, 0, 0).count for shape in shapes)
    at, filled, bucket = 0, 0, 0
    order: list[tuple[int, int]] = []  # the bucket of each gradient, and the elements that are ready with it
    for shape in reversed(shapes):
        count = Gradient(shape, 0, 0).count
        at, filled = at + count, filled + count * FLOAT32.itemsize
        order.append((bucket, at))
        if filled >= bucket_nbytes:
            bucket, filled = bucket + 1, 0
    ends = {number: max(at for b, at in order if b == number) for number, _ in order}
    gradients = [
        Gradient(shape, backward * ends[number] / total, number)
        for shape, (number, _) in zip(reversed(shapes), order, strict=True)
    ]
    optimiser = _OPTIMISER * computation
    return Profile(tuple(reversed(gradients)), computation - backward - optimiser, backward, optimiser)
