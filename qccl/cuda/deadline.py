"""Time limits that count from the moment when a run's first task is on the device."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """A time limit in seconds that counts from start(); until then it is never over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = math.inf

    def start(self) -> Deadline:
        """Count from now on, unless the limit counts already."""
        if not self.counts:
            self._end = time.monotonic() + self.seconds
        return self

    @property
    def counts(self) -> bool:
        """Whether start() was called."""
        return self._end != math.inf

    @property
    def begun(self) -> float | None:
        """When start() was called first, in time.monotonic() seconds; None if it was not."""
        return self._end - self.seconds if self.counts else None

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() > self._end
