"""An outer step that runs while its caller trains on: its all-reduce, its weights, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from qccl.errors import ArgumentError, QcclError
from qccl.parameters import vector
from qccl.work import Work

__all__ = ["OuterStep"]


@dataclass
class OuterStep:
    """An outer step of some fragments that has begun: the all-reduce of their changes.

    Attributes:
        changes: by fragment and number of the array; after settle() the averages over the ranks.
        due: the local step after which its result is applied.
        works: its calls.
        weights: None, or the weight of each fragment; the mean over the ranks when the calls have ended.
        begun: by number of the array, the local parameters when it began; empty unless the steps since are kept.
        put_back: functions that restore the residuals from before the calls.
        refused: the error of an average that is not finite.
    """

    changes: dict[int, dict[int, Any]]
    due: int
    works: list[Work] = field(default_factory=list)
    weights: Any = None
    begun: dict[int, Any] = field(default_factory=dict)
    put_back: Sequence[Callable[[], object]] = ()
    refused: ArgumentError | None = None

    def weigh(self, weights: Sequence[float], like: Any) -> None:
        """Multiply the changes of each fragment by its weight, before the calls; ``like`` is one of the parameters."""
        self.weights = vector(like, weights, "float32")
        for weight, changes in zip(weights, self.changes.values(), strict=True):
            for change in changes.values():
                change *= weight

    def settle(self) -> None:
        """Wait for the averages. Raises ArgumentError if one is not finite; no residual has changed then.

        A weighted average is the mean of the weighted changes over that of the weights. A fragment to which no rank has
        given weight has no averages afterwards.
        """
        if self.works:
            try:
                errors = [error for work in self.works if (error := _refusal(work)) is not None]
            except BaseException:  # Ctrl-C, too
                self._restore()
                raise
            self.works = []
            if errors:
                self.refused = errors[0]
                self._restore()
            elif self.weights is not None:
                self._divide([float(weight) for weight in self.weights])
        if self.refused is not None:
            raise self.refused

    def abandon(self) -> None:
        """After an exception before all calls had begun: end those that have, and restore the residuals."""
        for work in self.works:
            with suppress(QcclError):
                work.wait()
        self._restore()

    def _restore(self) -> None:
        for each in self.put_back:
            each()

    def _divide(self, weights: Sequence[float]) -> None:
        for weight, changes in zip(weights, self.changes.values(), strict=True):
            if weight == 0:
                changes.clear()
            for change in changes.values():
                change *= 1 / weight


def _refusal(work: Work) -> ArgumentError | None:
    """Wait for a call; returns the error that its result is not finite."""
    try:
        work.wait()
    except ArgumentError as error:
        if work.exception() is not error:  # wait() itself was refused, as in a signal's handler
            raise
        return error
    return None
