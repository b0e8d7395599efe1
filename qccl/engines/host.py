"""The host engine: runs schedules with the compiled kernels over a transport.

All runs under way on a transport advance together, whichever is waited for, because another rank may be waiting for
another one. The loop runs any compute operation that is ready, otherwise it asks the transport what has completed,
and the longer nothing has, the more it leaves the processor to others (Transport.poll).

One thread at a time drives: the caller that waits, or else a thread of the engine's (background.py).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections import deque
from typing import Any

from qccl.engines.agreement import Block, Channel, Header, Kind, sequence_of
from qccl.engines.background import Background
from qccl.engines.program import CALLS_IN_FLIGHT, Execution, Program
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost, QcclError, gave_up
from qccl.schedule import Schedule
from qccl.transports.base import Transport

__all__ = ["Execution", "HostEngine", "Program"]

#: bytes of wire slots where ranks share memory: there is little to overlap there, and each step costs
_SHARED_SLOTS_NBYTES = 3 << 20
#: polls without news that the background thread is taken to have made already, so that it naps for long at once: its
#: caller may need the processor, and each poll makes him hand over the interpreter
_BACKGROUND_IDLE = 1000
#: compute operations in a row that the background thread runs before it polls, for the same reason
_BACKGROUND_COMPUTES = 4
#: how long a failing rank tries to get its last message out
_LAST_WORDS_SECONDS = 0.1

#: engines that have receives posted: they must live, because the transport holds the addresses. One that was closed or
#: has failed need not: its transport keeps what it still works on
_live: set[HostEngine] = set()
#: in a child of os.fork(), those of its parent, which nothing may be done with
_inherited: list[HostEngine] = []


class HostEngine:
    """Runs schedules on one rank of a transport. One thread at a time may use it, beside its own.

    Attributes:
        detached: runs under way that progress without their caller.
        threads: that may share an operation.

    After a failure everything under way has failed, the other ranks have been told, and every further use raises
    that failure.
    """

    #: failures show in the calls that are under way
    failure: QcclError | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.threads = _threads(transport.local_size)
        self.chunk_elements = _shared_chunk(transport.size) if transport.shares_memory else None
        self.detached = 0
        self._lock = threading.RLock()  # held by the thread that drives; guards everything below
        self._wanted = 0  # callers who wait for the background thread to let go of it
        self._background = Background(self) if transport.is_threaded else None
        self._active: list[Execution] = []  # in the order of their calls
        self._queue: deque[Execution] = deque()
        self._by_sequence: dict[int, Execution] = {}
        self._early: dict[tuple[int, int], bytes] = {}  # headers of calls that this rank has not made yet
        self._deadline = math.inf  # the nearest one
        self._idle = 0
        self._admitting = False
        self._failure: QcclError | None = None
        self._closed = False
        self._telling = 0  # sends under way of the news that this rank gave up or left
        self._channel = Channel(transport)
        self._meeting: Program | None = None
        transport.attend = self.step
        if not _live:  # so that it comes before what the transport does at the end of the process
            atexit.unregister(_say_goodbye)
            atexit.register(_say_goodbye)
        _live.add(self)

    def compile(self, schedule: Schedule) -> Program:
        """Prepare a schedule of this rank. Raises EngineError for what this engine cannot run."""
        return Program(self, schedule, self._transport)

    def persistent(self, nbytes: int) -> Block:
        """Memory for what lasts from run to run."""
        return Block(nbytes)

    def settle(self, timeout: float) -> None:
        """Return when no run is under way, or the group has failed."""
        limit = time.monotonic() + timeout
        while self._failure is None and (under_way := [*self._active, *self._queue]):
            self.run(under_way[-1], limit)
            if time.monotonic() >= limit:
                raise CollectiveTimeout(f"{under_way[-1].what} was not done after {timeout} s")

    def meet(self, header: Header, timeout: float) -> None:
        """Collective: return when all ranks have made this call."""
        if self._meeting is None:
            self._meeting = self.compile(Schedule("meeting", self.rank, self._transport.size, {}, ()))
        self._meeting.start({}, call=0, header=header, deadline=time.monotonic() + timeout).run()

    def agree(self, header: Header, timeout: float) -> None:
        """Nothing: every call is checked."""

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure

    def abort(self, reason: str) -> None:
        """Give up: the other ranks raise PeerLost with ``reason``, and everything under way here fails with it."""
        taken = self._take_turn(_LAST_WORDS_SECONDS)
        self._fail(PeerLost(reason), Kind.ABORT, reason)
        if taken:
            self._lock.release()

    def close(self, timeout: float = 60.0) -> None:
        """Collective: leave, when all other ranks do, or at the latest after ``timeout`` seconds. Idempotent."""
        if self._closed:
            return
        if self._active or self._queue:
            self.abort(f"rank {self.rank} closed the group in the middle of a call")
        self._end_background()
        self._closed = True
        if self._failure is None:
            try:
                self._leave(timeout)
            except QcclError as error:  # another rank failed first; this one needs nothing more of it
                self._transport.abort(str(error))
        _live.discard(self)

    # -- used by Execution -------------------------------------------------------------------------------------------

    def start(self, execution: Execution) -> None:
        """Begin, or line up, a run; its errors come from step() and run()."""
        if self._closed:
            raise ArgumentError("this engine is closed")
        self._take_turn()
        try:
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
        finally:
            self._lock.release()

    def detach(self, execution: Execution, *, at_once: bool) -> None:
        """Let a run progress without its caller: from now on, or when the caller does not wait for it soon."""
        if self._background is None:
            return
        self._take_turn()
        begun = not execution.done and not execution.detached and self._failure is None
        if begun:
            execution.detached = True
            self.detached += 1
        self._lock.release()
        if begun:
            self._background.attend(at_once=at_once)

    def step(self) -> None:
        """Advance what is under way: at most one compute operation, and one poll; nothing if it is advancing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._failure is not None:
                raise self._failure
            self._advance()
        except BaseException as error:
            self._caught(error)
            raise
        finally:
            self._lock.release()

    def run(self, execution: Execution, limit: float = math.inf) -> None:
        """Advance everything until ``execution`` is done, or time.monotonic() has reached ``limit``."""
        if execution.done:
            return
        self._take_turn()
        try:
            if self._failure is not None and not execution.done:
                raise self._failure
            compute, poll = self._compute, self._poll
            while not execution.done and (limit == math.inf or time.monotonic() < limit):
                if not compute():
                    poll(self._idle)
                elif not execution.done:
                    poll(0)
        except BaseException as error:
            self._caught(error)
            raise
        finally:
            self._lock.release()

    def drive(self) -> None:
        """The background thread's turn: see background.Driven."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self.detached and not self._wanted:
                for _ in range(_BACKGROUND_COMPUTES):
                    if not self._compute():
                        break
                self._poll(self._idle + _BACKGROUND_IDLE if self._idle else 0)
        except BaseException as error:  # raised again by whoever waits
            self._caught(error)
        finally:
            self._lock.release()

    def finished(self, execution: Execution) -> None:
        """Forget a run that is done, and let in the next that waits."""
        if execution.detached:
            self.detached -= 1
        self._active.remove(execution)
        del self._by_sequence[execution.sequence]
        self._deadline = min(e.deadline for e in self._active) if self._active else math.inf
        if self._queue:
            self._admit()

    # -- how it runs -------------------------------------------------------------------------------------------------

    def _take_turn(self, timeout: float = -1) -> bool:
        """Acquire the lock, from the background thread if it has it; False if that took longer than ``timeout``."""
        if self._lock.acquire(blocking=False):
            return True
        self._wanted += 1
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._wanted -= 1

    def _end_background(self) -> None:
        if self._background is not None:
            self._wanted += 1
            self._background.end()
            self._wanted -= 1

    def _advance(self) -> None:
        """Run one compute operation that is ready, and poll."""
        self._poll(0 if self._compute() else self._idle)

    def _compute(self) -> bool:
        """Run the first compute operation that is ready; False where there is none."""
        for execution in self._active:
            if execution.ready:
                execution.compute()
                self._idle = 0
                return True
        return False

    def _poll(self, idle: int) -> None:
        """Act on what has completed; ``idle`` as in Transport.poll."""
        completed: Any = self._transport.poll(idle=idle)
        if completed:
            self._idle = 0
            for owner, index in completed:
                if owner is self._channel:
                    self._heard(index)
                else:
                    owner.completed(index)
        elif idle:
            self._idle += 1
            if time.monotonic() > self._deadline:
                raise self._overdue()
        else:
            self._idle = 1

    def _admit(self) -> None:
        """Begin the runs that may be, in the order of their calls.

        No rank waits here for another one: the oldest run of the group that some rank has not ended is the first in
        line everywhere, and begins.
        """
        if self._admitting:  # a run that ends at once gets here again, and so would the next, ever deeper
            return
        self._admitting = True
        try:
            while self._queue and self._may_begin(self._queue[0]):
                self._begin(self._queue.popleft())
        finally:
            self._admitting = False

    def _may_begin(self, execution: Execution) -> bool:
        """Whether its messages differ from those under way in their tags, and it shares no memory that is written."""
        active = self._active
        return not active or (
            execution.sequence - active[0].sequence < CALLS_IN_FLIGHT
            and not any(execution.conflicts(other) for other in active)
        )

    def _begin(self, execution: Execution) -> None:
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
            self._fail(gave_up(self.rank, error), kind, text)

    def _fail(self, error: QcclError, kind: Kind, text: str) -> None:
        if self._failure is not None or self._closed:
            return
        self._failure = error
        self.detached = 0
        if self._background is not None:
            self._background.dismiss()
        with contextlib.suppress(QcclError):
            self._tell(kind, text)
        self._flush()
        self._transport.abort(str(error))
        _live.discard(self)

    def _tell(self, kind: Kind, text: str) -> None:
        self._telling = len(self._channel.peers)
        self._channel.tell(kind, text, (self, 0))

    def _flush(self) -> None:
        """Give the last messages a moment to get out."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._telling and time.monotonic() < deadline:
            with contextlib.suppress(QcclError):
                self._drain()

    def _drain(self, idle: int = 1) -> None:
        """Poll when nothing is run any more."""
        completed: Any = self._transport.poll(idle=idle)
        for owner, index in completed:
            if owner is self:
                self._telling -= 1
            elif owner is self._channel:
                self._channel.take(index)

    def _leave(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._tell(Kind.CLOSE, f"rank {self.rank} left")
        idle = 0
        while self._telling or len(self._channel.left) < len(self._channel.peers):
            idle += 1
            self._drain(idle)
            if time.monotonic() > deadline:  # the others are busy with something else, which is no failure
                return

    def _goodbye(self) -> None:
        """At the process's end: let the others know, if close() did not."""
        self._end_background()
        if self._failure is None and not self._closed:
            if self._active:
                self.abort(f"rank {self.rank} ended its process in the middle of a call")
            else:
                with contextlib.suppress(QcclError):
                    self._tell(Kind.CLOSE, f"rank {self.rank} ended its process")
                    self._flush()


def _shared_chunk(size: int) -> int:
    """Elements in a chunk where ranks share memory: as many 8-bit codes as fit in each of all-reduce's slots."""
    return max(40 * 1024, _SHARED_SLOTS_NBYTES // (3 * (3 * size - 2)))


def _threads(local_size: int) -> int:
    """Threads for each of the ``local_size`` ranks of this machine: OMP_NUM_THREADS, or its part of the processors."""
    from qccl import _host

    if "OMP_NUM_THREADS" in os.environ:
        return _host.most_threads()
    return max(1, len(os.sched_getaffinity(0)) // local_size) if _host.most_threads() > 1 else 1


def _say_goodbye() -> None:
    for engine in list(_live):
        engine._goodbye()


def _forked() -> None:
    """In the child of os.fork(): the group is the parent's, and so is the background thread."""
    for engine in _live:
        engine._lock, engine._background, engine.detached = threading.RLock(), None, 0
        engine._failure = EngineError(
            f"this process was forked by rank {engine.rank}; only the process that made a communicator may use it"
        )
    _inherited.extend(_live)
    _live.clear()


os.register_at_fork(after_in_child=_forked)
