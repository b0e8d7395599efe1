"""One run of a program on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from qccl import _host
from qccl.engine.base import Rerun, RunArguments
from qccl.engine.callbacks import WithCallbacks
from qccl.engine.control import Header, Kind, data_nbytes_of, mismatch_error
from qccl.errors import MismatchError, QcclError
from qccl.host.program import Program, conflict
from qccl.trace import TraceEvent

__all__ = ["Driver", "Execution"]


class Driver(Protocol):
    """The methods of the engine by which its runs progress."""

    def step(self) -> None:
        """Advance all runs a little."""

    def run(self, execution: Execution, limit: float) -> None:
        """Advance all runs until ``execution`` has ended, or time.monotonic() has reached ``limit``."""


class Execution(WithCallbacks):
    """One run of a Program (interface: engine.base.Execution).

    Attributes:
        sequence, deadline, call: as given to Engine.start().
        begun: False while the run is queued behind others.
        detached: the progress thread advances the run.
    """

    __slots__ = (
        "_addresses",
        "_engine",
        "_labels",
        "_lr",
        "_number",
        "_pairs",
        "_program",
        "_text",
        "_trace",
        "begun",
        "call",
        "deadline",
        "detached",
        "kept",
        "sequence",
    )

    is_stream_ordered = False
    stream = 0

    def __init__(self, engine: Driver, program: Program, arguments: RunArguments) -> None:
        self._addresses, self.call, header, self.deadline, self._trace, schedule, _, self._lr, _, kept, _ = arguments
        program.check(self._addresses)
        super().__init__()
        self.kept: object = kept
        self._engine, self._program = engine, program
        self._labels = program.labels(schedule) if self._trace is not None and schedule is not None else []
        _, self.sequence, self._text, self._pairs = header
        self.begun = self.detached = False
        self._number = 0

    def step(self) -> bool:
        """Advance all runs of the engine a little; whether this run has ended. Never blocks for long."""
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
        """Raise the failure being handled, unless this run ended before it: then the next call raises it."""
        if not self.done:
            raise

    def make_stream_wait(self) -> None:
        """Nothing: the host has no streams."""

    @property
    def call_text(self) -> str:
        """The call with its number, for messages."""
        return self._header.call_text

    @property
    def _header(self) -> Header:
        return Header(Kind.CALL, self.sequence, self._text, self._pairs)

    def waits_for(self) -> str:
        """Why this run has not ended, for messages."""
        if not self.begun:
            return "it is queued behind calls that have not ended"
        if missing := self.missing_ranks():
            return f"{_ranks(missing)} did not make this call"
        run = self._program.run
        waits = [(run.waits_for(True), "send to"), (run.waits_for(False), "receive from")]
        if parts := [f"{verb} {_ranks(ranks)}" for ranks, verb in waits if ranks]:
            return f"waiting to {' and to '.join(parts)}"
        return "every rank has made this call, and this rank has not ended its own part"

    def bind(self) -> bool:
        """Give the program this run's memory; False while another run of the program is under way."""
        if self._program.running:
            return False
        self._program.bind(self._addresses, self.call, self._lr)
        return True

    def conflicts(self, other: Execution) -> bool:
        """Whether one of the two, which are bound, writes memory of the caller that the other reads or writes."""
        return conflict(self._program.extents, other._program.extents)

    # -- used by the engine ------------------------------------------------------------------------------------------

    def begin(self, loop: _host.Loop, on_control: Callable[[int, bytes], None]) -> bool:
        """Send the header, and start all steps that depend on nothing; whether any run has ended."""
        self.begun = self._program.running = True
        self._program.header_writes += 1
        self._number = self._program.header_writes
        header = self._header
        headers = [header.pack(peer) for peer in range(loop.size)] if header.pairs else header.pack()
        return loop.begin(self._program.run, headers, self.sequence, self.deadline, self._trace is not None, on_control)

    @property
    def owns_headers(self) -> bool:
        """Whether the program still has the headers that begin() wrote for this Execution."""
        return self._number == self._program.header_writes

    def renew(self, run: Rerun) -> None:
        """Set the arguments of another run. Taking its number comes first: before it, nothing has changed."""
        addresses, take_number, deadline, kept = run
        self.sequence, self.call = take_number()
        self.done = False
        self._addresses, self.deadline, self.kept = addresses, deadline, kept

    def begin_again(self, loop: _host.Loop, on_control: Callable[[int, bytes], None]) -> _host.Outcome:
        """Begin the run that renew() has set up, with the last one's headers; advance until a run has ended."""
        self._program.bind(self._addresses, self.call, self._lr)
        self._program.running = True
        return loop.rerun(self._program.run, self.sequence, self.deadline, on_control)

    def missing_ranks(self) -> list[int]:
        """The ranks whose header has not arrived."""
        return self._program.run.missing_ranks()

    def header_mismatch(self, peer: int, message: bytes) -> MismatchError:
        """The error for a header from ``peer`` that differs from this rank's."""
        rank, mine = self._program.rank, self._header.pack(peer)
        if not message.startswith(mine):
            return mismatch_error(mine, message, rank, peer)
        expected = self._program.run.data_nbytes(peer) or "none"
        return MismatchError(
            f"rank {peer} sent {data_nbytes_of(message)} bytes with the header of a call, but rank {rank} expected "
            f"{expected}"
        )

    def end(self) -> None:
        """Release the program: the run has ended, or failed."""
        self._program.running = False
        if self._trace is not None:
            for i, start, stop in self._program.run.trace():
                queue, name, args = self._labels[i]
                args = {**args, "call": self.sequence}
                self._trace.append(TraceEvent(self._program.rank, queue, name, start, stop, args))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
