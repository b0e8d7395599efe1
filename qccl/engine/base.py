"""What a communicator asks of an engine: to make a program of a schedule, and to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from qccl.arrays import Memory
from qccl.engine.control import Header
from qccl.errors import QcclError
from qccl.schedule import Schedule

if TYPE_CHECKING:
    from qccl.trace import TraceEvent

__all__ = ["Backend", "Engine", "Execution", "Persistent", "Program"]


class Execution(Protocol):
    """One run of a program. Failures are raised by the methods that wait, and only there.

    Attributes:
        is_ordered: the engine puts runs in order by itself, after whatever it was told to wait for: the program may be
            started again, and the result handed on, before the run is done.
        kept: what stays alive until the run is done: the caller's arrays.
    """

    is_ordered: bool
    kept: object

    def step(self) -> bool:
        """Make progress, if it is the caller who makes it; whether the run is done. Never blocks for long."""

    def run(self, limit: float | None = None) -> bool:
        """Block until the run is done, or time.monotonic() has reached ``limit``; whether it is done.

        Raises CollectiveTimeout at its deadline.
        """

    def detach(self, *, at_once: bool) -> None:
        """Where runs are not ordered: progress while the caller is elsewhere.

        ``at_once`` False: only if the caller does not wait for the run within a moment.
        """

    def order(self) -> None:
        """Where runs are ordered: let the caller's stream go on only after this run. Does not block."""

    def waits_for(self) -> str:
        """Why the run is not done, for messages."""


class Persistent(Protocol):
    """Memory that lasts from run to run, of zeros at first.

    Attributes:
        address: where runs find it.
    """

    address: int

    def write(self, data: bytes) -> None:
        """Put ``data`` at the start, when no run uses it."""

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` from ``start``, when no run uses it."""


class Program(Protocol):
    """A compiled schedule with its workspace.

    Attributes:
        workspace_nbytes: bytes of the workspace.
    """

    workspace_nbytes: int

    def start(
        self,
        bindings: Mapping[str, int],
        *,
        call: int,
        header: Header,
        deadline: float,
        trace: list[TraceEvent] | None = None,
        schedule: Schedule | None = None,
        streams: Sequence[int] = (),
        lr: float = 1.0,
    ) -> Execution:
        """Begin a run.

        Args:
            bindings: address of each of the caller's buffers, by its name in the schedule.
            call: the number that keys the random numbers.
            header: what the ranks must agree on.
            deadline: in time.monotonic() seconds.
            trace: a list that gets an event per node.
            schedule: with trace, the one that the program was made of: a program on the host does not keep it.
            streams: on CUDA, the caller's stream, and others whose work so far must be waited for.
            lr: the learning rate that residuals count by (schedule.Reduce).
        """


class Engine(Protocol):
    """Runs schedules on one rank.

    Attributes:
        chunk_elements: elements in a chunk where the caller does not say; None: the collective's default.
        failure: what ended the group outside any call (a watchdog's finding), or None.
        is_idle: no run is under way, and the caller's memory can be read at once (never on CUDA).
    """

    chunk_elements: int | None

    @property
    def failure(self) -> QcclError | None: ...

    @property
    def is_idle(self) -> bool: ...

    def compile(self, schedule: Schedule) -> Program:
        """Prepare a schedule of this rank. Raises EngineError for what this engine cannot run."""

    def persistent(self, nbytes: int) -> Persistent:
        """Memory for what lasts from run to run."""

    def settle(self, timeout: float) -> None:
        """Return when no run is under way, or the group has failed. Raises CollectiveTimeout."""

    def meet(self, header: Header, timeout: float) -> None:
        """Collective: return when all ranks have made this call. Raises as a run does."""

    def agree(self, header: Header, timeout: float) -> None:
        """Where calls are not checked one by one: collective, on the first use of a signature. Raises MismatchError."""

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Wait for all runs that need nobody's help (on CUDA, for ``stream`` too), and raise what went wrong."""

    def abort(self, reason: str) -> None:
        """Give up: everything under way fails with ``reason``, here and as far as possible on the other ranks."""

    def close(self, timeout: float) -> None:
        """Collective: leave. Idempotent."""


class Backend(Protocol):
    """What a communicator works with: an engine, and the memory of the caller's arrays. Made of a transport.

    Attributes:
        name: "host" or "cuda".
    """

    name: str
    engine: Engine
    memory: Memory
