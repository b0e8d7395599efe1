"""The host engine: runs schedules with the compiled kernels over a transport.

All runs under way on a transport advance together, whichever is waited for, because another rank may be waiting for
another one. The loop that advances them is native code and does without the interpreter (kernels/engine/loop.h): it
runs any compute operation that is ready, otherwise it asks the transport what has completed, and the longer nothing
has, the more it leaves the processor to others. It comes back here when a run has ended, for a control message that is
not the expected header, and at deadlines.

One thread at a time drives: the caller that waits, or else a thread of the engine's (background.py).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections import deque

from qccl import _host
from qccl.engine.control import CALL, Block, Header, Kind, data_nbytes
from qccl.engine.progress import ProgressThread
from qccl.errors import (
    ArgumentError,
    CollectiveTimeout,
    EngineError,
    MismatchError,
    PeerLost,
    QcclError,
    gave_up,
    last_words,
)
from qccl.host.program import Execution, Program
from qccl.schedule import Schedule
from qccl.transports.base import Transport

__all__ = ["Execution", "HostEngine", "Program"]

#: bytes of wire slots where ranks share memory: there is little to overlap there, and each step costs
_SHARED_SLOTS_NBYTES = 3 << 20
#: how long a failing rank tries to get its last message out
_LAST_WORDS_SECONDS = 0.1
#: how long abort() waits for the thread that drives, which is told to stop after the operation that it is in
_HALT_SECONDS = 1.0
#: what a thread whose driving was stopped leaves to the one that stopped it
_STEP_ASIDE_SECONDS = 1e-3

#: engines that have receives posted: they must live, because the transport holds the addresses. One that was closed or
#: has failed need not: its transport keeps what it still works on
_live: set[HostEngine] = set()
#: closed before the other ranks', whose messages may still come
_unfinished: list[HostEngine] = []
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
        self._progress_thread = ProgressThread(self) if transport.is_threaded else None
        self._active: dict[int, Execution] = {}  # by sequence number, in the order of their calls
        self._queue: deque[Execution] = deque()
        self._left: dict[int, str] = {}  # the ranks that make no more calls, and what they said of it
        self._failure: QcclError | None = None
        self._failed = False  # and has let go of everything
        self._closed = False
        wire = transport.wire or _host.PythonWire(transport)
        self._loop = _host.Loop(wire, transport.rank, transport.size, transport.eager_nbytes, CALL)
        self._meeting: Program | None = None
        transport.attend = self.step
        # for each engine anew, so that it comes before what this transport's module does at the end of the process
        atexit.unregister(_say_goodbye)
        atexit.register(_say_goodbye)
        _live.add(self)

    def compile(self, schedule: Schedule) -> Program:
        """Prepare a schedule of this rank. Raises EngineError for what this engine cannot run."""
        return Program(self, schedule, self._transport)

    def persistent(self, nbytes: int) -> Block:
        """Memory for what lasts from run to run."""
        return Block(nbytes)

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return not self._active and not self._queue

    def settle(self, timeout: float) -> None:
        """Return when no run is under way, or the group has failed."""
        limit = time.monotonic() + timeout
        while self._failure is None and (under_way := [*self._active.values(), *self._queue]):
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
        self._loop.halt()
        taken = False
        try:
            taken = self._take_turn(_HALT_SECONDS)
        finally:
            if taken:
                self._fail(PeerLost(reason), Kind.ABORT, reason)
                self._lock.release()
            elif self._failure is None:  # only the thread that drives can touch what it uses: it fails when it is back
                self._failure = PeerLost(reason)

    def close(self, timeout: float = 60.0) -> None:
        """Collective: leave, when all other ranks do, or at the latest after ``timeout`` seconds. Idempotent."""
        if self._closed:
            return
        if self._active or self._queue:
            self.abort(f"rank {self.rank} closed the group in the middle of a call")
        self._end_progress_thread()
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
        if self._progress_thread is None:
            return
        self._take_turn()
        begun = not execution.done and not execution.detached and self._failure is None
        if begun:
            execution.detached = True
            self.detached += 1
        self._lock.release()
        if begun:
            self._progress_thread.attend(at_once=at_once)

    def step(self) -> None:
        """Advance what is under way: at most one compute operation, and one poll; nothing if it is advancing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._failure is not None:
                raise self._failure
            self._act(self._loop.step(self._unusual))
        except BaseException as error:
            self._caught(error)
            raise
        finally:
            self._lock.release()

    def run(self, execution: Execution, limit: float = math.inf) -> None:
        """Advance everything until ``execution`` is done, or time.monotonic() has reached ``limit``."""
        while not execution.done and (limit == math.inf or time.monotonic() < limit):
            self._take_turn()
            try:
                if self._failure is not None and not execution.done:
                    raise self._failure
                if not execution.done:
                    self._act(self._loop.run(limit, self._unusual))
            except BaseException as error:
                self._caught(error)
                raise
            finally:
                self._lock.release()
            if self._loop.halted:
                time.sleep(_STEP_ASIDE_SECONDS)

    def drive(self) -> None:
        """The background thread's turn: see background.Driven."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self.detached and not self._loop.wanted and not self._loop.halted:
                self._act(self._loop.drive(self._unusual))
            if self._failure is not None:
                raise self._failure
        except BaseException as error:  # raised again by whoever waits
            self._caught(error)
        finally:
            self._lock.release()

    # -- how it runs -------------------------------------------------------------------------------------------------

    def _take_turn(self, timeout: float = -1) -> bool:
        """Acquire the lock, from the background thread if it has it; False if that took longer than ``timeout``."""
        if self._lock.acquire(blocking=False):
            return True
        self._loop.want(1)
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._loop.want(-1)

    def _end_progress_thread(self) -> None:
        if self._progress_thread is not None:
            self._loop.want(1)
            self._progress_thread.end()
            self._loop.want(-1)

    def _act(self, outcome: _host.Outcome) -> None:
        """What a turn of the loop was ended for."""
        if outcome is _host.Outcome.ENDED:
            self._admit()
        elif outcome is _host.Outcome.OVERDUE:
            raise self._overdue()

    def _admit(self) -> None:
        """Let go of the runs that have ended, and begin those that may, in the order of their calls.

        No rank waits here for another one: the oldest run of the group that some rank has not ended is the first in
        line everywhere, and begins.
        """
        self._forget_ended()
        while self._queue and self._may_begin(self._queue[0]):
            self._begin(self._queue.popleft())
            self._forget_ended()

    def _forget_ended(self) -> None:
        for sequence in self._loop.take_ended():
            execution = self._active.pop(sequence)
            execution.done = True
            execution.end()
            if execution.detached:
                self.detached -= 1

    def _may_begin(self, execution: Execution) -> bool:
        """Whether its messages differ from those under way in their tags, and it shares no memory that is written."""
        active = self._active
        return not active or (
            execution.sequence - next(iter(active)) < _host.RUNS_IN_FLIGHT
            and not any(execution.conflicts(other) for other in active.values())
        )

    def _begin(self, execution: Execution) -> None:
        self._active[execution.sequence] = execution
        execution.begin(self._loop, self._unusual)
        if self._left:
            self._check_present(execution)

    def _unusual(self, peer: int, message: bytes) -> None:
        """Act on a control message that is not the expected header of a call.

        Raises PeerLost or MismatchError, with the text that the sender gave, when it gave up.
        """
        header = Header.unpack(message, peer)
        if header.kind is Kind.CALL:
            raise self._active[header.sequence].disagreement(peer, message)
        self._left[peer] = header.text
        if header.kind is not Kind.CLOSE:
            raise (MismatchError if header.kind is Kind.MISMATCH else PeerLost)(header.text)
        for execution in self._active.values():
            self._check_present(execution)

    def _check_present(self, execution: Execution) -> None:
        gone = sorted(self._left.keys() & set(execution.unheard()))
        if gone and not execution.done:
            raise PeerLost(f"{self._left[gone[0]]}, and rank {self.rank} called {execution.what}")

    def _overdue(self) -> CollectiveTimeout:
        late = self._active[self._loop.overdue]
        return CollectiveTimeout(f"rank {self.rank} reached the deadline of {late.what}: {late.waits_for()}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _caught(self, error: BaseException) -> None:
        """Something has raised: nothing under way can end well, but for what has ended."""
        if self._failure is None:
            self._forget_ended()
        kind = Kind.MISMATCH if isinstance(error, MismatchError) else Kind.ABORT
        if isinstance(error, PeerLost | MismatchError | CollectiveTimeout):  # their texts say which rank
            self._fail(error, kind, str(error))
        else:
            self._fail(gave_up(self.rank, error), kind, last_words(self.rank, error))

    def _fail(self, error: QcclError, kind: Kind, text: str) -> None:
        if self._failed or self._closed:
            return
        self._failed = True
        self._failure = self._failure or error
        self.detached = 0
        if self._progress_thread is not None:
            self._progress_thread.dismiss()
        for execution in self._active.values():
            execution.end()
        self._loop.halt()
        with contextlib.suppress(QcclError):
            self._tell(kind, text)
        self._flush()
        self._transport.abort(str(error))
        _live.discard(self)

    def _tell(self, kind: Kind, text: str) -> None:
        self._loop.tell(Header(kind, 0, text).pack() + data_nbytes(0))

    def _flush(self) -> None:
        """Give the last messages a moment to get out."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._loop.telling and time.monotonic() < deadline:
            with contextlib.suppress(QcclError):
                self._loop.drain(1, self._unusual)

    def _leave(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._tell(Kind.CLOSE, f"rank {self.rank} left the group")
        idle = 0
        while self._loop.telling or len(self._left) < self._transport.size - 1:
            idle += 1
            self._loop.drain(idle, self._unusual)
            if time.monotonic() > deadline:  # the others are busy with something else, which is no failure
                _unfinished.append(self)
                return

    def _goodbye(self) -> None:
        """At the process's end: let the others know, if close() did not, and let no thread of this process go on.

        One that is in native code when the interpreter ends cannot come back from there, and ends the process by
        abort() instead.
        """
        self._end_progress_thread()
        self._loop.halt()
        if not self._take_turn(_HALT_SECONDS):
            return
        if not self._failed and not self._closed:
            error = _unhandled()
            reason = f"rank {self.rank} ended its process" if error is None else last_words(self.rank, error)
            if self._active or self._queue or self._failure is not None:
                reason += " in the middle of a call" if error is None else ""
                self._fail(PeerLost(reason), Kind.ABORT, reason)
            else:
                self._failure, self._failed = PeerLost(reason), True
                with contextlib.suppress(QcclError):
                    self._tell(Kind.CLOSE, str(self._failure))
                    self._flush()
        self._lock.release()


def _shared_chunk(size: int) -> int:
    """Elements in a chunk where ranks share memory: as many 8-bit codes as fit in each of all-reduce's slots."""
    return max(40 * 1024, _SHARED_SLOTS_NBYTES // (3 * (3 * size - 2)))


def _threads(local_size: int) -> int:
    """Threads for each of the ``local_size`` ranks of this machine: OMP_NUM_THREADS, or its part of the processors."""
    if "OMP_NUM_THREADS" in os.environ:
        return _host.most_threads()
    return max(1, len(os.sched_getaffinity(0)) // local_size) if _host.most_threads() > 1 else 1


def _unhandled() -> BaseException | None:
    """At the process's end: the exception that ended the program, or None.

    Python keeps it in sys.last_value. The prompt, pytest and notebooks keep exceptions there that they have caught;
    the tracebacks of those begin in a frame that has a caller, and the program's main frame has none.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None or hasattr(sys, "ps1"):
        return None
    return error if error.__traceback__.tb_frame.f_back is None else None


def _say_goodbye() -> None:
    for engine in list(_live):
        engine._goodbye()


def _forked() -> None:
    """In the child of os.fork(): the group is the parent's, and so is the background thread."""
    for engine in _live:
        engine._lock, engine._progress_thread, engine.detached = threading.RLock(), None, 0
        engine._failed = True
        engine._failure = EngineError(
            f"this process was forked by rank {engine.rank}; only the process that made a communicator may use it"
        )
    _inherited.extend(_live)
    _live.clear()


os.register_at_fork(after_in_child=_forked)
