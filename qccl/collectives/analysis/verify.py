"""The verifier: proves, with no engine and no data, that the schedules of all ranks compute what they should.

Tests and authors of collectives call verify(); the library does not. The verifier looks at all ranks' schedules at
once, in time that grows linearly with the operations:

1. Each operation by itself: its spans are not empty, lie inside buffers of the right kind and fit the codec's sizes;
   the caller's input is not written; spans that one operation uses concurrently (the transfers of an Exchange; the
   sources and the wire of a Reduce) do not overlap. Derived dependencies cannot show this: they order operations.
2. The i-th send to a peer has the same size as the i-th receive there.
3. Progress: every event of the event graph (``events``) can happen, under MPI's rules and under NCCL's, with
   sends that complete only when received.
4. Contents (``symbolic``): nothing is read before it is written; codes are decoded whole, by the codec that made them;
   every element of the result contains each rank's contribution exactly once; ranks that want the same result get the
   same bits; no random number is used twice; state is combined with the elements that it belongs to, and all of it is
   replaced in the end.
5. A wire slot is written again only after its last content was used.

**Why one execution is enough.** If two operations of a rank touch the same memory and one writes it, the derived
dependencies keep them in program order in every execution; and the i-th receive gets the bytes of the i-th send,
whatever the timing. By induction along the event graph, an operation sees the same contents in every execution that
the rules allow. So one order of the graph stands for all. NCCL's rules only add order to MPI's and need no execution
of their own.

**Why slots need a check.** An engine that obeys the dependencies cannot overwrite data that a *preceding* operation
still reads or sends. But dependencies follow the program order, and the program itself can be wrong: if round 1 runs
ahead of round 2 by as many chunks as there are slots, the receive of a later chunk precedes the reduce in the program,
so the reduce waits for it and sums the wrong chunk. Check 5 finds the early write; check 4 would find the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn

from qccl.base.dtypes import DType
from qccl.collectives.analysis.events import (
    Computation,
    Departure,
    Ensemble,
    Event,
    EventGraph,
    Gate,
    MatchedTransfer,
    Rules,
    in_order,
)
from qccl.collectives.analysis.postconditions import allreduce
from qccl.collectives.analysis.symbolic import Contents, Postcondition, Precondition
from qccl.collectives.schedule import (
    Commit,
    Decode,
    Encode,
    Exchange,
    Op,
    Reduce,
    Role,
    Schedule,
    Span,
    State,
    StateBuffer,
    VerificationError,
    accesses,
)

__all__ = ["Postcondition", "Precondition", "VerificationError", "allreduce", "verify"]


def verify(
    schedules: Sequence[Schedule],
    *,
    rules: Collection[Rules] = ("mpi", "nccl"),
    expect: Callable[[Schedule], Iterable[Postcondition]] = allreduce,
    given: Callable[[Schedule], Iterable[Precondition]] | None = None,
) -> None:
    """Raise VerificationError unless the schedules (of all ranks, in rank order) are right.

    Progress is proved under MPI's rules, and under NCCL's if ``rules`` has "nccl".
    ``expect`` gives each rank's postconditions and ``given`` its preconditions (None: its own input in its input
    buffers or, without these, in its outputs).
    """
    for rank, schedule in enumerate(schedules):
        if (schedule.rank, schedule.size) != (rank, len(schedules)):
            message = (
                f"the schedule at position {rank} of {len(schedules)} is for rank {schedule.rank} of {schedule.size}"
            )
            raise VerificationError(rank, None, message)
        _Checker(schedule).check()
    ensemble = Ensemble(schedules)
    graph = ensemble.graph("mpi")
    order = _progress(schedules, graph, "mpi")
    if "nccl" in rules:
        _progress(schedules, ensemble.graph("nccl"), "nccl")
    contents = Contents(schedules, given)
    for event in order:
        contents.happen(graph.events[event])
    contents.check([list(expect(schedule)) for schedule in schedules])
    contents.check_state()
    contents.check_all_read()


def _progress(schedules: Sequence[Schedule], graph: EventGraph, rules: Rules) -> list[int]:
    """All events in a possible order. Raises VerificationError with a cycle if there is none."""
    order, stuck = in_order(graph)
    if not stuck:
        return order
    waits_for = {later: event for event in stuck for later in graph.after[event]}
    path, event = [], stuck[0]
    while event not in path:
        path.append(event)
        event = waits_for[event]
    cycle = [graph.events[i] for i in path[path.index(event) :]]
    text = ", which waits for ".join(_described(schedules, e) for e in (*cycle, cycle[0]))
    raise VerificationError(*_location(cycle), f"deadlock under {rules.upper()}'s rules: {text}")


def _location(cycle: Sequence[Event]) -> tuple[int, int]:
    for event in cycle:
        if isinstance(event, Computation | Gate):
            return event.rank, event.op_index
    first = cycle[0]
    assert isinstance(first, MatchedTransfer)
    return first.source, first.send_op


def _described(schedules: Sequence[Schedule], event: Event) -> str:
    match event:
        case MatchedTransfer():
            return f"the transfer from rank {event.source} (op {event.send_op}) to {event.target} (op {event.recv_op})"
        case Gate():
            return f"the {'start' if event.opens else 'end'} of {_named(schedules, event.rank, event.op_index)}"
        case Computation() | Departure():
            return _named(schedules, event.rank, event.op_index)


def _named(schedules: Sequence[Schedule], rank: int, op_index: int) -> str:
    return f"rank {rank}'s op {op_index} ({type(schedules[rank].ops[op_index]).__name__})"


class _Checker:
    """Checks each operation of one rank by itself."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._op_index = 0
        self._nbytes: dict[tuple[int, int, DType], int] = {}

    def check(self) -> None:
        """Raise VerificationError for the first operation that is wrong."""
        for i, op in enumerate(self._schedule.ops):
            self._op_index = i
            read, written = accesses(op)
            for span in (*read, *written):
                self._inside(span)
            for span in written:
                role = self._schedule.buffers[span.buffer].role
                if role is Role.INPUT:
                    self._fail(f"writes {span}, the caller's input")
                if role is Role.STATE and not isinstance(op, Commit):
                    self._fail(f"writes {span}, which lasts from call to call and which only a Commit may change")
            self._check_kind(op)

    def _check_kind(self, op: Op) -> None:
        match op:
            case Encode():
                self._code(op, op.src, op.wire)
                self._aligned(op)
            case Decode():
                self._code(op, op.dst, op.wire)
            case Reduce():
                self._reduce(op)
            case Commit():
                self._commit(op)
            case Exchange():
                self._exchange(op)

    def _fail(self, message: str) -> NoReturn:
        raise VerificationError(self._schedule.rank, self._op_index, message)

    def _inside(self, span: Span) -> None:
        buffer = self._schedule.buffers.get(span.buffer)
        if buffer is None:
            self._fail(f"names a buffer {span.buffer!r} that the schedule does not have")
        if not 0 <= span.start <= span.stop <= buffer.size:
            self._fail(f"reaches outside its buffer: {span} of {buffer.size}")
        if span.start == span.stop:
            self._fail(f"names an empty span, {span}; leave operations without work out")

    def _dtype(self, span: Span) -> DType | None:
        return self._schedule.buffers[span.buffer].dtype

    def _code(self, op: Encode | Decode | Reduce, values: Span, wire: Span) -> None:
        """Check one pair of values and their code."""
        dtype = self._dtype(values)
        if dtype is None or self._dtype(wire) is not None:
            self._fail(f"codes {values} as {wire}; values need a buffer with a dtype, codes a buffer of bytes")
        key = (id(op.codec), len(values), dtype)
        if key not in self._nbytes:
            self._nbytes[key] = op.codec.encoded_nbytes(len(values), dtype)
        if len(wire) != self._nbytes[key]:
            self._fail(
                f"{wire} is {len(wire)} bytes, but {len(values)} elements of {dtype} ({values}) are "
                f"{self._nbytes[key]} bytes in {op.codec!r}"
            )

    def _aligned(self, op: Encode | Reduce) -> None:
        if op.index % op.codec.granule:
            self._fail(f"encodes from element {op.index} on, inside a bucket; buckets are {op.codec.granule} elements")

    def _reduce(self, op: Reduce) -> None:
        values = op.out or op.own
        if values is None or (op.out is None and op.wire is None):
            self._fail("reduces from nothing or to nothing: it has neither own nor out, or neither wire nor out")
        for span in op.srcs if op.wire is None else (*op.srcs, op.wire):
            self._code(op, values, span)
        if op.wire is not None:
            self._aligned(op)
            for src in op.srcs:
                if _overlap(src, op.wire):
                    self._fail(f"writes {op.wire} while it still reads {src}")
        if not (op.srcs or op.own) or not 0 <= op.own_index <= len(op.srcs):
            self._fail(f"has {len(op.srcs)} codes, own {op.own} and own_index {op.own_index}")
        if op.own is not None and op.out is not None:
            self._alike(op.own, op.out)
        if op.state is not None:
            self._state(op, len(values), op.state)

    def _state(self, op: Reduce, count: int, state: State) -> None:
        """Check the state of a Reduce."""
        if op.op != "sum":
            self._fail(f"keeps state of a reduction by {op.op}; only sums can")
        if state.residual is not None and op.wire is None:
            self._fail(f"has a residual, {state.residual.old}, but makes no code whose error it could hold")
        if state.momentum is not None and op.own is None:
            self._fail(f"has a momentum, {state.momentum.old}, but no own values")
        for each in (state.residual, state.momentum):
            if each is not None:
                self._state_buffer(each, count)

    def _state_buffer(self, state_buffers: StateBuffer, count: int) -> None:
        for span, role in ((state_buffers.old, Role.STATE), (state_buffers.new, Role.WORK)):
            buffer = self._schedule.buffers[span.buffer]
            if (len(span), buffer.dtype, buffer.role) != (count, state_buffers.dtype, role):
                self._fail(
                    f"keeps state in {state_buffers.old} and {state_buffers.new}; both must have {count} elements of "
                    f"{state_buffers.dtype}, in a state and a work buffer"
                )

    def _commit(self, op: Commit) -> None:
        """Check that a Commit comes last, and that its guard includes the whole output or the whole input."""
        if self._op_index != len(self._schedule.ops) - 1:
            self._fail("commits before the end, when the run may still fail")
        outputs, inputs = (
            {n: b.size for n, b in self._schedule.buffers.items() if b.role is role and b.size}
            for role in (Role.OUTPUT, Role.INPUT)
        )
        own = [span for span in op.guard if self._schedule.buffers[span.buffer].role is not Role.WORK]
        if {span.buffer: len(span) for span in own} not in (outputs, inputs, outputs | inputs):
            found = ", ".join(map(str, op.guard))
            self._fail(f"is guarded by {found}, which is not all of the output, nor all of the input")
        for state_buffers in op.state_buffers:
            self._state_buffer(state_buffers, len(state_buffers.old))

    def _alike(self, src: Span, dst: Span) -> None:
        """Check that two spans of values are the same memory or disjoint, of the same length and type."""
        if len(src) != len(dst) or self._dtype(src) != self._dtype(dst):
            self._fail(f"reads {src} and writes {dst}, of another length or type")
        if src != dst and _overlap(src, dst):
            self._fail(f"reads {src} and writes {dst}, which overlap in part")

    def _exchange(self, op: Exchange) -> None:
        for transfer in (*op.sends, *op.recvs):
            if not 0 <= transfer.peer < self._schedule.size or transfer.peer == self._schedule.rank:
                self._fail(
                    f"has a transfer with rank {transfer.peer}; peers are the other ranks below {self._schedule.size}"
                )
            if self._dtype(transfer.span) is not None:
                self._fail(f"transfers {transfer.span}; only buffers of bytes are transferred")
        self._concurrent([transfer.span for transfer in op.sends], [transfer.span for transfer in op.recvs])

    def _concurrent(self, sent: Sequence[Span], received: Sequence[Span]) -> None:
        """Check that no byte is received while it is sent, or received twice; it may be sent several times."""
        spans = [(s.buffer, s.start, s.stop, False) for s in sent] + [
            (s.buffer, s.start, s.stop, True) for s in received
        ]
        buffer, end, end_received = "", 0, 0  # the end of the spans so far, and of the received ones
        for name, start, stop, is_received in sorted(spans):
            if name != buffer:
                buffer, end, end_received = name, 0, 0
            if start < (end if is_received else end_received):
                self._fail(f"receives into {name} while it sends or receives the same bytes, from byte {start} on")
            end = max(end, stop)
            end_received = max(end_received, stop if is_received else 0)


def _overlap(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
