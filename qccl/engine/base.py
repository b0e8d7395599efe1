"""The interface between a communicator and its backend: compile schedules, run them, wait for the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from qccl.base.arrays import Memory
from qccl.base.errors import ArgumentError, EngineError, QcclError
from qccl.base.trace import TraceEvent
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.schedule import Buffer, Exchange, Role, Schedule
from qccl.engine.end import End
from qccl.observe.call_records import CallRecord
from qccl.observe.tallies import Counted, Tallies

__all__ = ["Backend", "Bound", "Engine", "Execution", "Numbers", "Persistent", "Program", "Progress", "Request", "Rig"]
__all__ += ["caller_buffers", "check_addresses"]


class Progress(Enum):
    """Who advances a run whose engine does not advance all runs by itself (on the host)."""

    #: the caller, which waits in start()
    CALLER = 0
    #: the caller, which waits in start() also on CUDA, so the run cannot become part of a graph
    SYNCHRONOUS = 3
    #: the caller, or the progress thread if the caller does not wait for the run within some milliseconds
    SOON = 1
    #: the caller and the progress thread, from the start
    NOW = 2


class Request(NamedTuple):
    """How a caller wants one call to run. It is made once, and passed unchanged from the method to the engine.

    Attributes:
        progress: who advances the run.
        timeout: seconds that the call may take (on CUDA from its begin on the GPU); None means the engine's timeout.
        key: the name of the codec's state, or None.
        lr: the learning rate that residuals are multiplied by (schedule.Reduce), checked, or None.
        stream: on CUDA, the stream that the caller named, or None.
        trace: a list that gets an event for each operation and transfer.
        nonfinite: "error" if a result with NaN or infinity is to raise an error, otherwise "propagate".
    """

    progress: Progress = Progress.CALLER
    timeout: float | None = None
    key: str | None = None
    lr: float | None = None
    stream: Any = None
    trace: list[TraceEvent] | None = None
    nonfinite: str = "propagate"


class Bound(NamedTuple):
    """The memory of a run, and what the ranks must agree on.

    Attributes:
        addresses: the addresses of the caller's buffers and of the state, by their names in the schedule.
        text: the text that all ranks must send in their headers.
        pairs: for each peer, a text on which this rank and the peer must agree; usually ().
    """

    addresses: Mapping[str, int]
    text: str
    pairs: tuple[str, ...] = ()


class Numbers:
    """The numbers of a group's next call, for all to read.

    Attributes:
        sequence: the number in the group, barriers included.
        calls: the number that keys the random numbers; it does not count barriers, which change no result.
        offset: what load_state_dict() has added to ``calls``.
    """

    __slots__ = ("calls", "offset", "sequence")

    def __init__(self) -> None:
        self.sequence = self.calls = self.offset = 0

    def take(self) -> tuple[int, int]:
        """Number a call that the engine has accepted, before it sends anything. Returns ``sequence`` and ``calls``."""
        sequence, call = self.sequence, self.calls
        self.sequence, self.calls = sequence + 1, call + 1
        return sequence, call

    def go_back(self, call: int) -> None:
        """Use ``call`` for the next random numbers, after calls that have changed no result."""
        if call < self.calls:
            self.calls = call

    def go_on(self, call: int) -> None:
        """Continue with ``call`` after a restart."""
        self.offset += call - self.calls
        self.calls = call


class Execution(Protocol):
    """One run of a program. Only the methods that wait raise its failures, and start() where the caller waits.

    Attributes:
        call: number of the call, which keys its random numbers.
        is_stream_ordered: the engine orders runs after the streams that it was given. The program may then be started
            again, and the result may be used on the caller's stream, before the run has ended.
        stream: the caller's, if the run is stream-ordered.
        kept: objects that must live until the run has ended, such as the caller's arrays.
        done: the run has ended well.
        failure: the error that has ended the run, or None.
    """

    call: int
    is_stream_ordered: bool
    stream: int
    kept: object
    done: bool
    failure: QcclError | None

    def step(self) -> bool:
        """Advance the run if its caller's thread advances it. Returns whether it has ended. Never blocks for long."""

    def run(self, limit: float | None = None) -> bool:
        """Block until the run has ended, or time.monotonic() has reached ``limit``. Returns whether it has ended.

        Raises CollectiveTimeout at the run's deadline.
        """

    def make_stream_wait(self) -> None:
        """If runs are stream-ordered: make the caller's stream wait for this run. Does not block."""

    def waits_for(self) -> str:
        """Say why the run has not ended, for messages."""

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, when the run has ended or failed; now if it has.

        The thread that ends the run calls it, without a lock of the engine.
        """


class Persistent(Protocol):
    """Memory that keeps its contents from run to run; zeros at first.

    Attributes:
        address: the address of the first byte, for kernels.
    """

    address: int

    def write(self, data: bytes) -> None:
        """Put ``data`` at the start, when no run uses the memory."""

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from ``start``, when no run uses the memory."""


class Program(Protocol):
    """A compiled schedule with its workspace.

    Attributes:
        workspace_nbytes: bytes of workspace that are freed with the program; on CUDA its tables, as programs share the
            rest.
        users: runs that have not ended, for which a further run would wait (always 0 on CUDA: streams order the runs).
    """

    workspace_nbytes: int
    users: int

    def label(self, schedule: Schedule) -> None:
        """Keep the labels that a trace needs, before the first run with a trace; ``schedule`` is the compiled one."""


class Rig(Protocol):
    """Memory for measured calls, and a clock; made for one measurement (measuring.py), and dropped with it.

    Attributes:
        address, nbytes: the memory's address and size.
        work_nbytes: the most bytes of work buffers that a measured call may need; None: no limit.
        streams: on CUDA, the stream of the calls and of the copies of fill() and read(); otherwise ().
    """

    address: int
    nbytes: int
    work_nbytes: int | None
    streams: tuple[int, ...]

    def fill(self, values: bytes, start: int, stop: int) -> None:
        """Write ``values``, as often as they fit and the rest of them, to the bytes ``start`` to ``stop``."""

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from ``start``, when the calls so far have ended."""

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """The mean time of ``times`` calls in a row, when they have ended. Raises their failures."""


class Engine(Protocol):
    """Runs schedules on one rank.

    Attributes:
        rank, size: number of this rank, and number of all.
        end: the end of the communicator, which the engine also fails by itself, for example from its watchdog.
        numbers: the numbers of the next call.
        timeout: seconds that a run may take if its request names no timeout: the backend's, or the program's.
        tallies: totals of the calls so far.
    """

    rank: int
    size: int
    end: End
    numbers: Numbers
    timeout: float
    tallies: Tallies

    @property
    def chunking(self) -> ChunkPolicy:
        """The default size of chunks."""

    @property
    def is_idle(self) -> bool:
        """No run is under way, and the host can read the caller's memory without waiting (never on CUDA)."""

    def compile(self, schedule: Schedule, counted: Counted | None = None) -> Program:
        """Prepare a schedule of this rank, whose runs are ``counted``. Raises EngineError if it cannot be run here."""

    def persistent(self, nbytes: int) -> Persistent:
        """Allocate memory that keeps its contents from run to run."""

    def start(
        self, program: Any, bound: Bound, request: Request, kept: object = None, streams: Sequence[int] = ()
    ) -> Execution:
        """Start a run of a Program of this engine; on the host it waits for earlier runs of the program.

        ``kept`` are objects that must live until the run has ended. ``streams`` are, on CUDA, the caller's stream, and
        others whose work so far the run must wait for.

        If the request says that the caller waits, start() returns when the result may be used (on CUDA: on the caller's
        stream), and raises the run's failures. Otherwise the Execution raises them. Raises ArgumentError for a run
        that cannot be started; the run has then taken no number.
        """

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no run is under way. Returns after an earlier failure; raises one that occurs while waiting."""

    def barrier(self, text: str) -> None:
        """Collective: return when all ranks have made this call, which ``text`` describes. Raises as a run does."""

    def check_consistent(
        self, text: str, pairs: tuple[str, ...], refusal: str = "", *, again: bool = False
    ) -> str:  # fmt: skip
        """Compare a call's text on all ranks, on engines that do not compare every call. Collective for a new text.

        ``again``: compare also a text on which the ranks have agreed. ``refusal``: why this rank cannot make the call.
        Returns the rank that cannot make it, with its refusal, or an empty text. Raises MismatchError.
        """

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Wait for all runs that progress without this rank's calls (on CUDA also for ``stream``); raise failures."""

    def fail(self, error: QcclError) -> None:
        """End the group: fail all runs under way, here and as far as possible on the other ranks. Idempotent.

        Only the group's first error counts, which may be another one that the caller does not know yet.
        """

    def records(self) -> list[CallRecord]:
        """The last 1,024 calls that have begun, from the oldest on, and those that are queued."""

    def rig(self) -> Rig:
        """Make memory and a clock for measured calls. Raises EngineError, and changes nothing, if memory is short."""

    def retire(self, error: QcclError) -> None:
        """Fail before shrink(), so that other ranks may still end the calls that this rank has ended."""

    def recover(self) -> None:
        """Release locks that this thread still holds after an exception ended its call."""

    def close(self, timeout: float) -> None:
        """Collective: leave the group. Idempotent."""


class Backend(Protocol):
    """The engine and the memory of one communicator, made from its transport.

    Attributes:
        name: "host" or "cuda".
        timeout: seconds that a call may take if the program gives no timeout.
    """

    name: str
    timeout: float
    engine: Engine
    memory: Memory


def caller_buffers(schedule: Schedule) -> dict[str, Buffer]:
    """The caller's buffers, by name; each run is given their addresses.

    Raises EngineError if a transfer uses one of them. A library may still write to the memory of an abandoned receive,
    so transfers must use the workspace, which outlives them.
    """
    for i, op in enumerate(schedule.ops):
        for transfer in (*op.sends, *op.recvs) if isinstance(op, Exchange) else ():
            name = transfer.span.buffer
            if schedule.buffers[name].role is not Role.WORK:
                raise EngineError(f"operation {i} transfers {name!r}; transfers must be in work buffers")
    return {name: buffer for name, buffer in schedule.buffers.items() if buffer.role is not Role.WORK}


def check_addresses(addresses: Mapping[str, int], needed: Mapping[str, Buffer]) -> None:
    """Raise ArgumentError unless exactly the ``needed`` buffers have addresses."""
    if addresses.keys() != needed.keys():
        raise ArgumentError(f"addresses are needed for {sorted(needed)}, not for {sorted(addresses)}")
