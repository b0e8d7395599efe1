"""A collective as data: operations over spans of named buffers, and the dependencies that follow from them.

A schedule is what one rank does, in plain program order. Nothing in it names an engine: the host engine runs it, the
CUDA engine runs it, the verifier checks it for all ranks at once, the simulator times it.

Dependencies are never written down. They are *derived* from the spans that operations read and write, as a processor
derives them from registers: a read waits for the last write (RAW), a write for the last write (WAW) and for all reads
since (WAR). So a bounded window of wire slots needs no counters: a slot that is used again waits, by itself, until its
send has completed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from qccl.codecs.base import Codec
from qccl.dtypes import DType
from qccl.errors import QcclError
from qccl.intervals import IntervalMap

__all__ = [
    "Buffer",
    "Commit",
    "Decode",
    "Encode",
    "Exchange",
    "Node",
    "Op",
    "Queue",
    "Reduce",
    "Role",
    "Schedule",
    "Span",
    "State",
    "StateBuffer",
    "Transfer",
    "VerificationError",
    "dependencies",
    "nodes",
    "reads",
    "writes",
]


class VerificationError(QcclError):
    """Schedules that cannot be right.

    Attributes:
        rank: whose schedule.
        op_index: number of the operation in it, or None where it is not one operation.
    """

    def __init__(self, rank: int, op_index: int | None, message: str) -> None:
        where = f"rank {rank}" if op_index is None else f"rank {rank}, op {op_index}"
        super().__init__(f"{where}: {message}")
        self.rank = rank
        self.op_index = op_index


class Queue(Enum):
    """Where an operation runs: a CUDA stream, or on the host the kind of progress it needs."""

    COMPUTE = "compute"
    COMM = "comm"
    OUT = "out"  # legs that go through host memory, on their way from the device
    IN = "in"  # and on their way to it


class Role(Enum):
    """Whose memory a buffer is."""

    INPUT = "input"  # the caller's, read only
    OUTPUT = "output"  # the caller's, written (in place: read as well)
    WORK = "work"  # the plan's workspace
    STATE = "state"  # float32 that lasts from call to call: what the caller's key names


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory: ``size`` elements of ``dtype``; ``dtype=None`` means bytes (a wire buffer)."""

    size: int
    dtype: DType | None
    role: Role

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Elements (bytes, for a wire buffer) ``start`` to ``stop`` of a buffer."""

    buffer: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Encode:
    """``wire = encode(src)``.

    ``index`` is the global number of the first element and ``round`` the number of the quantisation in the collective:
    with the seed, the call counter and the rank they key the random numbers of stochastic codecs.
    """

    codec: Codec
    src: Span
    wire: Span
    index: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """``dst = decode(wire)``, or ``dst += decode(wire)``.

    ``index``, ``round`` and ``rank`` say who made the wire: those of its Encode or Reduce. Some codecs derive from them
    which elements a wire has.
    """

    codec: Codec
    wire: Span
    dst: Span
    accumulate: bool = False
    index: int = 0
    round: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """Float32 values that last from call to call: read from ``old``; written to ``new``, which a Commit makes last."""

    old: Span
    new: Span


@dataclass(frozen=True, slots=True)
class State:
    """What a Reduce remembers; one value per element.

    Attributes:
        residual: what the codes of the calls before have left out, times the learning rate.
        momentum: the running sum of the own values.
        mu: how much of that lasts from one call to the next.
    """

    residual: StateBuffer | None = None
    momentum: StateBuffer | None = None
    mu: float = 0.0


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine several codes in one pass, in fp32 and in rank order.

    ``total = op(decode(srcs[0]), ..., own, ..., decode(srcs[-1])) * scale``, where ``own`` (values, not a code) takes
    its place before ``srcs[own_index]``. With ``wire`` the total is encoded into it and ``out`` gets what a decoder
    of ``wire`` gets; without ``wire``, ``out`` gets the total itself. ``src_ranks`` (none: rank 0 for all) made the
    sources in round ``src_round``.

    With ``state`` the operation remembers, in fp32 (``lr`` is that of the run, 1 if not given):

    - momentum: ``new = mu * old + own``, and ``own + mu * new`` takes the place of ``own``;
    - residual, with ``wire``: ``old / lr`` is added to the scaled total, which is then encoded, and ``new`` is what the
      code lacks of it, times ``lr``: the total less ``out``, or without ``out`` less the decoded value.
    """

    codec: Codec
    srcs: tuple[Span, ...]
    own: Span | None
    own_index: int
    wire: Span | None
    out: Span | None
    op: str = "sum"  # "sum" | "min" | "max"
    scale: float = 1.0
    index: int = 0
    round: int = 1
    src_ranks: tuple[int, ...] = ()
    src_round: int = 0
    state: State | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Where all of ``guard`` is finite, make the new values last: copy each ``new`` to its ``old``; else do nothing.

    It comes after everything before it in the program, transfers included: a run that fails changes nothing.
    """

    guard: tuple[Span, ...]
    state_buffers: tuple[StateBuffer, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer to or from ``peer``; the span is in a wire buffer."""

    peer: int
    span: Span


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers that belong together: one NCCL group, or MPI Isend and Irecv legs."""

    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


Op = Encode | Decode | Reduce | Commit | Exchange


@dataclass(frozen=True)
class Schedule:
    """What one rank does for one collective.

    Attributes:
        name: of the algorithm, e.g. ``"two_round"``.
        rank, size: of the communicator it was made for.
        buffers: every buffer the operations name.
        ops: in program order.
        distant: peers whose legs go through host memory, where the engine's buffers are elsewhere.
    """

    name: str
    rank: int
    size: int
    buffers: Mapping[str, Buffer]
    ops: tuple[Op, ...]
    staged_peers: frozenset[int] = frozenset()

    def sent_nbytes(self) -> int:
        """Bytes this rank sends in its Exchanges."""
        return sum(len(transfer.span) for op in self.ops if isinstance(op, Exchange) for transfer in op.sends)


@dataclass(frozen=True, slots=True)
class Node:
    """What an engine starts and completes as one thing: a compute operation, a leg, or a whole Exchange.

    ``sequence`` numbers a leg among the legs of this rank with the same peer and direction, so that both ends of a
    transfer name it alike. ``source`` is where a zero-copy send takes its bytes; its slot is only reserved.
    """

    op_index: int
    op: Op
    transfer: Transfer | None = None
    is_send: bool = False
    sequence: int = 0
    source: Span | None = None

    @property
    def queue(self) -> Queue:
        return Queue.COMM if isinstance(self.op, Exchange) else Queue.COMPUTE

    def reads(self) -> tuple[Span, ...]:
        if self.transfer is not None:
            return _present((self.transfer.span, self.source)) if self.is_send else ()
        return reads(self.op)

    def writes(self) -> tuple[Span, ...]:
        if self.transfer is not None:
            return () if self.is_send else (self.transfer.span,)
        return writes(self.op)


def _present(spans: Iterable[Span | None]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span is not None)


def _carried(state: State | None) -> tuple[StateBuffer, ...]:
    return () if state is None else tuple(each for each in (state.residual, state.momentum) if each is not None)


def reads(op: Op) -> tuple[Span, ...]:
    """The spans that ``op`` reads."""
    match op:
        case Encode():
            return (op.src,)
        case Decode():
            return (op.wire, op.dst) if op.accumulate else (op.wire,)
        case Reduce():
            return _present((*op.srcs, op.own, *(state_buffers.old for state_buffers in _carried(op.state))))
        case Commit():
            return (*op.guard, *(state_buffers.new for state_buffers in op.state_buffers))
        case Exchange():
            return tuple(transfer.span for transfer in op.sends)


def writes(op: Op) -> tuple[Span, ...]:
    """The spans that ``op`` writes."""
    match op:
        case Encode():
            return (op.wire,)
        case Decode():
            return (op.dst,)
        case Reduce():
            return _present((op.wire, op.out, *(state_buffers.new for state_buffers in _carried(op.state))))
        case Commit():
            return tuple(state_buffers.old for state_buffers in op.state_buffers)
        case Exchange():
            return tuple(transfer.span for transfer in op.recvs)


def nodes(schedule: Schedule, *, per_transfer: bool) -> Iterator[Node]:
    """The nodes of a schedule in program order; ``per_transfer`` splits each Exchange into its legs, receives first."""
    counters: dict[tuple[int, bool], int] = {}
    for i, op in enumerate(schedule.ops):
        if not (per_transfer and isinstance(op, Exchange)):
            yield Node(i, op)
            continue
        for transfers, is_send in ((op.recvs, False), (op.sends, True)):
            for transfer in transfers:
                sequence = counters.get((transfer.peer, is_send), 0)
                counters[transfer.peer, is_send] = sequence + 1
                yield Node(i, op, transfer, is_send, sequence)


@dataclass(slots=True)
class _Segment:
    """A stretch of a buffer whose elements share one history: who last wrote it, and who has read it since."""

    start: int
    stop: int
    writer: int | None
    readers: list[int]

    def split(self, at: int) -> _Segment:
        rest = _Segment(at, self.stop, self.writer, list(self.readers))
        self.stop = at
        return rest


def _read(history: IntervalMap[_Segment], span: Span, node: int, found: set[int]) -> None:
    position = span.start
    for segment in history.covered(span.start, span.stop):
        if segment.writer is not None:
            found.add(segment.writer)
        segment.readers.append(node)
        if position < segment.start:
            history.put(_Segment(position, segment.start, None, [node]))
        position = segment.stop
    if position < span.stop:
        history.put(_Segment(position, span.stop, None, [node]))


def _write(history: IntervalMap[_Segment], span: Span, node: int, found: set[int]) -> None:
    for segment in history.put(_Segment(span.start, span.stop, node, [])):
        found.update(segment.readers)
        if segment.writer is not None:
            found.add(segment.writer)


def dependencies(program: Sequence[Node]) -> list[tuple[int, ...]]:
    """For each node, the earlier nodes that must have completed before it may start (RAW, WAR, WAW), ascending."""
    histories: defaultdict[str, IntervalMap[_Segment]] = defaultdict(IntervalMap)
    result: list[tuple[int, ...]] = []
    for i, node in enumerate(program):
        found: set[int] = set()
        for span in node.reads():
            if span.start < span.stop:
                _read(histories[span.buffer], span, i, found)
        for span in node.writes():
            if span.start < span.stop:
                _write(histories[span.buffer], span, i, found)
        found.discard(i)
        if isinstance(node.op, Commit):
            found = set(range(i))
        result.append(tuple(sorted(found)))
    return result
