"""Timelines of the operations of each rank and queue, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from qccl.base.files import writing
from qccl.base.machine_name import machine_name

__all__ = ["TraceEvent", "write_trace"]

#: rounds of messages that compare the clocks of machines
_CLOCK_ROUNDS = 20


class Ranks(Protocol):
    """The part of a Communicator that write_trace() uses."""

    rank: int
    size: int

    def allgather(self, item: bytes) -> list[bytes]:
        """Every rank's ``item`` in rank order."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A timed operation or transfer.

    Attributes:
        rank: the rank that ran it.
        queue: "compute", "send" or "recv"; on CUDA "compute", "comm", "out" or "in".
        name: a description.
        start, stop: seconds; in a run of time.perf_counter(), whose origin the ranks of one machine share. A
            transfer starts when it is posted and stops when its completion is noticed.
        args: details: "bytes", "elements", "codec", "round" (of quantisation, from 0), "chunk" (of that round, from 0),
            "operation" (its number in the schedule). A transfer also has "peer", "call" and "message" (its number among
            the messages to, or from, the peer), which match a send with its receive.
    """

    rank: int
    queue: str
    name: str
    start: float
    stop: float
    args: Mapping[str, int | str] = field(default_factory=dict, hash=False)


def write_trace(path: str | PathLike[str], events: Iterable[TraceEvent], comm: Ranks | None = None) -> None:
    """Write events in Chrome's JSON. With ``comm`` the call is collective, and rank 0 writes the events of all ranks.

    The file shows a rank as a process: one track for its computations, and for each peer one for sends and one for
    receives. An arrow joins a send to its receive. Messages of a track are drawn one after the other: a message begins
    when the one before it has ended, and "queued_us" is the time between its posting and this beginning. Times are
    microseconds from the first event. Clocks of different machines are compared by messages; "otherData" has the error.
    """
    found, clocks = list(events), "all events are of one clock, or their clocks were not compared"
    if comm is not None:
        found, clocks = _gathered(found, comm)
        if comm.rank != 0:
            return
    slices = _slices(found)
    records = [*_labels(slices), *(each.record() for each in slices), *_arrows(slices)]
    document = {"displayTimeUnit": "ns", "otherData": {"clocks": clocks}, "traceEvents": records}
    with writing(path) as file:
        file.write(json.dumps(document).encode())


# -- all ranks ---------------------------------------------------------------------------------------------------------


def _gathered(events: Sequence[TraceEvent], comm: Ranks) -> tuple[list[TraceEvent], str]:
    """Collective: all ranks' events by the clock of rank 0, and a remark on how exact that is."""
    item = {"machine": _machine(), "events": [asdict(event) for event in events]}
    items = [json.loads(each) for each in comm.allgather(json.dumps(item).encode())]
    offsets, clocks = [0.0] * comm.size, "all ranks share a clock"
    if len({each["machine"] for each in items}) > 1:
        bounds = _clock_bounds(comm)
        elsewhere = [rank for rank, each in enumerate(items) if each["machine"] != items[0]["machine"]]
        for rank in elsewhere:
            offsets[rank] = sum(bounds[rank]) / 2
        error = max((high - low) / 2 for low, high in (bounds[rank] for rank in elsewhere))
        clocks = f"the clocks of ranks {elsewhere} were compared with rank 0's by messages, to {error * 1e6:.0f} us"
    return [
        TraceEvent(**event | {"start": event["start"] - offset, "stop": event["stop"] - offset})
        for each, offset in zip(items, offsets, strict=True)
        for event in each["events"]
    ], clocks


def _machine() -> str:
    """An id that processes with the same clock share: the boot id of the operating system."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return machine_name()


def _clock_bounds(comm: Ranks) -> list[tuple[float, float]]:
    """Collective: for each rank, the least and the greatest number of seconds its clock may be ahead of rank 0's.

    No rank leaves an all-gather before every rank has entered it, so one rank's entry and another's exit give a bound.
    """
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        entered = time.perf_counter()
        comm.allgather(b"")
        rounds.append((entered, time.perf_counter()))
    all_rounds = [json.loads(each) for each in comm.allgather(json.dumps(rounds).encode())]
    return [
        (
            max(mine[0] - zero[1] for mine, zero in zip(found, all_rounds[0], strict=True)),
            min(mine[1] - zero[0] for mine, zero in zip(found, all_rounds[0], strict=True)),
        )
        for found in all_rounds
    ]


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slice:
    """An event on its track; ``start`` and ``stop`` in nanoseconds from the first event on, ``tid`` from 1 on."""

    event: TraceEvent
    start: int
    stop: int
    tid: int = 0

    @property
    def track(self) -> tuple[int, int, str]:
        """A key that orders the tracks of a rank (computations, other queues, peers), with the track's name last."""
        queue, peer = self.event.queue, self.event.args.get("peer")
        if queue in ("send", "recv") and isinstance(peer, int):
            return 2 + peer, queue == "recv", f"{'to' if queue == 'send' else 'from'} rank {peer}"
        return (0 if queue == "compute" else 1), 0, queue

    @property
    def message(self) -> tuple[Any, ...] | None:
        """A key that a send and its receive share: sender, receiver, call, number; None for other events."""
        rank, args = self.event.rank, self.event.args
        if self.event.queue not in ("send", "recv") or not {"peer", "message"} <= args.keys():
            return None
        ends = (rank, args["peer"]) if self.event.queue == "send" else (args["peer"], rank)
        return (*ends, args.get("call"), args["message"])

    def record(self) -> dict[str, Any]:
        record = {"name": self.event.name, "cat": self.event.queue, "ph": "X", "pid": self.event.rank, "tid": self.tid}
        return record | {"ts": self.start / 1e3, "dur": (self.stop - self.start) / 1e3, "args": dict(self.event.args)}


def _slices(events: Sequence[TraceEvent]) -> list[_Slice]:
    """The events by tracks; those of one track follow each other."""
    origin = min((event.start for event in events), default=0.0)

    def at(seconds: float) -> int:
        return round((seconds - origin) * 1e9)

    slices = [_Slice(event, at(event.start), at(event.stop)) for event in events]
    for send, receive in _messages(slices):
        # A receive is posted long before its message is sent, and a send may be noticed long after it ended.
        receive.start = min(max(receive.start, send.start), receive.stop)
        send.stop = max(send.start, min(send.stop, receive.stop))
    tracks: defaultdict[int, defaultdict[tuple[int, int, str], list[_Slice]]]
    tracks = defaultdict(lambda: defaultdict(list))
    for each in sorted(slices, key=lambda each: (each.stop, each.start)):
        tracks[each.event.rank][each.track].append(each)
    found: list[_Slice] = []
    for rank in sorted(tracks):
        for tid, track in enumerate(sorted(tracks[rank]), 1):
            found += _in_turn(tracks[rank][track], tid)
    return found


def _in_turn(slices: Sequence[_Slice], tid: int) -> Sequence[_Slice]:
    """Let each slice begin when the one before it has ended: viewers misplace slices that overlap on a track."""
    free = 0
    for each in slices:
        posted, each.tid = each.start, tid
        each.start = max(posted, free)
        each.stop = free = max(each.stop, each.start + 1)
        if each.message is not None:
            args: dict[str, Any] = {**each.event.args, "queued_us": round((each.start - posted) / 1e3, 3)}
            each.event = replace(each.event, args=args)
    return slices


def _messages(slices: Iterable[_Slice]) -> list[tuple[_Slice, _Slice]]:
    """The send and the receive of each message whose both ends are known."""
    ends: defaultdict[tuple[Any, ...], tuple[list[_Slice], list[_Slice]]] = defaultdict(lambda: ([], []))
    for each in sorted(slices, key=lambda each: each.start):
        if each.message is not None:
            ends[each.message][each.event.queue == "recv"].append(each)
    return [pair for sends, receives in ends.values() for pair in zip(sends, receives, strict=False)]


def _arrows(slices: Iterable[_Slice]) -> list[dict[str, Any]]:
    """Two records per message. Messages that inexact clocks let arrive before they are sent get no arrow."""
    records: list[dict[str, Any]] = []
    for number, (send, receive) in enumerate(_messages(slices), 1):
        if send.start < receive.stop:
            both = {"name": "message", "cat": "message", "id": number}
            records.append(both | {"ph": "s", "pid": send.event.rank, "tid": send.tid, "ts": send.start / 1e3})
            end = {"ph": "f", "bp": "e", "pid": receive.event.rank, "tid": receive.tid, "ts": (receive.stop - 1) / 1e3}
            records.append(both | end)
    return records


def _labels(slices: Iterable[_Slice]) -> list[dict[str, Any]]:
    """Records that name processes and threads, and order them."""
    labels: list[dict[str, Any]] = []

    def label(kind: str, rank: int, tid: int, **args: object) -> None:
        labels.append({"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args})

    threads = dict.fromkeys((each.event.rank, each.tid, each.track[2]) for each in slices)
    for rank in dict.fromkeys(rank for rank, _, _ in threads):
        label("process_name", rank, 0, name=f"rank {rank}")
        label("process_sort_index", rank, 0, sort_index=rank)
    for rank, tid, name in threads:
        label("thread_name", rank, tid, name=name)
        label("thread_sort_index", rank, tid, sort_index=tid)
    return labels
