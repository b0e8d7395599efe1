"""A collective as data: operations over spans of named buffers, and the dependencies that follow from them.

A schedule lists the operations of one rank in program order. It names no engine: both engines run it, the verifier
checks the schedules of all ranks together, and the simulator times them.

Dependencies are *derived* from the spans that operations read and write, as a processor derives them from registers:
a read waits for the last write (RAW), a write for the last write (WAW) and for all reads since (WAR). A slot that is
used again therefore waits until its send has completed, and a bounded window of wire slots needs no counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from qccl.base.dtypes import FLOAT32, DType
from qccl.base.errors import ArgumentError, QcclError
from qccl.codecs.base import Codec

__all__ = [
    "Buffer",
    "Commit",
    "Decode",
    "Encode",
    "Exchange",
    "Op",
    "Queue",
    "Reduce",
    "Role",
    "Schedule",
    "Span",
    "State",
]
__all__ += ["StateBuffer", "Task", "Transfer", "VerificationError", "accesses", "buffer_name", "dependencies", "pieces"]
__all__ += ["state_buffers", "tasks"]


class VerificationError(QcclError):
    """The schedules do not compute what they should, or cannot end.

    Attributes:
        rank: the rank whose schedule is wrong.
        op_index: the number of the wrong operation, or None if no single operation is wrong.
    """

    def __init__(self, rank: int, op_index: int | None, message: str) -> None:
        where = f"rank {rank}" if op_index is None else f"rank {rank}, op {op_index}"
        super().__init__(f"{where}: {message}")
        self.rank = rank
        self.op_index = op_index


class Queue(Enum):
    """The CUDA stream that an operation runs on, or on the host the kind of progress that it needs."""

    COMPUTE = "compute"
    COMM = "comm"
    OUT = "out"  # transfers through host memory: copies from the device
    IN = "in"  # and copies to the device


class Role(Enum):
    """The owner and the use of a buffer's memory."""

    INPUT = "input"  # the caller's, read only
    OUTPUT = "output"  # the caller's, written (in place: read as well)
    WORK = "work"  # the plan's workspace
    STATE = "state"  # values that last from call to call, under the caller's key


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory: ``size`` elements of ``dtype``; ``dtype=None`` means bytes (a wire buffer).

    ``index`` is the number of the caller's array if a call has several, or the rank of a replica. A buffer's name
    identifies it in a schedule, and says nothing else. ``itemsize`` is the bytes of an element; 1 for a wire buffer.
    """

    size: int
    dtype: DType | None
    role: Role
    index: int | None = None
    itemsize: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", 1 if self.dtype is None else self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize


def buffer_name(what: str, index: int | None) -> str:
    """The name of a buffer, such as "input", or "input 3"."""
    return what if index is None else f"{what} {index}"


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

    ``index``, ``round`` and ``rank`` are those of the Encode or Reduce that made the wire. Some codecs derive from them
    which elements a wire contains.
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
    """Values that last from call to call: read from ``old``, written to ``new``, which a Commit copies back."""

    old: Span
    new: Span
    dtype: DType = FLOAT32


@dataclass(frozen=True, slots=True)
class State:
    """The state of a Reduce, one value per element.

    Attributes:
        residual: the quantisation error of earlier calls, times the learning rate; float32 or bfloat16.
        momentum: the running sum of the own values, in float32.
        mu: the factor of the running sum from one call to the next.
        beta: the factor of the residual from one call to the next.
        sums: the residual belongs to sums that the rank owns, not to its own values.
    """

    residual: StateBuffer | None = None
    momentum: StateBuffer | None = None
    mu: float = 0.0
    beta: float = 1.0
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine several codes in one pass, in fp32 and in rank order.

    ``total = op(decode(srcs[0]), ..., own, ..., decode(srcs[-1])) * scale``, where ``own`` (values, not a code) comes
    before ``srcs[own_index]``. With ``wire`` the total is encoded into it, and ``out`` receives the decoded values of
    ``wire``; without ``wire``, ``out`` receives the total itself. ``src_ranks`` (none: rank 0 for all) made the sources
    in round ``src_round``.

    With ``state`` (computed in fp32; ``lr`` is the learning rate of the run, 1 if not given):

    - momentum: ``new = mu * old + own``, and ``own + mu * new`` replaces ``own``;
    - residual, with ``wire``: ``beta * old / lr`` is added to the scaled total, which is then encoded; ``new`` is the
      quantisation error times ``lr``: the total less its decoded value, rounded to the residual's element type.
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
    """If all of ``guard`` is finite, copy each ``new`` to its ``old``; otherwise do nothing.

    It is the last operation, and waits for all others, transfers included. On the host it also waits until this rank
    has sent its headers, so that an error that ends a run leaves the state as it was.
    """

    guard: tuple[Span, ...]
    state_buffers: tuple[StateBuffer, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message to or from ``peer``; the span is in a wire buffer."""

    peer: int
    span: Span


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers that start together: an NCCL group, or MPI's Isend and Irecv."""

    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


Op = Encode | Decode | Reduce | Commit | Exchange


@dataclass(frozen=True)
class Schedule:
    """The operations of one rank for one collective.

    Attributes:
        name: the algorithm, e.g. ``"two_round"``.
        rank: the rank that runs the schedule.
        size: the number of ranks.
        buffers: every buffer that the operations name.
        ops: the operations in program order.
        staged_peers: peers with which transfers go through host memory, if the engine's buffers are elsewhere.
    """

    name: str
    rank: int
    size: int
    buffers: Mapping[str, Buffer]
    ops: tuple[Op, ...]
    staged_peers: frozenset[int] = frozenset()

    def check_rank(self, rank: int, size: int) -> None:
        """Raise ArgumentError unless this is the schedule of ``rank`` among ``size`` ranks."""
        if (self.rank, self.size) != (rank, size):
            raise ArgumentError(f"this schedule is for rank {self.rank} of {self.size}, not for rank {rank} of {size}")

    def moved_nbytes(self, node_ids: Sequence[int]) -> tuple[int, int]:
        """Bytes that this rank sends to ranks of other nodes, and receives; ``node_ids`` has each rank's node."""
        moved, here = [0, 0], node_ids[self.rank]
        for op in self.ops:
            for way, transfers in enumerate((op.sends, op.recvs)) if isinstance(op, Exchange) else ():
                for transfer in transfers:
                    if node_ids[transfer.peer] != here:
                        moved[way] += transfer.span.stop - transfer.span.start
        return moved[0], moved[1]

    def sent_nbytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self.moved_nbytes(range(self.size))[0]


@dataclass(slots=True)  # not frozen, which takes twice as long to make
class Task:
    """The unit that an engine starts and completes: a compute operation, a transfer, or a whole Exchange.

    ``sequence`` numbers the transfers of this rank with one peer in one direction, so that both ends number a message
    alike. ``source`` is the source of a zero-copy send, whose wire slot is reserved but not read.

    Attributes:
        reads: the spans that the task reads; a send reads its slot, a receive nothing.
        writes: the spans that the task writes; a receive writes its slot, a send nothing.
    """

    op_index: int
    op: Op
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    transfer: Transfer | None = None
    is_send: bool = False
    sequence: int = 0
    source: Span | None = None

    @property
    def queue(self) -> Queue:
        """Communication for an Exchange or a transfer, computation for everything else."""
        return Queue.COMM if isinstance(self.op, Exchange) else Queue.COMPUTE


def state_buffers(state: State | None) -> tuple[StateBuffer, ...]:
    """The residual and the momentum of an operation, if it has them."""
    return () if state is None else tuple(each for each in (state.residual, state.momentum) if each is not None)


def accesses(op: Op) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The spans that ``op`` reads, and the spans that it writes."""
    match op:
        case Encode():
            return (op.src,), (op.wire,)
        case Decode():
            return ((op.wire, op.dst) if op.accumulate else (op.wire,)), (op.dst,)
        case Reduce():
            read = op.srcs if op.own is None else (*op.srcs, op.own)
            written = () if op.wire is None else (op.wire,)
            written = written if op.out is None else (*written, op.out)
            if op.state is not None:
                state = state_buffers(op.state)
                read, written = (*read, *[each.old for each in state]), (*written, *[each.new for each in state])
            return read, written
        case Commit():
            new, old = [each.new for each in op.state_buffers], [each.old for each in op.state_buffers]
            return (*op.guard, *new), tuple(old)
        case Exchange():
            return tuple([each.span for each in op.sends]), tuple([each.span for each in op.recvs])


def tasks(schedule: Schedule, *, per_transfer: bool) -> list[Task]:
    """The tasks of a schedule in program order; ``per_transfer`` splits an Exchange into transfers, receives first."""
    found: list[Task] = []
    counters: Counter[tuple[int, bool]] = Counter()
    for i, op in enumerate(schedule.ops):
        if not (per_transfer and isinstance(op, Exchange)):
            found.append(Task(i, op, *accesses(op)))
            continue
        for transfers, is_send in ((op.recvs, False), (op.sends, True)):
            for transfer in transfers:
                slot, way = (transfer.span,), (transfer.peer, is_send)
                read, written = (slot, ()) if is_send else ((), slot)
                found.append(Task(i, op, read, written, transfer, is_send, counters[way]))
                counters[way] += 1
    return found


def pieces(spans: Collection[Span]) -> tuple[dict[Span, range], list[int]]:
    """Cut spans wherever another one begins or ends, and number the pieces.

    Returns the numbers of each span's pieces, and where each piece begins; it ends where the next one begins.
    """
    edges: defaultdict[str, set[int]] = defaultdict(set)
    for span in spans:
        edges[span.buffer].update((span.start, span.stop))
    starts: list[int] = []
    numbers: dict[str, dict[int, int]] = {}
    for buffer, found in edges.items():
        numbers[buffer] = dict(zip(sorted(found), count(len(starts)), strict=False))
        starts += numbers[buffer]
    return {span: range(numbers[span.buffer][span.start], numbers[span.buffer][span.stop]) for span in spans}, starts


def dependencies(program: Sequence[Task]) -> list[tuple[int, ...]]:
    """For each task, the earlier tasks that must have completed before it may start (RAW, WAR, WAW), ascending."""
    pieces_of, starts = pieces([span for task in program for span in (*task.reads, *task.writes)])
    writers = [-1] * len(starts)  # the last task that wrote a piece; -1: none
    readers: list[list[int]] = [[] for _ in starts]  # the tasks that have read it since
    result: list[tuple[int, ...]] = []
    for i, task in enumerate(program):
        found: set[int] = set()
        for span in task.reads:
            for piece in pieces_of[span]:
                found.add(writers[piece])
                readers[piece].append(i)
        for span in task.writes:
            for piece in pieces_of[span]:
                found.add(writers[piece])
                found.update(readers[piece])
                writers[piece], readers[piece] = i, []
        result.append(tuple(range(i)) if isinstance(task.op, Commit) else tuple(sorted(found - {i, -1})))
    return result
