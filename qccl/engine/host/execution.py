"""One run of a program on the host."""

from __future__ import annotations

import math
from typing import Protocol

from qccl.base.errors import MismatchError, QcclError, ranks_text
from qccl.base.trace import TraceEvent
from qccl.engine.base import Bound, Request
from qccl.engine.callbacks import WithCallbacks
from qccl.engine.control import ControlKind, Header, data_nbytes_of, mismatch_error
from qccl.engine.host.program import HostProgram

__all__ = ["Driver", "HostExecution"]


class Driver(Protocol):
    """The methods of the engine by which its runs progress."""

    def step(self) -> None:
        """Advance all runs a little."""

    def run(self, execution: HostExecution, limit: float) -> None:
        """Advance all runs until ``execution`` has ended, or time.monotonic() has reached ``limit``."""


class HostExecution(WithCallbacks):
    """One run of a HostProgram (interface: engine.base.Execution). HostEngine.start() sets it up, and may use it again.

    Attributes:
        program: the program that is run.
        bound, request, kept: the arguments of Engine.start().
        sequence, call: the numbers that the run has taken.
        timeout: seconds from the run's begin to its deadline.
        deadline: a queued run's deadline, in time.monotonic() seconds.
        begun: False while the run is queued behind others.
        detached: the progress thread advances the run.
    """

    __slots__ = (
        *("_engine", "begun", "bound", "call", "deadline", "detached", "kept", "program", "request", "sequence"),
        "timeout",
    )
    program: HostProgram
    bound: Bound
    request: Request
    kept: object
    sequence: int
    call: int
    timeout: float
    deadline: float

    is_stream_ordered = False
    stream = 0

    def __init__(self, engine: Driver) -> None:
        super().__init__()
        self._engine = engine
        self.begun = self.detached = False

    def step(self) -> bool:
        """Advance all runs of the engine a little. Returns whether this run has ended. Never blocks for long."""
        if not self.done:
            try:
                self._engine.step()
            except QcclError:
                self.raise_unless_done()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        """Advance all runs of the engine until this one has ended; raises CollectiveTimeout at its deadline."""
        try:
            self._engine.run(self, math.inf if limit is None else limit)
        except QcclError:
            self.raise_unless_done()
        return self.done

    def raise_unless_done(self) -> None:
        """Raise the exception being handled, unless this run ended before it; then the next call raises it."""
        if not self.done:
            raise

    def make_stream_wait(self) -> None:
        """Do nothing: the host has no streams."""

    @property
    def header(self) -> Header:
        """The header that this rank sends to the others."""
        return Header(ControlKind.CALL, self.sequence, self.bound.text, self.bound.pairs)

    @property
    def call_text(self) -> str:
        """The call with its number, for messages."""
        return self.header.call_text

    def waits_for(self) -> str:
        """Say why this run has not ended, for messages."""
        if not self.begun:
            return "it is queued behind calls that have not ended"
        if missing := self.missing_ranks():
            return f"{ranks_text(missing)} did not make this call"
        native = self.program.native
        waits = [(native.waits_for(True), "send to"), (native.waits_for(False), "receive from")]
        if parts := [f"{verb} {ranks_text(ranks)}" for ranks, verb in waits if ranks]:
            return f"waiting to {' and to '.join(parts)}"
        return "every rank has made this call, and this rank has not ended its own part"

    # -- used by the engine ------------------------------------------------------------------------------------------

    def pack_headers(self, size: int) -> bytes | list[bytes]:
        """Pack the headers for the native run: one for all ranks, or one for each."""
        header = self.header
        return [header.pack(peer) for peer in range(size)] if header.pairs else header.pack()

    def missing_ranks(self) -> list[int]:
        """The ranks whose header has not arrived."""
        return self.program.native.missing_ranks()

    def header_mismatch(self, peer: int, message: bytes) -> MismatchError:
        """The error for a header from ``peer`` that differs from this rank's."""
        rank, mine = self.program.rank, self.header.pack(peer)
        if not message.startswith(mine):
            return mismatch_error(mine, message, rank, peer)
        expected = self.program.native.data_nbytes(peer) or "none"
        return MismatchError(
            f"rank {peer} sent {data_nbytes_of(message)} bytes with the header of a call, but rank {rank} expected "
            f"{expected}"
        )

    def add_trace(self, trace: list[TraceEvent]) -> None:
        """Append the events of the ended run."""
        for i, start, stop in self.program.native.trace():
            queue, name, args = self.program.labels[i]
            trace.append(TraceEvent(self.program.rank, queue, name, start, stop, {**args, "call": self.sequence}))
