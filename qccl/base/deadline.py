"""Time limits that count from now, or from the moment when work begins."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """A limit of time. Its owner raises the error that says what did not come in time.

    Attributes:
        seconds: the length of the limit, for messages.
        end: in time.monotonic() seconds; infinite while the limit does not count.
    """

    def __init__(self, seconds: float, *, counts: bool = True) -> None:
        """Begin to count now, or at start() if not ``counts``."""
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
        """When the limit began to count, in time.monotonic() seconds; None before."""
        return self.end - self.seconds if self.counts else None

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() >= self.end

    def remaining(self, least: float = 0.0) -> float:
        """Seconds until the end, at least ``least``."""
        return max(least, self.end - time.monotonic())
