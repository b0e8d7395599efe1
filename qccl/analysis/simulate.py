"""The simulator: the time that schedules take on given links and processors, without an engine or data.

It adds durations to the event graph of ``events``. Each rank has one processor, and a link that sends one transfer at a
time and receives one at the same time. The processor takes the first ready operation of the program; a link takes the
transfer that has waited longest. The simulator shows how chunk sizes, windows and the order of stages affect overlap;
it does not model TCP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from qccl.analysis.events import Computation, Ensemble, Event, Gate, Rendezvous, Rules
from qccl.schedule import Commit, Decode, Encode, Exchange, Op, Reduce, Schedule, Span, VerificationError
from qccl.trace import TraceEvent

__all__ = ["Costs", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates and latencies of the machine.

    Attributes:
        link_rate: bytes per second that a rank can send, and receive at the same time.
        latency: seconds from the last byte's departure to its arrival.
        encode_rate, decode_rate: bytes of values that a rank encodes or decodes per second.
        overhead: seconds that starting a compute operation takes.
    """

    link_rate: float = 125e6
    latency: float = 30e-6
    encode_rate: float = 8e9
    decode_rate: float = 8e9
    overhead: float = 1e-6


@dataclass(frozen=True)
class Timeline:
    """Start and end of every event, and the end of the last one, in seconds."""

    events: tuple[TraceEvent, ...]
    total: float

    def on(self, rank: int, queue: str) -> Iterator[TraceEvent]:
        """The events of one queue of one rank, by start."""
        return iter(sorted((e for e in self.events if (e.rank, e.queue) == (rank, queue)), key=lambda e: e.start))


def simulate(schedules: Sequence[Schedule], costs: Costs | None = None, *, rules: Rules = "mpi") -> Timeline:
    """Run the schedules of all ranks in simulated time; ``rules`` are the host engine's ("mpi") or CUDA's ("nccl").

    Schedules that do not match, or deadlock, raise VerificationError.
    """
    run = _Run(schedules, costs or Costs(), rules)
    total = run.to_end()
    return Timeline(tuple(run.trace), total)


class _Run:
    """The state of a simulation: ready events, busy processors and links, and the times of events."""

    def __init__(self, schedules: Sequence[Schedule], costs: Costs, rules: Rules) -> None:
        self._schedules, self._costs = schedules, costs
        self._graph = Ensemble(schedules).graph(rules)
        self._waits = self._graph.waits.copy()
        self._now = 0.0
        self._agenda: list[
            tuple[float, int, bool]
        ] = []  # (time, event, whether it is done or only frees its resources)
        ranks = range(len(schedules))
        self._computations: list[list[tuple[int, int]]] = [[] for _ in ranks]  # ready: (op number, event)
        self._queues: list[dict[int, Rendezvous]] = [{} for _ in ranks]  # ready, by source
        self._processor_busy, self._sending, self._receiving = ([False for _ in ranks] for _ in range(3))
        self.trace: list[TraceEvent] = []

    def to_end(self) -> float:
        """Run all events and return the time of the last."""
        for event, count in enumerate(self._waits):
            if count == 0:
                self._ready(event)
        self._start_idle()
        while self._agenda:
            self._now, number, is_done = heappop(self._agenda)
            if is_done:
                self._done(number)
            else:
                self._release(self._graph.events[number])
            self._start_idle()
        if stuck := sum(count > 0 for count in self._waits):
            raise VerificationError(0, None, f"{stuck} events of all ranks never happen; verify() says why")
        return self._now

    def _ready(self, number: int) -> None:
        """Queue an event that no longer waits; a Gate happens at once."""
        event = self._graph.events[number]
        match event:
            case Computation():
                heappush(self._computations[event.rank], (event.op_index, number))
            case Rendezvous():
                self._queues[event.source][number] = event
            case Gate():
                self._done(number)

    def _done(self, number: int) -> None:
        for later in self._graph.after[number]:
            self._waits[later] -= 1
            if self._waits[later] == 0:
                self._ready(later)

    def _start_idle(self) -> None:
        """Start a ready event on every idle processor and link."""
        for rank in range(len(self._schedules)):
            if self._computations[rank] and not self._processor_busy[rank]:
                _, number = heappop(self._computations[rank])
                self._processor_busy[rank] = True
                self._begin(number, self._seconds(number), 0.0)
            if self._queues[rank] and not self._sending[rank]:
                self._send_next(rank)

    def _send_next(self, source: int) -> None:
        for number, transfer in self._queues[source].items():
            if not self._receiving[transfer.target]:
                del self._queues[source][number]
                self._sending[source] = self._receiving[transfer.target] = True
                self._begin(number, len(transfer.sent) / self._costs.link_rate, self._costs.latency)
                return

    def _release(self, event: Event) -> None:
        if isinstance(event, Computation):
            self._processor_busy[event.rank] = False
        elif isinstance(event, Rendezvous):
            self._sending[event.source] = self._receiving[event.target] = False

    def _begin(self, number: int, seconds: float, latency: float) -> None:
        """Schedule the release of an event's resources and its completion, and add it to the trace."""
        stop = self._now + seconds
        heappush(self._agenda, (stop, number, False))
        heappush(self._agenda, (stop + latency, number, True))
        for rank, queue, name, args in self._rows(number):
            end = stop if queue == "send" else stop + latency
            self.trace.append(TraceEvent(rank, queue, name, self._now, end, args))

    def _rows(self, number: int) -> Iterator[tuple[int, str, str, dict[str, int | str]]]:
        """Rank, queue, name and arguments of each line of the trace for an event."""
        event = self._graph.events[number]
        match event:
            case Computation():
                op = self._schedules[event.rank].ops[event.op_index]
                yield event.rank, "compute", _label(op), {"operation": event.op_index}
            case Rendezvous():
                args: dict[str, int | str] = {"bytes": len(event.sent), "message": number}
                sent, received = f"to {event.target}: {event.sent}", f"from {event.source}: {event.received}"
                yield event.source, "send", sent, {**args, "peer": event.target, "operation": event.send_op}
                yield event.target, "recv", received, {**args, "peer": event.source, "operation": event.recv_op}

    def _seconds(self, number: int) -> float:
        event = self._graph.events[number]
        assert isinstance(event, Computation)
        schedule, costs = self._schedules[event.rank], self._costs
        op = schedule.ops[event.op_index]
        match op:
            case Encode():
                seconds = _nbytes(schedule, op.src) / costs.encode_rate
            case Decode():
                seconds = _nbytes(schedule, op.dst) / costs.decode_rate
            case Reduce():
                values = _nbytes(schedule, op.out or op.own)
                seconds = values * (len(op.srcs) + (op.own is not None)) / costs.decode_rate
                seconds += values / costs.encode_rate if op.wire is not None else 0.0
            case Commit():
                values = sum(_nbytes(schedule, span) for span in (*op.guard, *(each.new for each in op.state_buffers)))
                seconds = values / costs.decode_rate
            case _:
                seconds = 0.0
        return costs.overhead + seconds


def _nbytes(schedule: Schedule, span: Span | None) -> int:
    return 0 if span is None else len(span) * schedule.buffers[span.buffer].itemsize


def _label(op: Op) -> str:
    match op:
        case Encode():
            return f"encode {op.src}"
        case Decode():
            return f"decode {op.dst}"
        case Reduce():
            values = op.out or op.own
            return f"reduce {values}"
        case Commit():
            return "commit"
        case Exchange():
            return "exchange"
