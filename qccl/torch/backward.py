"""One backward pass of a DDP model: its buckets, the gradients that have arrived, and the reductions under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from qccl.base.errors import EngineError
from qccl.torch.groups import ParameterGroup

__all__ = ["BackwardPass", "Bucket", "ExactWork", "gradients_of"]


def gradients_of(buffer: Any, parameters: Sequence[Any]) -> Any:
    """Each parameter's part of a bucket's buffer, flat.

    DDP's bucket.gradients() is wrong for complex parameters, which are stored as pairs of real numbers.
    """
    is_real = not buffer.is_complex()
    return buffer.split([p.numel() * (2 if is_real and p.is_complex() else 1) for p in parameters])


class Bucket:
    """One of DDP's buckets in one backward pass, and the groups of its parameters."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._promise = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._error: Exception | None = None
        self._is_over = False
        self.groups: set[int] = set()
        self._left = 0

    def expect(self, groups: set[int]) -> None:
        """Set the groups whose calls must end."""
        self.groups, self._left = groups, len(groups)

    def group_ended(self, error: Exception | None) -> bool:
        """Note that a group has ended. Returns whether the bucket is complete; the first error completes it."""
        self._left -= 1
        if self._is_over or (self._left and error is None):
            return False
        self._error, self._is_over = error, True
        return True

    def complete(self) -> None:
        """Let DDP continue with the bucket, or with the first error."""
        self._promise.set_result(self._buffer)

    def future(self) -> Any:
        """Make the future for DDP. Only an exception in a function of then() reaches DDP's C++ as an error."""
        return self._promise.then(self._value)

    def _value(self, promise: Any) -> Any:
        if self._error is not None:
            raise self._error
        return promise.value()


class BackwardPass:
    """The gradients that have arrived in one backward pass.

    Attributes:
        gradients: each group's gradients, which are flat parts of DDP's buckets.
        buckets: the buckets in which each group has gradients.
        lr: the calls' learning rate, divided by the factor of a GradScaler; None: the calls give no learning rate.
        by_factors: the groups whose factors are under way, in the order of their start.
    """

    lr: float | None = None

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.gradients: list[list[Any]] = [[None] * len(group.parameters) for group in groups]
        self.buckets: list[list[Bucket]] = [[] for _ in groups]
        self.by_factors: list[int] = []
        self._missing = [len(group.parameters) for group in groups]
        self._next = 0  # the first group that has not been started
        self._groups = groups
        self.is_under_way = False

    def add(
        self, bucket: Bucket, parameters: Sequence[Any], gradients: Sequence[Any], places: Mapping[Any, tuple[int, int]]
    ) -> list[int]:
        """Add a bucket that has arrived. Returns the groups to start now, in order."""
        self.is_under_way = True
        found: set[int] = set()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter not in places:
                raise EngineError(
                    f"DDP reduces a parameter of shape {tuple(parameter.shape)} that did not exist when compress() was "
                    f"called, or had requires_grad=False; wrap the model in DDP again"
                )
            number, i = places[parameter]
            self.gradients[number][i] = gradient
            self._missing[number] -= 1
            found.add(number)
        bucket.expect(found)
        for number in found:
            self.buckets[number].append(bucket)
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return list(range(first, self._next))

    def check_complete(self) -> None:
        """Raise EngineError if gradients are missing after the last bucket."""
        if self._next < len(self._groups):
            missing = self._groups[self._next]
            absent = [name for name, g in zip(missing.names, self.gradients[self._next], strict=True) if g is None]
            raise EngineError(f"DDP's buckets have no gradients of {', '.join(absent)}")


class ExactWork:
    """Means of gradients by the process group itself, which divides before it adds, like DDP (interface: Work).

    Each gradient has a call of its own, because a backend's order of additions depends on the place in a message.
    """

    def __init__(self, gradients: Sequence[Any], process_group: Any) -> None:
        for gradient in gradients:
            gradient.div_(process_group.size())
        self._works = [dist.all_reduce(gradient, group=process_group, async_op=True) for gradient in gradients]

    def add_done_callback(self, fn: Callable[[ExactWork], object]) -> None:
        """Call ``fn(work)`` when the sums of all gradients have ended."""
        self._future = torch.futures.collect_all([work.get_future() for work in self._works])
        self._future.add_done_callback(lambda future: fn(self))

    def exception(self) -> Exception | None:
        """The first error of the sums, after they have ended; None if all succeeded."""
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def wait(self) -> None:
        """Wait until all gradients hold their sums. Raises the error of the process group's library."""
        for work in self._works:
            work.wait()
