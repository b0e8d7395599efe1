"""The amounts that a rank's calls have sent, and their times: Communicator.stats()."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qccl.observe.tallies import CallStats, Tallies

__all__ = ["CallStats", "Statistics", "Stats"]

_COLUMNS = (
    "collective",
    "codec",
    "calls",
    "elements",
    "raw",
    "sent",
    "ratio",
    "time",
    "computing",
    "waiting",
    "hidden",
)


@dataclass(frozen=True)
class Stats:
    """One rank's calls in one group. ``str()`` is a table.

    Attributes:
        group: name of the group, the same on its ranks.
        rank, size: number of the rank in the group, and number of all.
        elapsed: seconds since the group was made, or since the last reset.
        calls: the calls by collective and codec, in the order of their first calls.
    """

    group: str
    rank: int
    size: int
    elapsed: float
    calls: tuple[CallStats, ...]

    @property
    def total(self) -> CallStats:
        """All calls together."""
        columns = zip(*(each.values() for each in self.calls), strict=True)
        return CallStats("", "", *(_sum(column) for column in columns))

    def as_dict(self) -> dict[str, Any]:
        """The statistics as a dict for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(_row, self.calls)]
        if len(self.calls) > 1:
            rows.append(_row(self.total))
        title = f"{self.group}, rank {self.rank} of {self.size}: the calls of {self.elapsed:.1f} s"
        return "\n".join([title, *(f"  {line}" for line in _table(rows))])


class Statistics:
    """The statistics of one rank in one group. Any thread may use them."""

    def __init__(self, rank: int, size: int, group: str, tallies: Tallies) -> None:
        self.rank, self.size, self.group = rank, size, group
        self._tallies = tallies
        self._since = time.monotonic()
        self._before: dict[tuple[str, str], CallStats] = {}

    def totals(self) -> Iterator[CallStats]:
        """All calls of the group so far, whatever was reset."""
        return iter(self._tallies)

    def stats(self, *, reset: bool) -> Stats:
        """The calls since the last reset."""
        now, found = time.monotonic(), {(each.collective, each.codec): each for each in self._tallies}
        calls = [_less(each, self._before.get(label)) for label, each in found.items()]
        stats = Stats(self.group, self.rank, self.size, now - self._since, tuple(each for each in calls if each.calls))
        if reset:
            self._since, self._before = now, found
        return stats


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, whose first two columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join(cells).rstrip()


def _with_unit(value: float) -> str:
    """Three digits and a decimal prefix, such as "12.3 M"."""
    prefixes = ["", " k", " M", " G", " T", " P"]
    while round(value, 1) >= 1000 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.1f}{prefixes[0]}" if prefixes[0] else f"{value:.0f}"


def _row(calls: CallStats) -> tuple[str, ...]:
    counts = (calls.elements, calls.raw_nbytes, calls.sent_nbytes)
    times = (calls.seconds, calls.computing_seconds, calls.waiting_seconds, calls.hidden_seconds)
    return (
        calls.collective or "all",
        calls.codec,
        str(calls.calls),
        _with_unit(counts[0]),
        *(f"{_with_unit(each)}B" if each >= 1000 else f"{each} B" for each in counts[1:]),
        "-" if calls.ratio is None else f"{calls.ratio:.2f}",
        *("-" if each is None else f"{each:.3f} s" for each in times),
    )


def _sum(column: Sequence[Any]) -> Any:
    return None if None in column else sum(column)


def _less(calls: CallStats, before: CallStats | None) -> CallStats:
    """The calls that were made after ``before`` was counted."""
    if before is None:
        return calls
    values = zip(calls.values(), before.values(), strict=True)
    numbers = [None if new is None or old is None else new - old for new, old in values]
    return CallStats(calls.collective, calls.codec, *numbers)  # type: ignore[arg-type]
