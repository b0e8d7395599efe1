"""The interface between a communicator and its backend: compile schedules, run them, wait for the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from qccl.arrays import Memory
from qccl.engine.control import Header
from qccl.errors import QcclError
from qccl.schedule import Schedule
from qccl.trace import TraceEvent

__all__ = ["Backend", "Engine", "Execution", "Persistent", "Program", "Progress", "Rerun", "RunArguments"]


class Progress(Enum):
    """Who advances a run whose engine does not advance all runs by itself (on the host)."""

    #: only callers that wait
    CALLER = 0
    #: the same; and on CUDA, too, the host waits for the run at once, so it cannot become part of a graph
    SYNCHRONOUS = 3
    #: the progress thread, too, if the caller does not wait for the run within some milliseconds
    SOON = 1
    #: the progress thread, too, from the start
    NOW = 2


class RunArguments(NamedTuple):
    """The arguments of one run.

    Attributes:
        addresses: of the caller's buffers, by their names in the schedule.
        call: the number that keys the random numbers.
        header: all ranks must send an equal one; its sequence number is the next one of the group.
        deadline: in time.monotonic() seconds. On CUDA the time that is left counts from the run's first step.
        trace: a list that gets an event for each operation and transfer.
        schedule: with ``trace``, the one that was compiled: a program on the host does not keep it.
        streams: on CUDA, the caller's stream, and other streams whose work so far the run must wait for.
        lr: the learning rate that residuals are multiplied by (schedule.Reduce).
        progress: who advances the run.
        kept: objects that must live until the run has ended.
        take_number: called once before anything is sent, when the run is not refused any more.
    """

    addresses: Mapping[str, int]
    call: int
    header: Header
    deadline: float
    trace: list[TraceEvent] | None = None
    schedule: Schedule | None = None
    streams: Sequence[int] = ()
    lr: float = 1.0
    progress: Progress = Progress.CALLER
    kept: object = None
    take_number: Callable[[], object] = lambda: None


class Rerun(NamedTuple):
    """The arguments of a run that differ from those of the last one; see RunArguments.

    Attributes:
        take_number: returns the header's sequence number, and the call's. Called once if the run begins.
        kept: objects that must live until the run has ended.
    """

    addresses: Mapping[str, int]
    take_number: Callable[[], tuple[int, int]]
    deadline: float
    kept: object


class Execution(Protocol):
    """One run of a program. Only the methods that wait raise its failures.

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
        """Make progress if runs progress in the caller's thread; whether the run has ended. Never blocks for long."""

    def run(self, limit: float | None = None) -> bool:
        """Block until the run has ended, or time.monotonic() has reached ``limit``; whether it has ended.

        Raises CollectiveTimeout at the run's deadline.
        """

    def make_stream_wait(self) -> None:
        """If runs are stream-ordered: make the caller's stream wait for this run. Does not block."""

    def waits_for(self) -> str:
        """Why the run has not ended, for messages."""

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, when the run has ended or failed; now if it has.

        The thread that ends the run calls it, without a lock of the engine.
        """


class Persistent(Protocol):
    """Memory that keeps its contents from run to run; zeros at first.

    Attributes:
        address: of its first byte, for kernels.
    """

    address: int

    def write(self, data: bytes) -> None:
        """Put ``data`` at the start, when no run uses the memory."""

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` from ``start``, when no run uses the memory."""


class Program(Protocol):
    """A compiled schedule with its workspace.

    Attributes:
        workspace_nbytes: bytes of the workspace.
    """

    workspace_nbytes: int


class Engine(Protocol):
    """Runs schedules on one rank.

    Attributes:
        failure: the error that ended the group outside any call (found by a watchdog), or None.
        is_idle: no run is under way, and the host can read the caller's memory without waiting (never on CUDA).
    """

    @property
    def default_chunk(self) -> int | Callable[[int, int], int] | None:
        """The size of a chunk if the caller gives none, as collectives.layout.ChunkSize."""

    @property
    def failure(self) -> QcclError | None: ...

    @property
    def is_idle(self) -> bool: ...

    def compile(self, schedule: Schedule) -> Program:
        """Prepare a schedule of this rank. Raises EngineError if this engine cannot run it."""

    def persistent(self, nbytes: int) -> Persistent:
        """Allocate memory that keeps its contents from run to run."""

    def start(self, program: Any, arguments: RunArguments) -> Execution:
        """Start a run of a Program of this engine; on the host it waits for earlier runs of the program.

        Raises ArgumentError for a run that cannot be started. Later failures come from the Execution.
        """

    def rerun(self, execution: Any, run: Rerun) -> bool:
        """Run an Execution that has ended once more, without a trace or callbacks, and wait. Raises as its run().

        False, and nothing has changed, if the engine cannot do that now: use start().
        """

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no run is under way. Returns after an earlier failure; raises one that occurs while waiting."""

    def barrier(self, header: Header, timeout: float) -> None:
        """Collective: return when all ranks have made this call. Raises as a run does."""

    def check_consistent(self, header: Header, timeout: float) -> None:
        """Collective on the first use of a signature, on engines that do not compare every call.

        Raises MismatchError.
        """

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Wait for all runs that progress without this rank's calls (on CUDA also for ``stream``); raise failures."""

    def abort(self, reason: str) -> None:
        """Fail all runs under way with ``reason``, here and as far as possible on the other ranks. Idempotent."""

    def recover(self) -> None:
        """Release the locks that an exception has left held which ended a call of this thread at any point."""

    def close(self, timeout: float) -> None:
        """Collective: leave the group. Idempotent."""


class Backend(Protocol):
    """The engine and the memory of one communicator, made from its transport.

    Attributes:
        name: "host" or "cuda".
        timeout: seconds that a call may take where the program does not say.
    """

    name: str
    timeout: float
    engine: Engine
    memory: Memory
