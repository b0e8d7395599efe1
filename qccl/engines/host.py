"""The host engine: runs schedules with the compiled kernels over a transport.

All runs under way on a transport advance together, whichever is waited for, because another rank may be waiting for
another one. The loop runs any compute operation that is ready, otherwise it asks the transport what has completed,
and the longer nothing has, the more it leaves the processor to others (Transport.poll).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections import deque
from typing import Any

from qccl.engines.agreement import Channel, Header, Kind, sequence_of
from qccl.engines.program import CALLS_IN_FLIGHT, Execution, Program
from qccl.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost, QcclError
from qccl.schedule import Schedule
from qccl.transports.base import Transport

__all__ = ["Execution", "HostEngine", "Program"]

#: how long a failing rank tries to get its last message out
_LAST_WORDS_SECONDS = 0.1

#: engines that have receives posted: they must live, because the transport holds the addresses
_live: set[HostEngine] = set()


class HostEngine:
    """Runs schedules on one rank of a transport. One thread at a time may use it.

    After a failure everything under way has failed, the other ranks have been told, and every further use raises
    that failure.
    """

    chunk_elements: int | None = None
    #: failures show in the calls that are under way
    failure: QcclError | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self._active: list[Execution] = []  # in the order of their calls
        self._queue: deque[Execution] = deque()
        self._by_sequence: dict[int, Execution] = {}
        self._early: dict[tuple[int, int], bytes] = {}  # headers of calls that this rank has not made yet
        self._deadline = math.inf  # the nearest one
        self._idle = 0
        self._failure: QcclError | None = None
        self._closed = False
        self._telling = 0  # sends under way of the news that this rank gave up or left
        self._channel = Channel(transport)
        _live.add(self)

    def compile(self, schedule: Schedule) -> Program:
        """Prepare a schedule of this rank. Raises EngineError for what this engine cannot run."""
        return Program(self, schedule, self._transport)

    def agree(self, header: Header, timeout: float) -> None:
        """Nothing: every call is checked."""

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure

    def abort(self, reason: str) -> None:
        """Give up: the other ranks raise PeerLost with ``reason``, and everything under way here fails with it."""
        self._fail(PeerLost(reason), Kind.ABORT, reason)

    def close(self, timeout: float = 60.0) -> None:
        """Collective: leave, when all other ranks do, or at the latest after ``timeout`` seconds. Idempotent."""
        if self._closed:
            return
        if self._active or self._queue:
            self.abort(f"rank {self.rank} closed the group in the middle of a call")
        self._closed = True
        if self._failure is None:
            try:
                self._leave(timeout)
                _live.discard(self)
            except QcclError as error:  # another rank failed first; this one needs nothing more of it
                self._transport.abort(str(error))

    # -- used by Execution -------------------------------------------------------------------------------------------

    def start(self, execution: Execution) -> None:
        """Begin, or line up, a run; its errors come from step() and run()."""
        if self._closed:
            raise ArgumentError("this engine is closed")
        if self._failure is not None:
            raise self._failure
        self._queue.append(execution)
        try:
            self._admit()
        except QcclError as error:
            self._caught(error)
        except BaseException as error:
            self._caught(error)
            raise

    def step(self) -> None:
        """Advance what is under way: at most one compute operation, and one poll."""
        if self._failure is not None:
            raise self._failure
        try:
            self._advance()
        except BaseException as error:
            self._caught(error)
            raise

    def run(self, execution: Execution) -> None:
        """Advance everything until ``execution`` is done."""
        if self._failure is not None and not execution.done:
            raise self._failure
        try:
            while not execution.done:
                self._advance()
        except BaseException as error:
            self._caught(error)
            raise

    def finished(self, execution: Execution) -> None:
        """Forget a run that is done, and let in the next that waits."""
        self._active.remove(execution)
        del self._by_sequence[execution.sequence]
        self._deadline = min((e.deadline for e in self._active), default=math.inf)
        if self._queue:
            self._admit()

    # -- how it runs -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        worked = False
        for execution in self._active:
            if execution.ready:
                execution.compute()
                worked = True
                break
        completed: Any = self._transport.poll(idle=self._idle)
        if completed:
            self._idle = 0
            for owner, index in completed:
                if owner is self._channel:
                    self._heard(index)
                else:
                    owner.completed(index)
        elif worked:
            self._idle = 0
        else:
            self._idle += 1
            if time.monotonic() > self._deadline:
                raise self._overdue()

    def _admit(self) -> None:
        queue = self._queue
        while queue and (not self._active or queue[0].sequence - self._active[0].sequence < CALLS_IN_FLIGHT):
            execution = queue.popleft()
            self._active.append(execution)
            self._by_sequence[execution.sequence] = execution
            self._deadline = min(self._deadline, execution.deadline)
            self._idle = 0
            execution.begin(self._channel.peers)
            for peer in self._channel.peers if self._early else ():
                message = self._early.pop((execution.sequence, peer), None)
                if message is not None:
                    execution.agree(peer, message)
            if self._channel.left:
                self._check_present(execution)

    def _heard(self, peer: int) -> None:
        """Act on a control message: usually the header of a call that this rank has made, too, or will make."""
        message = self._channel.take(peer)
        if message is None:
            for execution in self._active:
                self._check_present(execution)
            return
        sequence = sequence_of(message)
        if sequence in self._by_sequence:
            self._by_sequence[sequence].agree(peer, message)
        else:
            self._early[sequence, peer] = message

    def _check_present(self, execution: Execution) -> None:
        gone = sorted(execution.unheard & self._channel.left)
        if gone:
            raise PeerLost(f"rank {gone[0]} left the group, and rank {self.rank} called {execution.what}")

    def _overdue(self) -> CollectiveTimeout:
        now = time.monotonic()
        late = next(e for e in self._active if e.deadline < now)
        return CollectiveTimeout(f"rank {self.rank} reached the deadline of {late.what}: {late.waits_for()}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _caught(self, error: BaseException) -> None:
        """Something has raised: nothing under way can end well."""
        kind = Kind.MISMATCH if isinstance(error, MismatchError) else Kind.ABORT
        if isinstance(error, PeerLost | MismatchError | CollectiveTimeout):  # their texts say which rank
            self._fail(error, kind, str(error))
        else:
            text = f"rank {self.rank} gave up: {type(error).__name__}: {error}"
            self._fail(error if isinstance(error, QcclError) else PeerLost(text), kind, text)

    def _fail(self, error: QcclError, kind: Kind, text: str) -> None:
        if self._failure is not None or self._closed:
            return
        self._failure = error
        with contextlib.suppress(QcclError):
            self._tell(kind, text)
        self._flush()
        self._transport.abort(str(error))

    def _tell(self, kind: Kind, text: str) -> None:
        self._telling = len(self._channel.peers)
        self._channel.tell(kind, text, (self, 0))

    def _flush(self) -> None:
        """Give the last messages a moment to get out."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._telling and time.monotonic() < deadline:
            with contextlib.suppress(QcclError):
                self._drain()

    def _drain(self) -> None:
        """Poll when nothing is run any more."""
        completed: Any = self._transport.poll(idle=1)
        for owner, index in completed:
            if owner is self:
                self._telling -= 1
            elif owner is self._channel:
                self._channel.take(index)

    def _leave(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._tell(Kind.CLOSE, f"rank {self.rank} left")
        while self._telling or len(self._channel.left) < len(self._channel.peers):
            self._drain()
            if time.monotonic() > deadline:
                raise CollectiveTimeout("not every rank closed the group")

    def _goodbye(self) -> None:
        """At the process's end: let the others know, if close() did not."""
        if self._failure is None and not self._closed:
            if self._active:
                self.abort(f"rank {self.rank} ended its process in the middle of a call")
            else:
                with contextlib.suppress(QcclError):
                    self._tell(Kind.CLOSE, f"rank {self.rank} ended its process")
                    self._flush()


@atexit.register
def _say_goodbye() -> None:
    for engine in list(_live):
        engine._goodbye()
