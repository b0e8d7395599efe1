"""The outer steps of DiLoCo: their begins and ends, and one that runs while its caller continues to train."""

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
    """The begins and ends of each fragment's outer steps, which follow from the number of the local step alone.

    Attributes:
        period: local steps between two outer steps of a fragment; None: the program begins outer steps by step().
        delay: local steps between the begin and the end of an outer step, less than the period.
    """

    def __init__(self, fragments: int, period: Any, delay: Any) -> None:
        """``fragments`` is their number. Raises ArgumentError for arguments of DiLoCo that are not possible."""
        every, wait = as_integer(period), as_integer(delay)
        if period is not None and (every is None or every < fragments):
            raise ArgumentError(
                f"period must be a number of local steps, at least the number of fragments ({fragments}), not "
                f"{period!r}"
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
        changes: the changes by fragment and number of the array; after settle() the averages over the ranks.
        due: the local step after which the result is applied.
        works: the calls of the outer step.
        begun: the local parameters at its begin, by number of the array; empty unless the steps since then are kept.
        put_back: functions that restore the residuals that the calls have changed.
        refused: the error of an average that is not finite, or None.
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
        """End the calls and restore the residuals, after an exception before all calls had begun."""
        for work in self.works:
            with suppress(QcclError):
                work.wait()
        self._restore()

    def saved(self, rank: int) -> list[dict[str, Any]]:
        """Copy the outer step for a state, by fragment. With local parameters the state is for this rank alone."""
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
    """Take one step of SGD. Each operation rounds once, so that all ranks get the same bits on any processor."""
    velocity *= momentum
    velocity += change
    if nesterov:
        change += times(velocity, momentum)
    else:
        change[...] = velocity
    change *= outer_lr
    common -= change


def _refusal(work: Work) -> ArgumentError | None:
    """Wait for a call. Returns the error if its result is not finite."""
    try:
        work.wait()
    except ArgumentError as error:
        if work.exception() is not error:  # wait() itself was refused, for example in a signal handler
            raise
        return error
    return None
