"""The module time, with a clock that a test puts forward: deadlines end when it wants them to, and not before."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Stands for the module time. Waits of the system last as long as they do.

    Attributes:
        ahead: by how many seconds its clock is ahead.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead
