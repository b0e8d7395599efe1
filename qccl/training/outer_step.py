"""The outer steps of DiLoCo: when they begin and end, and one that runs while its caller trains on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from qccl.base.errors import ArgumentError, QcclError
from qccl.base.scalars import as_integer
from qccl.communicator.work import Work
from qccl.training.parameters import copy_of, times

__all__ = ["OuterStep", "Turns", "advance"]


class Turns:
    """When the outer steps of each fragment begin and end: all follows from the number of the local step.

    Attributes:
        period: local steps between two outer steps of a fragment; None: the program says when one begins.
        delay: local steps between the begin and the end of an outer step, less than the period.
    """

    def __init__(self, fragments: int, period: Any, delay: Any) -> None:
        """Raises ArgumentError for arguments of DiLoCo that are not possible; ``fragments`` is their number."""
        every, wait = as_integer(period), as_integer(delay)
        if period is not None and (every is None or every < fragments):
            raise ArgumentError(
                f"period must be a number of local steps, at least that of the fragments ({fragments}), not {period!r}"
            )
        if every is None and fragments > 1:
            raise ArgumentError(f"{fragments} fragments have outer steps at different local steps; give period=, too")
        if wait is None or not 0 <= wait < (every or 1):
            limit = f"less than period={period}" if every else "and only with period="
            raise ArgumentError(f"delay must be a number of local steps, 0 or more, {limit}, not {delay!r}")
        self._fragments, self.period, self.delay = fragments, every, wait

    def begins(self, now: int) -> list[int]:
        """The fragment whose outer step begins after local step ``now``, if there is one."""
        if self.period is None:
            return []
        number, period = self._fragments, self.period  # at most the period, so that no two have the same turn
        return [f for f in range(number) if (now - (f + 1) * period // number) % period == 0]


@dataclass
class OuterStep:
    """An outer step of some fragments that has begun: the all-reduce of their changes.

    Attributes:
        changes: by fragment and number of the array; after settle() the averages over the ranks.
        due: the local step after which its result is applied.
        works: its calls.
        begun: by number of the array, the local parameters when it began; empty unless the steps since are kept.
        put_back: functions that restore the residuals that the calls have changed.
        refused: the error of an average that is not finite.
    """

    changes: dict[int, dict[int, Any]]
    due: int
    works: list[Work] = field(default_factory=list)
    begun: dict[int, Any] = field(default_factory=dict)
    put_back: list[Callable[[], object]] = field(default_factory=list)
    refused: ArgumentError | None = None

    def settle(self) -> None:
        """Wait for the averages. Raises ArgumentError if one is not finite; no residual has changed then."""
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
        if self.refused is not None:
            raise self.refused

    def abandon(self) -> None:
        """After an exception before all calls had begun: end those that have, and restore the residuals."""
        for work in self.works:
            with suppress(QcclError):
                work.wait()
        self._restore()

    def saved(self, rank: int) -> list[dict[str, Any]]:
        """Copies for a state, by fragment. Local parameters in it make it the state of this rank alone."""
        return [
            {
                "fragment": fragment,
                "due": self.due,
                "averages": [copy_of(average) for average in averages.values()],
                "begun": [copy_of(array) for array in self.begun.values()],
                "rank": rank if self.begun else None,
            }
            for fragment, averages in self.changes.items()
        ]

    def _restore(self) -> None:
        while self.put_back:  # each once
            self.put_back.pop()()


def advance(common: Any, velocity: Any, change: Any, *, outer_lr: float, momentum: float, nesterov: bool) -> None:
    """One step of SGD. Each operation rounds once, so that all ranks get the same bits on any processor."""
    velocity *= momentum
    velocity += change
    if nesterov:
        change += times(velocity, momentum)
    else:
        change[...] = velocity
    change *= outer_lr
    common -= change


def _refusal(work: Work) -> ArgumentError | None:
    """Wait for a call; returns the error that its result is not finite."""
    try:
        work.wait()
    except ArgumentError as error:
        if work.exception() is not error:  # wait() itself was refused, as in a signal's handler
            raise
        return error
    return None
