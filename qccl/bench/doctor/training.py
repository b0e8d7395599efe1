"""The computation of a training step, estimated from the sizes of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qccl.base.dtypes import FLOAT32

__all__ = ["Gradient", "StepComputation", "estimated"]

#: the parts of a step's time for the backward pass, in which gradients become ready, and for the optimiser after it
_BACKWARD, _OPTIMISER = 0.55, 0.15


@dataclass(frozen=True)
class Gradient:
    """A gradient.

    Attributes:
        shape: the shape of its parameter; one dimension if only the size is known.
        ready: seconds from the start of the backward pass until DistributedDataParallel hands over its bucket.
        bucket: the number of that bucket.
    """

    shape: tuple[int, ...]
    ready: float
    bucket: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StepComputation:
    """A step of one rank alone; all times are seconds.

    Attributes:
        gradients: the gradients in the order of the model's parameters.
        forward, backward, optimiser: the parts of the step.
    """

    gradients: tuple[Gradient, ...]
    forward: float
    backward: float
    optimiser: float

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.forward + self.backward + self.optimiser


def estimated(shapes: Sequence[tuple[int, ...]], seconds: float, bucket_nbytes: int) -> StepComputation:
    """Estimate a step whose backward pass takes the usual part, from the last parameter on at an even pace."""
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
    return StepComputation(tuple(reversed(gradients)), seconds - backward - optimiser, backward, optimiser)
