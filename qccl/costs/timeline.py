"""A training step as a timeline: computation, encoding and decoding, and the link, which work beside each other.

All ranks do the same, so one is simulated. Its trainer computes; its progress thread encodes and decodes; both share
the processors that the rank has. Its link carries one transfer after the other. A call is cut into chunks, each of
which is encoded, sent to its owner, reduced, sent to all, and decoded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Call", "Rank", "Segment", "step_seconds"]

#: a task or transfer is over when less than this is left (seconds; times are sums of many floating-point numbers)
_NOTHING = 1e-12


@dataclass(frozen=True)
class Call:
    """One reduction of some gradients.

    Attributes:
        encode, reduce, decode: seconds of a processor before the first round, between the rounds, after the second.
        link: seconds in which the link carries one round.
        chunks: parts of the call that are encoded, sent and decoded independently.
        hops: messages that must arrive one after the other in each round.
        later: seconds by which each message arrives later than Rank.latency says, in the first and in the second round.
    """

    encode: float
    reduce: float
    decode: float
    link: float
    chunks: int = 1
    hops: int = 1
    later: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Segment:
    """A part of the trainer's computation.

    Attributes:
        seconds: of a processor.
        starts: calls that start at its end.
        waits: it begins when all calls have ended.
        sleeps: it needs no processor.
    """

    seconds: float
    starts: Sequence[Call] = ()
    waits: bool = False
    sleeps: bool = False


@dataclass(frozen=True)
class Rank:
    """What a rank has.

    Attributes:
        processors: its share of the machine's; less than 1 if ranks share one.
        latency: seconds from the end of a transfer to the arrival of its message.
        threads: of the trainer's computation; encoding and decoding have one.
    """

    processors: float
    latency: float
    threads: int = 1


@dataclass
class _Chunk:
    """A chunk on its way; ``stage`` 0 to 4: encode, first round, reduce, second round, decode."""

    call: Call
    stage: int = 0

    def seconds(self) -> float:
        call = self.call
        return (call.encode, call.link, call.reduce, call.link, call.decode)[self.stage] / call.chunks


def step_seconds(segments: Sequence[Segment], rank: Rank) -> float:
    """The time of a step that consists of ``segments``, with the calls that they start."""
    return _Simulation(segments, rank).run()


class _Simulation:
    """Advances from event to event; between two, all queues work at constant rates."""

    def __init__(self, segments: Sequence[Segment], rank: Rank) -> None:
        self._segments = deque(segments)
        self._rank = rank
        self._now = 0.0
        self._trainer = 0.0  # seconds that are left of the first segment
        self._begun = False
        self._tasks: deque[_Queued] = deque()
        self._transfers: deque[_Queued] = deque()
        self._arrivals: list[tuple[float, int, _Chunk]] = []
        self._chunks_left = 0
        self._number = 0

    def run(self) -> float:
        while True:
            self._begin_segment()
            trainer, tasks = self._rates()
            ends = [self._trainer / trainer] if self._begun else []
            ends += [self._tasks[0].left / tasks] if self._tasks else []
            ends += [self._transfers[0].left] if self._transfers else []
            ends += [self._arrivals[0][0] - self._now] if self._arrivals else []
            if not ends:
                return self._now
            self._advance(max(0.0, min(ends)), trainer, tasks)

    def _begin_segment(self) -> None:
        if not self._begun and self._segments and not (self._segments[0].waits and self._chunks_left):
            self._begun, self._trainer = True, self._segments[0].seconds

    def _rates(self) -> tuple[float, float]:
        """Progress of the trainer and of the progress thread, in seconds of a processor per second."""
        sleeps = self._begun and self._segments[0].sleeps
        threads = self._rank.threads * int(self._begun and not sleeps) + int(bool(self._tasks))
        rate = min(1.0, self._rank.processors / max(1, threads))
        return (1.0 if sleeps else rate), rate

    def _advance(self, seconds: float, trainer: float, tasks: float) -> None:
        self._now += seconds
        if self._begun:
            self._trainer -= seconds * trainer
        for queue, rate in ((self._tasks, tasks), (self._transfers, 1.0)):
            if queue:
                queue[0].left -= seconds * rate
        if self._begun and self._trainer <= _NOTHING:
            self._begun = False
            for call in self._segments.popleft().starts:
                self._start(call)
        for queue in (self._tasks, self._transfers):
            if queue and queue[0].left <= _NOTHING:
                self._ended(queue.popleft().chunk)
        while self._arrivals and self._arrivals[0][0] <= self._now + _NOTHING:
            self._queue(heapq.heappop(self._arrivals)[2])

    def _start(self, call: Call) -> None:
        for _ in range(call.chunks):
            self._chunks_left += 1
            self._queue(_Chunk(call))

    def _queue(self, chunk: _Chunk) -> None:
        queue = self._transfers if chunk.stage in (1, 3) else self._tasks
        queue.append(_Queued(chunk.seconds(), chunk))

    def _ended(self, chunk: _Chunk) -> None:
        """A stage of a chunk has ended."""
        was_sent, chunk.stage = chunk.stage in (1, 3), chunk.stage + 1
        if chunk.stage > 4:
            self._chunks_left -= 1
        elif was_sent:
            self._number += 1
            later = chunk.call.later[chunk.stage == 4]
            arrival = self._now + chunk.call.hops * (self._rank.latency + later)
            heapq.heappush(self._arrivals, (arrival, self._number, chunk))
        else:
            self._queue(chunk)


@dataclass
class _Queued:
    """A chunk in a queue, with the seconds that its stage still takes."""

    left: float
    chunk: _Chunk
