"""When the gradients of one backward pass were ready, and when the calls that reduced them ran."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["PassTimes"]


@dataclass
class PassTimes:
    """The times of one backward pass, on the clock of time.perf_counter().

    Attributes:
        begin: when DDP handed over the first bucket.
        last: when it handed over the last one so far.
        ready: when DDP handed over each parameter, by its name.
        started, ended: when the call of each group did, by its number. On the host; on a GPU a call ends later.
    """

    begin: float = 0.0
    last: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def arrive(self, names: Iterable[str]) -> None:
        """A bucket with these parameters has arrived."""
        self.last = time.perf_counter()
        self.begin = self.begin or self.last
        self.ready |= dict.fromkeys(names, self.last)

    @property
    def exposed(self) -> float:
        """Seconds in which the trainer waited for calls after the last bucket had arrived."""
        return max([0.0, *(end - self.last for end in self.ended.values())])

    @property
    def seconds(self) -> float:
        """Seconds in which at least one call was under way."""
        return self._under_way(float("inf"))

    @property
    def hidden(self) -> float:
        """Those of them before the last bucket arrived: beside the backward pass."""
        return self._under_way(self.last)

    def start(self, number: int) -> None:
        """The call of this group starts."""
        self.started[number] = time.perf_counter()

    def end(self, number: int) -> None:
        """It has ended."""
        self.ended[number] = time.perf_counter()

    def _under_way(self, until: float) -> float:
        total, at = 0.0, 0.0
        for number in sorted(self.ended, key=self.started.__getitem__):
            begin, end = max(self.started[number], at), min(self.ended[number], until)
            total, at = total + max(0.0, end - begin), max(at, end)
        return total
