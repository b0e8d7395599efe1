"""The events of all ranks' schedules, and the order that dependencies impose on them.

The verifier asks whether every event of the graph can happen, the simulator when it does. The events are:

- a ``Computation``: a compute operation of one rank;
- a ``MatchedTransfer``: a send of one rank and the matching receive of another. Neither ends before both have begun,
  which is all that MPI and NCCL promise;
- a ``Departure``: a send whose bytes the transport has copied, so that the sender needs no receiver to go on;
- a ``Gate``: the opening or closing of an Exchange on one rank, if an engine runs the Exchange as one NCCL group.

**MPI's rules**: each transfer and each compute operation starts when the operations that it depends on have completed.
**Eager rules** are MPI's, but a send ends with its Departure; the MatchedTransfer is then the receive alone. UCX does
so with messages of up to 256 KiB over TCP. This is more than MPI promises, so the simulator uses it, and the verifier
does not.
**NCCL's rules**: each queue of a rank runs in order. An Exchange is one NCCL group: it opens when the previous
operation of the communication queue has closed, its transfers progress independently, and it closes when all have
ended.

**Representatives.** If all nodes do the same, the schedules of the first node's ranks suffice: ``period`` schedules.
Rank ``r`` behaves as rank ``r % period`` does, with all peers shifted by ``r - r % period``. So a peer's message
arrives when the message arrives that the peer's representative sends over the same distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby, zip_longest
from typing import Literal

from qccl.collectives.schedule import Exchange, Queue, Schedule, Span, Task, VerificationError, dependencies, tasks

__all__ = ["Computation", "Departure", "Ensemble", "Event", "EventGraph"]
__all__ += ["Gate", "MatchedTransfer", "Rules", "in_order"]

Rules = Literal["mpi", "eager", "nccl"]


@dataclass(frozen=True, slots=True)
class Computation:
    """A compute operation."""

    rank: int
    op_index: int


@dataclass(frozen=True, slots=True)
class MatchedTransfer:
    """The bytes of ``sent`` on rank ``source`` go to ``received`` on rank ``target``."""

    source: int
    target: int
    send_op: int
    recv_op: int
    sent: Span
    received: Span


@dataclass(frozen=True, slots=True)
class Departure:
    """The bytes of the MatchedTransfer with the number ``transfer`` leave rank ``rank``."""

    rank: int
    op_index: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Gate:
    """An Exchange opens (its queue has reached it) or closes (all its transfers have ended)."""

    rank: int
    op_index: int
    opens: bool


Event = Computation | MatchedTransfer | Departure | Gate


class EventGraph:
    """Events; for each, the number of events that it waits for, and the events that wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waits: list[int] = []
        self.after: list[list[int]] = []

    def add(self, event: Event) -> int:
        """Add an event and return its number."""
        self.events.append(event)
        self.waits.append(0)
        self.after.append([])
        return len(self.events) - 1

    def order(self, first: int, then: int) -> None:
        """Make event ``then`` wait for event ``first``."""
        self.after[first].append(then)
        self.waits[then] += 1


def in_order(graph: EventGraph) -> tuple[list[int], list[int]]:
    """All events that can happen, in an order close to the programs' order, and the events that cannot."""
    waits = graph.waits.copy()
    positions = [_position(event) for event in graph.events]
    ready = [(positions[i], i) for i, count in enumerate(waits) if count == 0]
    heapify(ready)
    happened: list[int] = []
    while ready:
        _, event = heappop(ready)
        happened.append(event)
        for later in graph.after[event]:
            waits[later] -= 1
            if waits[later] == 0:
                heappush(ready, (positions[later], later))
    return happened, [i for i, count in enumerate(waits) if count]


def _position(event: Event) -> int:
    """The position of an event in the programs; for a MatchedTransfer, the later of its two positions."""
    match event:
        case MatchedTransfer():
            return max(event.send_op, event.recv_op)
        case _:
            return event.op_index


class Ensemble:
    """The schedules of all ranks (in rank order), with sends matched to receives and dependencies derived.

    Fewer schedules than ranks are schedules of representatives. Raises VerificationError if sends and receives do
    not match.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = schedules
        #: the first events of every graph
        self._transfers: list[MatchedTransfer] = []
        self._local = [_Local(schedule) for schedule in schedules]
        self._match_transfers()

    def graph(self, rules: Rules) -> EventGraph:
        """The events of all schedules and their order."""
        graph = EventGraph()
        for event in self._transfers:
            graph.add(event)
        if rules == "eager":
            for number, event in enumerate(self._transfers):
                graph.order(graph.add(Departure(event.source, event.send_op, number)), number)
        for local in self._local:
            if rules == "nccl":
                _connect_queues(graph, local)
            else:
                _connect_transfers(graph, local, len(self._transfers) if rules == "eager" else 0)
        return graph

    def _match_transfers(self) -> None:
        """Match the i-th send to a peer with the i-th receive there, as MPI and NCCL do."""
        sends, recvs = _transfers_by_pair(self._schedules)
        size = self._schedules[0].size if self._schedules else 0
        for source, target in sorted(
            sends.keys() | recvs.keys(), key=lambda pair: (pair[0], (pair[1] - pair[0]) % size)
        ):
            sent, received = self._local[source].transfers[target, True], self._received(source, target)
            for i, (send, recv) in enumerate(zip_longest(sends[source, target], recvs[source, target])):
                _check_match(source, target, i, send, recv)
                sent.append(len(self._transfers))
                received.append(len(self._transfers))
                self._transfers.append(MatchedTransfer(source, target, send[0], recv[0], send[1], recv[1]))

    def _received(self, source: int, target: int) -> list[int]:
        """The transfers from a representative to any rank, at the representative of that rank."""
        shift, size = target - target % len(self._local), self._schedules[0].size
        return self._local[target - shift].transfers[(source - shift) % size, False]


class _Local:
    """The program of one rank, its dependencies and its transfers."""

    def __init__(self, schedule: Schedule) -> None:
        self.rank = schedule.rank
        self.program = list(tasks(schedule, per_transfer=True))
        self.before = dependencies(self.program)
        #: (peer, is_send) -> the transfers, in order
        self.transfers: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)

    def transfer(self, task: Task) -> int | None:
        """The event of a transfer; None for a compute operation."""
        return None if task.transfer is None else self.transfers[task.transfer.peer, task.is_send][task.sequence]


_Pair = tuple[int, int]


def _transfers_by_pair(
    schedules: Sequence[Schedule],
) -> tuple[defaultdict[_Pair, list[tuple[int, Span]]], defaultdict[_Pair, list[tuple[int, Span]]]]:
    """All sends, and all receives, as (op number, span) in program order by (representative of the source, target)."""
    sends: defaultdict[_Pair, list[tuple[int, Span]]] = defaultdict(list)
    recvs: defaultdict[_Pair, list[tuple[int, Span]]] = defaultdict(list)
    for schedule in schedules:
        for i, op in enumerate(schedule.ops):
            if isinstance(op, Exchange):
                for transfer in op.sends:
                    sends[schedule.rank, transfer.peer].append((i, transfer.span))
                for transfer in op.recvs:
                    shift = transfer.peer - transfer.peer % len(schedules)
                    target = (schedule.rank - shift) % schedule.size
                    recvs[transfer.peer - shift, target].append((i, transfer.span))
    return sends, recvs


def _check_match(
    source: int, target: int, i: int, send: tuple[int, Span] | None, recv: tuple[int, Span] | None
) -> None:
    if recv is None and send is not None:
        message = f"send {i} to rank {target} ({len(send[1])} bytes) has no receive: rank {target} receives only"
        raise VerificationError(source, send[0], f"{message} {i} times from rank {source}")
    if send is None and recv is not None:
        message = f"receive {i} from rank {source} ({len(recv[1])} bytes) has no send: rank {source} sends only"
        raise VerificationError(target, recv[0], f"{message} {i} times to rank {target}")
    assert send is not None and recv is not None
    if len(send[1]) != len(recv[1]):
        message = f"receive {i} from rank {source} is of {len(recv[1])} bytes, but rank {source} sends {len(send[1])}"
        raise VerificationError(target, recv[0], f"{message} (its op {send[0]})")


def _connect_transfers(graph: EventGraph, local: _Local, departure: int) -> None:
    """Apply MPI's or eager rules to one rank; the number of a send's event is its receive's plus ``departure``."""
    events: list[int] = []
    for task, before in zip(local.program, local.before, strict=True):
        transfer = local.transfer(task)
        if transfer is None:
            event = graph.add(Computation(local.rank, task.op_index))
        else:
            event = transfer + departure if task.is_send else transfer
        for earlier in {events[i] for i in before}:
            graph.order(earlier, event)
        events.append(event)


def _connect_queues(graph: EventGraph, local: _Local) -> None:
    """Apply NCCL's rules to one rank. An operation depends on everything that one of its transfers depends on."""
    ends: list[int] = []  # the event that ends each task's operation
    last: dict[Queue, int] = {}
    pairs = zip(local.program, local.before, strict=True)
    for i, group in groupby(pairs, key=lambda pair: pair[0].op_index):
        members = list(group)
        first = {ends[j] for _, before in members for j in before}
        queue = members[0][0].queue
        if queue in last:
            first.add(last[queue])
        if queue is Queue.COMPUTE:
            start = stop = graph.add(Computation(local.rank, i))
        else:
            start, stop = (graph.add(Gate(local.rank, i, opens)) for opens in (True, False))
            for task, _ in members:
                transfer = local.transfer(task)
                assert transfer is not None
                graph.order(start, transfer)
                graph.order(transfer, stop)
        for earlier in first:
            graph.order(earlier, start)
        ends += [stop] * len(members)
        last[queue] = stop
