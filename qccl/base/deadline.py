"""Limits of time: one that counts at once, and one that counts from the moment when work has begun."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """The end of a number of seconds. Who waits for it raises the error that says what did not come.

    Attributes:
        seconds: as given, for messages.
        end: in time.monotonic() seconds; infinite while the limit does not count.
    """

    def __init__(self, seconds: float, *, counts: bool = True) -> None:
        """It counts from now on, or from start() on if not ``counts``."""
        self.seconds = seconds
        self.end = time.monotonic() + seconds if counts else math.inf

    def start(self) -> Deadline:
        """Count from now on, unless the limit counts already."""
        if not self.counts:
            self.end = time.monotonic() + self.seconds
        return self

    @property
    def counts(self) -> bool:
        """Whether the limit counts."""
        return self.end != math.inf

    @property
    def begun(self) -> float | None:
        """When it began to count, in time.monotonic() seconds; None if it does not."""
        return self.end - self.seconds if self.counts else None

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() >= self.end

    def remaining(self, least: float = 0.0) -> float:
        """Seconds until the end, at least ``least``."""
        return max(least, self.end - time.monotonic())
