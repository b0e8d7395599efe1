"""The simulator: the time that schedules take on given links and processors, without an engine or data.

It adds durations to the event graph of ``events``. A rank's processor does one thing at a time: it takes what has
arrived, then sends what is ready, then runs the first ready operation of the program. A link sends one message at a
time and receives one at the same time, each in the order in which they come. Switches keep what a receiver cannot take
yet. The simulator shows how chunk sizes, windows and the order of stages affect overlap; it does not model TCP.

If nodes are equal, the schedules of one node's ranks represent all (see ``events``). The messages that this node sends
then also represent those that arrive from other nodes, and occupy the links in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from qccl.base.trace import TraceEvent
from qccl.codecs.base import Codec
from qccl.collectives.analysis.events import Computation, Departure, Ensemble, Gate, MatchedTransfer, Rules
from qccl.collectives.schedule import Commit, Decode, Encode, Exchange, Op, Reduce, Schedule, Span, VerificationError

__all__ = ["Costs", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates and latencies of the machines; all rates are bytes per second, and times are seconds.

    Attributes:
        link_rate: rate of a link between nodes, in each direction.
        burst: bytes that pass a link at once after it was idle, as a limiter's bucket lets them.
        latency: time from the last byte's departure to its arrival at another node.
        encode_rate, decode_rate: rates, in bytes of values, at which a rank encodes and decodes.
        rates: the same two rates for single codecs.
        overhead: time of a compute operation beside its bytes.
        message: a processor's time to send or receive a message between nodes.
        byte: a processor's time for each byte of such a message; ``intra_rate`` includes copies inside a node.
        header: bytes of the control message that each rank sends to each other in a call.
        eager: bytes of data that may be in one message with a header.
        node_size: ranks of a node, which share its link; rank ``r`` is on node ``r // node_size``.
        intra_rate, intra_latency: rate and latency of a rank inside its node.
        processors: processors of each rank; less than 1 if ranks share one.
    """

    link_rate: float = 125e6
    burst: int = 0
    latency: float = 30e-6
    encode_rate: float = 8e9
    decode_rate: float = 8e9
    rates: Mapping[Codec, tuple[float, float]] = field(default_factory=dict)
    overhead: float = 1e-6
    message: float = 0.0
    byte: float = 0.0
    header: int = 0
    eager: int = 0
    node_size: int = 1
    intra_rate: float = 10e9
    intra_latency: float = 1e-6
    processors: float = 1.0


@dataclass(frozen=True)
class Timeline:
    """Start and end of every event, the end of the last one, and how long the busiest processor works, in seconds."""

    events: tuple[TraceEvent, ...]
    total: float
    busy: float

    def on(self, rank: int, queue: str) -> Iterator[TraceEvent]:
        """The events of one queue of one rank, by start."""
        return iter(sorted((e for e in self.events if (e.rank, e.queue) == (rank, queue)), key=lambda e: e.start))


def simulate(schedules: Sequence[Schedule], costs: Costs | None = None, *, rules: Rules = "mpi") -> Timeline:
    """Run the schedules in simulated time; ``rules`` are MPI's, TCP's for short messages ("eager"), or CUDA's ("nccl").

    ``schedules`` has those of all ranks, or of the first node's ranks if all nodes do the same. Raises
    VerificationError if they do not match, or deadlock.
    """
    run = _Simulation(schedules, costs or Costs(), rules)
    total = run.to_end()
    return Timeline(tuple(run.trace), total, max(run.busy, default=0.0))


class _Lane:
    """One direction of a link: it carries messages in the order in which they come; see Costs.burst for ``burst``."""

    def __init__(self, burst: float) -> None:
        self._burst, self._free = burst, -burst

    def take(self, now: float, seconds: float) -> tuple[float, float]:
        """Occupy the lane for ``seconds``, from ``now`` or when it is free; returns the start and the end."""
        start = max(self._free, now - self._burst)
        self._free = start + seconds
        return max(now, start), max(now, self._free)


#: kinds of a processor's work, in order of precedence
_RECEIVE, _SEND, _COMPUTE = range(3)


@dataclass(slots=True)
class _Processor:
    """The work that a rank's processor may begin, by kind, order and event, and whether it is busy."""

    ready: list[tuple[int, int, int]] = field(default_factory=list)
    busy: bool = False


class _Simulation:
    """The state of a simulation: what processors and links do, and the times of events."""

    def __init__(self, schedules: Sequence[Schedule], costs: Costs, rules: Rules) -> None:
        self._schedules, self._costs = schedules, costs
        self._graph = Ensemble(schedules).graph(rules)
        self._waits = self._graph.waits.copy()
        self._now, self._number = 0.0, count()
        self._agenda: list[tuple[float, int, Callable[[int], None], int]] = []  # (time, number, action, its argument)
        self._processors = [_Processor() for _ in schedules]
        self._may_start: list[int] = []  # ranks whose processors may have something to do
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._departures: dict[int, float] = {}  # when the last byte of a message leaves
        self.trace: list[TraceEvent] = []
        self.busy = [0.0] * len(schedules)  # the seconds in which each processor works

    def to_end(self) -> float:
        """Run all events and return the time of the last."""
        for rank in range(len(self._schedules)):
            self._send_headers(rank)
        for event, waits in enumerate(self._waits):
            if waits == 0:
                self._ready(event)
        self._start_idle()
        while self._agenda:
            self._now, _, happen, number = heappop(self._agenda)
            happen(number)
            if not self._agenda or self._agenda[0][0] > self._now:  # nothing else happens at this time
                self._start_idle()
        if stuck := sum(waits > 0 for waits in self._waits):
            raise VerificationError(0, None, f"{stuck} events of all ranks never happen; verify() says why")
        return self._now

    def _at(self, seconds: float, happen: Callable[[int], None], number: int) -> None:
        heappush(self._agenda, (seconds, next(self._number), happen, number))

    # -- the order of events ---------------------------------------------------------------------------------------

    def _ready(self, number: int) -> None:
        """An event no longer waits; a Gate happens at once."""
        event = self._graph.events[number]
        match event:
            case Computation():
                self._offer(event.rank, _COMPUTE, event.op_index, number)
            case Departure():
                self._offer(event.rank, _SEND, self._order(event.transfer), number)
            case MatchedTransfer() if number in self._departures:  # an eager message that has arrived
                self._offer(event.target % len(self._schedules), _RECEIVE, self._order(number), number)
            case MatchedTransfer():
                self._offer(event.source, _SEND, self._order(number), number)
            case Gate():
                self._done(number)

    def _done(self, number: int) -> None:
        for later in self._graph.after[number]:
            self._happened_before(later)

    def _happened_before(self, number: int) -> None:
        """Count down the events for which an event still waits."""
        self._waits[number] -= 1
        if self._waits[number] == 0:
            self._ready(number)

    # -- processors ------------------------------------------------------------------------------------------------

    def _offer(self, rank: int, kind: int, order: int, number: int) -> None:
        """Let a rank's processor do its part of an event; a part that takes no time needs no processor."""
        if kind != _COMPUTE and self._moving(number) == 0:
            self._end(kind, number)
            return
        heappush(self._processors[rank].ready, (kind, order, number))
        self._may_start.append(rank)

    def _start_idle(self) -> None:
        """Let idle processors begin the first work that is ready."""
        while self._may_start:
            rank = self._may_start.pop()
            if self._processors[rank].ready and not self._processors[rank].busy:
                self._work(rank)

    def _work(self, rank: int) -> None:
        processor = self._processors[rank]
        kind, _, number = heappop(processor.ready)
        seconds = (self._computing(number) if kind == _COMPUTE else self._moving(number)) / self._costs.processors
        if kind == _COMPUTE:
            self._record_computation(number, seconds)
        self._occupy(rank, seconds, partial(self._end, kind), number)

    def _occupy(self, rank: int, seconds: float, then: Callable[[int], None], number: int) -> None:
        def end(number: int) -> None:
            self._processors[rank].busy = False
            self._may_start.append(rank)
            then(number)

        self._processors[rank].busy = True
        self.busy[rank] += seconds
        self._at(self._now + seconds, end, number)

    def _end(self, kind: int, number: int) -> None:
        """A processor has done its part of an event."""
        if kind != _SEND:
            self._done(number)
            return
        event, transfer = self._graph.events[number], number
        if isinstance(event, Departure):
            transfer = event.transfer
            for later in self._graph.after[number]:
                if later != transfer:  # a message that waits until it arrives
                    self._happened_before(later)
        lane, _ = self._lanes_of(transfer)
        start, self._departures[transfer] = lane.take(self._now, self._travel(transfer))
        self._at(start, self._leave, transfer)

    def _send_headers(self, rank: int) -> None:
        """The headers to and from all other ranks come first; they share messages with data that is short enough."""
        costs, schedule = self._costs, self._schedules[rank]
        first = next((op for op in schedule.ops if isinstance(op, Exchange)), Exchange((), ()))
        joined = sum(len(send.span) <= costs.eager for send in first.sends)
        others = schedule.size - 1
        near = sum(peer // costs.node_size == rank // costs.node_size for peer in range(schedule.size)) - 1
        for lanes, peers, rate in (
            (self._lanes_between(rank, far=True), others - near, costs.link_rate),
            (self._lanes_between(rank, far=False), near, costs.intra_rate),
        ):
            for lane in lanes:
                lane.take(0.0, peers * costs.header / rate)
        seconds = 2 * ((others - joined) * costs.message + (others - near) * costs.header * costs.byte)
        if seconds:
            self._occupy(rank, seconds / costs.processors, lambda _: None, 0)

    # -- links -----------------------------------------------------------------------------------------------------

    def _leave(self, number: int) -> None:
        """A message begins to leave: reserve the receiver's side, too."""
        _, lane = self._lanes_of(number)
        start, stop = lane.take(self._now, self._travel(number))
        stop = max(stop, self._departures[number])
        event = self._transfer(number)
        latency = self._costs.latency if self._is_far(event) else self._costs.intra_latency
        self._record_transfer(number, event, self._departures[number], start, stop + latency)
        self._at(stop + latency, self._arrive, number)

    def _arrive(self, number: int) -> None:
        if self._waits[number]:
            self._happened_before(number)
        else:
            target = self._transfer(number).target % len(self._schedules)
            self._offer(target, _RECEIVE, self._order(number), number)

    def _order(self, number: int) -> int:
        """The key of the order in which a processor sends and receives: by the program, then from the next rank on."""
        event, size = self._transfer(number), self._schedules[0].size
        return event.send_op * size + (event.target - event.source) % size

    def _transfer(self, number: int) -> MatchedTransfer:
        event = self._graph.events[number]
        assert isinstance(event, MatchedTransfer)
        return event

    def _is_far(self, event: MatchedTransfer) -> bool:
        size = self._costs.node_size
        return event.source // size != event.target // size

    def _lanes_of(self, number: int) -> tuple[_Lane, _Lane]:
        """The links that a transfer leaves and arrives through."""
        event = self._transfer(number)
        far = self._is_far(event)
        target = event.target % len(self._schedules)
        return self._lanes_between(event.source, far=far)[0], self._lanes_between(target, far=far)[1]

    def _lanes_between(self, rank: int, *, far: bool) -> tuple[_Lane, _Lane]:
        """Both directions of the link of a rank, to other nodes (``far``) or inside its node."""
        link = rank // self._costs.node_size if far else rank
        where = "" if far else " inside"
        return self._lane(f"send{where}", link), self._lane(f"receive{where}", link)

    def _lane(self, direction: str, link: int) -> _Lane:
        burst = 0.0 if "inside" in direction else self._costs.burst / self._costs.link_rate
        return self._lanes.setdefault((direction, link), _Lane(burst))

    # -- durations -------------------------------------------------------------------------------------------------

    def _travel(self, number: int) -> float:
        """Seconds that a transfer occupies a link."""
        event = self._transfer(number)
        return len(event.sent) / (self._costs.link_rate if self._is_far(event) else self._costs.intra_rate)

    def _moving(self, number: int) -> float:
        """Seconds of a processor to send or receive a message."""
        event = self._graph.events[number]
        transfer = self._transfer(event.transfer if isinstance(event, Departure) else number)
        return self._costs.message + (len(transfer.sent) * self._costs.byte if self._is_far(transfer) else 0.0)

    def _computing(self, number: int) -> float:
        event = self._graph.events[number]
        assert isinstance(event, Computation)
        schedule, costs = self._schedules[event.rank], self._costs
        op = schedule.ops[event.op_index]
        if isinstance(op, Exchange):
            return 0.0
        if isinstance(op, Commit):
            values = sum(_nbytes(schedule, span) for span in (*op.guard, *(each.new for each in op.state_buffers)))
            return costs.overhead + values / costs.decode_rate
        encode_rate, decode_rate = costs.rates.get(op.codec, (costs.encode_rate, costs.decode_rate))
        match op:
            case Encode():
                seconds = _nbytes(schedule, op.src) / encode_rate
            case Decode():
                seconds = _nbytes(schedule, op.dst) / decode_rate
            case Reduce():
                values = _nbytes(schedule, op.out or op.own)
                seconds = values * (len(op.srcs) + (op.own is not None)) / decode_rate
                seconds += values / encode_rate if op.wire is not None else 0.0
        return costs.overhead + seconds

    # -- the timeline ----------------------------------------------------------------------------------------------

    def _record_computation(self, number: int, seconds: float) -> None:
        event = self._graph.events[number]
        assert isinstance(event, Computation)
        label = _label(self._schedules[event.rank].ops[event.op_index])
        args = {"operation": event.op_index}
        self.trace.append(TraceEvent(event.rank, "compute", label, self._now, self._now + seconds, args))

    def _record_transfer(self, number: int, event: MatchedTransfer, sent: float, comes: float, arrived: float) -> None:
        shift = event.target - event.target % len(self._schedules)
        target, source = event.target - shift, (event.source - shift) % self._schedules[0].size
        args: dict[str, int | str] = {"bytes": len(event.sent), "message": number}
        send, receive = f"to {event.target}: {event.sent}", f"from {source}: {event.received}"
        of_send = {**args, "peer": event.target, "operation": event.send_op}
        of_receive = {**args, "peer": source, "operation": event.recv_op}
        self.trace.append(TraceEvent(event.source, "send", send, self._now, sent, of_send))
        self.trace.append(TraceEvent(target, "recv", receive, comes, arrived, of_receive))


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
