"""Timelines: what ran when, on which rank and lane, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

__all__ = ["TraceEvent", "write_trace"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        rank: where it ran.
        lane: "compute", "send" or "recv"; on CUDA "compute" or "comm".
        name: what, in words.
        start: seconds; in a run those of time.perf_counter(), which the ranks of one machine share.
        stop: seconds, on the same clock.
    """

    rank: int
    lane: str
    name: str
    start: float
    stop: float


def write_trace(path: str | PathLike[str], events: Iterable[TraceEvent]) -> None:
    """Write the events in Chrome's JSON: a process per rank, a thread per lane, more where events of a lane overlap.

    Times count from the first event, in microseconds.
    """
    ordered = sorted(events, key=lambda e: (e.start, e.stop))
    origin = ordered[0].start if ordered else 0.0
    records: list[dict[str, Any]] = []
    names: dict[tuple[int, str], int] = {}
    for event, row in zip(ordered, _rows(ordered), strict=True):
        thread = event.lane if row == 0 else f"{event.lane} {row + 1}"
        records.append(
            {
                "name": event.name,
                "cat": event.lane,
                "ph": "X",
                "pid": event.rank,
                "tid": names.setdefault((event.rank, thread), len(names)),
                "ts": (event.start - origin) * 1e6,
                "dur": (event.stop - event.start) * 1e6,
            }
        )
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ns", "traceEvents": [*_labels(names), *records]}, file)


def _rows(ordered: Sequence[TraceEvent]) -> list[int]:
    """For each event, in order of start, the first row of its lane that is free by then."""
    busy_until: dict[tuple[int, str], list[float]] = {}
    rows: list[int] = []
    for event in ordered:
        stops = busy_until.setdefault((event.rank, event.lane), [])
        row = next((i for i, stop in enumerate(stops) if stop <= event.start), len(stops))
        stops[row : row + 1] = [event.stop]
        rows.append(row)
    return rows


def _labels(names: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    """Records that name the processes and threads, and order the ranks."""
    labels: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in names}):
        labels.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        labels.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for (rank, thread), tid in names.items():
        labels.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": thread}})
    return labels
