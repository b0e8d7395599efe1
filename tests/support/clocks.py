"""The module time, with a clock that a test puts forward: deadlines end when it wants them to, and not before."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Stands for the module time. Waits of the system last as long as they do.

    Attributes:
        ahead: by how many seconds its clock is ahead.
        asked: how often the time was asked for since it is ahead.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead, self.asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += self.ahead > 0
        return time.monotonic() + self.ahead
