"""The host engine: runs schedules with the compiled kernels over a transport.

All runs under way on a transport advance together, whichever the caller waits for, because other ranks may wait for
other runs. The loop that advances them is native code (kernels/engine/loop.h) and does not need the interpreter: it
runs any compute operation that is ready, and otherwise polls the transport; the longer nothing completes, the more it
leaves the processor to others. It returns to Python when a run has ended, for a control message that is not the
expected header, and at deadlines.

One thread at a time drives the loop: the caller that waits, or the engine's progress thread (engine/progress.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qccl import _host
from qccl.base.errors import (
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    QcclError,
    as_failure,
    described,
    gave_up,
    reason_of,
)
from qccl.base.guard import release_all
from qccl.base.lifetime import Registry, Stage, keep, unhandled
from qccl.collectives.chunks import BETWEEN_SITES, NETWORK, ChunkPolicy, shared_memory
from qccl.collectives.schedule import Schedule
from qccl.engine.base import Bound, Numbers, Progress, Request, check_addresses
from qccl.engine.control import CALL, Block, ControlKind, Header
from qccl.engine.end import End
from qccl.engine.host.execution import HostExecution
from qccl.engine.host.program import HostProgram
from qccl.engine.host.records import records
from qccl.engine.host.shutdown import Shutdown, leave
from qccl.engine.progress import ProgressThread
from qccl.observe.call_records import CallRecord
from qccl.observe.tallies import Counted, Tallies
from qccl.transports.base import Transport

if TYPE_CHECKING:
    from qccl.engine.host.rig import HostRig

__all__ = ["HostEngine"]

#: how long fail() waits for the thread that drives, which stops after its present operation
_HALT_SECONDS = 1.0
#: how long a thread whose loop was halted sleeps, so that the thread that halted it gets the lock
_YIELD_SECONDS = 1e-3

# constants of this module: looking up an enumeration's members takes long
_PAUSE, _ENDED, _OVERDUE = _host.Outcome.PAUSE, _host.Outcome.ENDED, _host.Outcome.OVERDUE
_CALLER, _SYNCHRONOUS, _NOW = Progress.CALLER, Progress.SYNCHRONOUS, Progress.NOW


class HostEngine:
    """Runs schedules on one rank of a transport (interface: engine.base.Engine).

    Only one thread, beside the progress thread, may use it at a time. After a failure all runs under way have failed,
    the other ranks have been sent a message, and the engine's methods raise that failure. Later calls of the
    communicator raise a new error of its type, with the failure as its cause (End.check_usable).

    Attributes:
        end: the end of the communicator.
        numbers: the numbers of the next call.
        timeout: seconds that a run may take if its request names no timeout.
        tallies: totals of the calls that have ended.
        detached: runs under way that progress without their caller.
        threads: number of threads that may share an operation.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.threads = _threads(transport.local_size)
        self.chunking = _chunking(transport)
        self.end, self.numbers = End(transport.rank), Numbers()
        self.timeout = timeout
        self.tallies = Tallies(are_timed=True)
        self.detached = 0
        self._lock = threading.RLock()  # held by the thread that drives; guards the attributes below
        self._progress_thread = ProgressThread(self) if transport.is_threaded else None
        self._active: dict[int, HostExecution] = {}  # by sequence number, in the order of their calls
        self._queue: deque[HostExecution] = deque()
        #: reused by each run that begins alone and whose caller waits in start(): such a run ends before start() does
        self._spare = HostExecution(self)
        self._over: list[HostExecution] = []  # ended runs whose functions are called once the lock is released
        wire = transport.wire or _host.PythonWire(transport)
        self._loop = _host.Loop(wire, transport.rank, transport.size, transport.eager_nbytes, CALL)
        self._shutdown = Shutdown(self._loop, transport.rank)
        self._left = self._shutdown.left
        self._barrier: HostProgram | None = None
        transport.progress_hook, transport.engine = self.step, self
        _live.add(self)

    def compile(self, schedule: Schedule, counted: Counted | None = None) -> HostProgram:
        """Prepare a schedule of this rank. Raises EngineError if this engine cannot run it."""
        transport = self._transport
        schedule.check_rank(transport.rank, transport.size)
        return HostProgram(schedule, self.threads, transport.eager_nbytes, transport.sends_ahead, counted)

    def persistent(self, nbytes: int) -> Block:
        """Allocate memory that keeps its contents from run to run."""
        return Block(nbytes)

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return not self._under_way()

    def start(
        self, program: HostProgram, bound: Bound, request: Request, kept: object = None, streams: Sequence[int] = ()
    ) -> HostExecution:
        """Begin a run, or queue it behind others, and wait for it if the caller waits; see engine.base.Engine.

        With an idle engine and a waiting caller this is one turn of the native loop. In a burst of calls, each call
        advances the earlier ones for a moment, which would otherwise wait for the progress thread or the caller.
        """
        progress, timeout = request.progress, request.timeout
        waits = progress is _CALLER or progress is _SYNCHRONOUS
        if not self._lock.acquire(False):
            self._take_turn()
        try:
            if self.end.is_over:
                self.end.check()
            if bound.addresses is not program.addresses:
                check_addresses(bound.addresses, program.callers)
            is_alone = not self._active
            execution = self._spare if waits and is_alone else HostExecution(self)
            execution.program, execution.bound, execution.request, execution.kept = program, bound, request, kept
            execution.timeout = self.timeout if timeout is None else timeout
            execution.done = execution.begun = False
            execution.sequence, execution.call = self.numbers.take()  # last: nothing has changed before
            program.users += 1
            try:
                if is_alone or (not self._queue and self._may_begin(execution)):
                    outcome = self._begin(execution, waits)
                else:
                    execution.deadline = time.monotonic() + execution.timeout
                    self._queue.append(execution)
                    outcome = self._loop.advance_briefly(self._on_control)
                if outcome is _ENDED and not self._queue:
                    self._remove_ended()
                elif outcome is not _PAUSE:
                    self._act(outcome)
            except QcclError as error:
                self._fail_all(error)
                if waits:
                    execution.raise_unless_done()
            except BaseException as error:
                self._fail_all(error)
                raise
            if not waits and not execution.done and self._progress_thread is not None and not self.end.is_over:
                execution.detached = True
                self.detached += 1
        finally:
            self._lock.release()
            if self._over:
                self._call_back()
        if waits:
            if not execution.done:
                execution.run()
        elif execution.detached and self._progress_thread is not None:
            if progress is _NOW:
                self._progress_thread.wake_at_once()
            else:
                self._progress_thread.wake()
        return execution

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no run is under way; see engine.base.Engine."""
        limit = time.monotonic() + timeout
        while not self.end.is_over and (under_way := self._under_way()):
            self.run(under_way[-1], limit)
            if time.monotonic() >= limit:
                raise CollectiveTimeout(f"{under_way[-1].call_text} did not end within {timeout} s")

    def barrier(self, text: str) -> None:
        """Collective: return when all ranks have made this call."""
        if self._barrier is None:
            self._barrier = self.compile(Schedule("barrier", self.rank, self.size, {}, ()))
        calls = self.numbers.calls
        self.start(self._barrier, Bound({}, text), Request())
        self.numbers.go_back(calls)

    def check_consistent(
        self, text: str, pairs: tuple[str, ...], refusal: str = "", *, again: bool = False
    ) -> str:  # fmt: skip
        """Do nothing: the headers of every call are compared."""
        return ""

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Raise the group's failure, also one that a control message has just brought."""
        self.step()
        self.end.check()

    def fail(self, error: QcclError) -> None:
        """Fail all runs under way; the others raise PeerLost, or MismatchError after one, with the error's text."""
        if self.end.has_left:
            return
        self.end.fail(error)  # a thread that still drives raises this when it leaves the loop
        self._loop.halt()
        if self._take_turn(_HALT_SECONDS):
            try:
                self._fail(error)
            finally:
                self._release()

    def records(self) -> list[CallRecord]:
        """The last calls; an empty list if another thread drives, and does not release the lock within a second."""
        if not self._take_turn(_HALT_SECONDS):
            return []
        try:
            return list(records(self._loop, self._queue))
        finally:
            self._lock.release()

    def rig(self) -> HostRig:
        """See engine.base.Engine."""
        from qccl.engine.host.rig import HostRig  # needs NumPy

        return HostRig()

    def retire(self, error: QcclError) -> None:
        """Fail, but keep the transport open: a rank may still need messages of a call that this rank has ended.

        If runs are under way here, or after a failure, this is fail(). The engine's owner continues to drive the
        transport.
        """
        if self.end.is_over or not self.is_idle:
            self.fail(error)
            return
        self._end_progress_thread()
        self.end.fail(error)
        self.end.has_left = True
        self._shutdown.tell(ControlKind.CLOSE, error)
        self._shutdown.flush()
        _live.discard(self)

    def recover(self) -> None:
        """See Engine. This also resets the requests of threads that want to drive: they get the lock now."""
        release_all(self._lock)
        self._loop.want(-self._loop.wanted)

    def give_up(self, made: Transport, error: BaseException) -> None:
        """Leave a group that split() or regroup() has made, when an exception keeps it from the program."""
        if made.engine is not self:
            leave(made, error)

    def close(self, timeout: float = 60.0) -> None:
        """Collective: leave when all other ranks do, at the latest after ``timeout`` seconds. Idempotent."""
        if self.end.closed:
            return
        if self._active or self._queue:
            self.fail(PeerLost(f"rank {self.rank} closed the group in the middle of a call", self.rank))
        self._end_progress_thread()
        self.end.close()
        if self.end.failure is None:
            self.end.has_left = True
            try:
                if not self._shutdown.close(timeout, self._on_control):
                    keep(self)  # other ranks have not closed in time, which is not a failure
            except BaseException as error:  # another rank's failure, or the program's exception
                self._shutdown.tell(ControlKind.ABORT, error)
                self._shutdown.flush()
                self._transport.abort(str(error))
                if not isinstance(error, QcclError):
                    raise
        _live.discard(self)

    def step(self) -> None:
        """Run at most one operation, and poll once. Does nothing if another thread drives."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.end.failure is not None:
                raise self.end.failure
            self._act(self._loop.step(self._on_control))
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            self._release()

    def run(self, execution: HostExecution, limit: float = math.inf) -> None:
        """Advance everything until ``execution`` is done, or time.monotonic() has reached ``limit``."""
        while not execution.done and (limit == math.inf or time.monotonic() < limit):
            if not self._lock.acquire(False):
                self._take_turn()
            try:
                if self.end.failure is not None:
                    raise self.end.failure
                if not execution.done:
                    until = limit if execution.begun else min(limit, execution.deadline)
                    outcome = self._loop.run(until, self._on_control)
                    if outcome is _ENDED and not self._queue:
                        self._remove_ended()
                    elif outcome is not _PAUSE:
                        self._act(outcome)
                    if not execution.begun and time.monotonic() >= execution.deadline:
                        raise self._overdue(execution)
            except BaseException as error:
                self._fail_all(error)
                raise
            finally:
                self._lock.release()
                if self._over:
                    self._call_back()
            if not execution.done and self._loop.halted:
                time.sleep(_YIELD_SECONDS)

    def drive(self) -> bool:
        """Advance detached runs in the progress thread; see progress.Driven."""
        drove = False
        while self._lock.acquire(blocking=False):
            drove = True
            try:
                while self.detached and not self._over and not self._loop.wanted and not self._loop.halted:
                    self._act(self._loop.drive(self._on_control))
                if self.end.failure is not None:
                    raise self.end.failure
            except BaseException as error:  # the waiting threads raise it
                self._fail_all(error)
            finally:
                called = self._release()
            if not called:
                break
        return drove

    # -- driving the loop --------------------------------------------------------------------------------------------

    def _under_way(self) -> list[HostExecution]:
        """The runs under way, with the lock: without it a run that is being taken from the queue would be missing."""
        self._take_turn()
        try:
            return [*self._active.values(), *self._queue]
        finally:
            self._release()

    def _take_turn(self, timeout: float = -1) -> bool:
        """Ask the thread that drives to release the lock, and acquire it. Returns False after ``timeout``."""
        if self._lock.acquire(False):
            return True
        self._loop.want(1)
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._loop.want(-min(1, self._loop.wanted))  # another thread's recover() may have set it to 0

    def _release(self) -> bool:
        """Release the lock, then call the functions of runs that are over. Returns whether there were any."""
        self._lock.release()
        return bool(self._over) and self._call_back()

    def _call_back(self) -> bool:
        """Call the functions of runs that are over, each once, even if several threads do this at the same time."""
        for execution in tuple(self._over):
            execution.call_back()
            with contextlib.suppress(ValueError):
                self._over.remove(execution)
        return True

    def _end_progress_thread(self) -> None:
        if self._progress_thread is not None:
            self._loop.want(1)
            self._progress_thread.join()
            self._loop.want(-1)

    def _act(self, outcome: _host.Outcome) -> None:
        """Handle the end of a turn of the loop: remove the runs that have ended, or raise for a run that is late."""
        if outcome is _ENDED:
            self._remove_ended()
            if self._queue:
                self._begin_queued()
        elif outcome is _OVERDUE:
            raise self._overdue(self._active[self._loop.overdue])

    def _begin_queued(self) -> None:
        """Begin queued runs in the order of their calls.

        Ranks cannot block each other here: the oldest run that any rank has not ended is first in every queue, so it
        begins.
        """
        while self._queue and self._may_begin(self._queue[0]):
            execution = self._queue.popleft()
            execution.timeout = execution.deadline - time.monotonic()
            self._begin(execution, waits=False)
            self._remove_ended()

    def _remove_ended(self) -> None:
        for sequence in self._loop.take_ended():
            execution = self._active.pop(sequence)
            execution.program.running = False
            execution.program.users -= 1
            execution.kept = None
            if execution.request.trace is not None:
                execution.add_trace(execution.request.trace)
            execution.done = True  # last: a thread that waits for the run reads this without the lock
            if execution.callbacks:
                self._over.append(execution)
            if execution.detached:
                self.detached -= 1

    def _may_begin(self, execution: HostExecution) -> bool:
        """Whether the program is free, the tags are unused, and no run under way shares memory that either writes."""
        active, program = self._active, execution.program
        if program.running or (active and execution.sequence - next(iter(active)) >= _host.RUNS_IN_FLIGHT):
            return False
        program.bind(execution.bound.addresses)
        for other in active.values():  # noqa: SIM110 -- a generator takes longer
            if program.memory.conflicts(other.program.memory):
                return False
        return True

    def _begin(self, execution: HostExecution, waits: bool) -> _host.Outcome:
        """Begin a run of a program that is free; see Loop.start()."""
        program, request, bound = execution.program, execution.request, execution.bound
        if bound.addresses is not program.addresses:
            program.bind(bound.addresses)
        headers = None
        if program.header_text != bound.text:
            headers = execution.pack_headers(self.size)
            program.header_text = bound.text
        execution.begun = program.running = True
        self._active[execution.sequence] = execution
        waits = waits and not self._left  # _check_present() below looks for the headers of ranks that have left
        outcome = self._loop.start(
            program.native,
            headers,
            execution.sequence,
            execution.call,
            request.lr,
            execution.timeout,
            request.trace is not None,
            waits,
            self._on_control,
        )
        if self._left:
            self._check_present(execution)
        return outcome

    def _on_control(self, peer: int, message: bytes) -> None:
        """Handle a control message that is not the expected header of a call.

        Raises MismatchError for the header of another call. If the sender gave up, raises PeerLost or MismatchError
        with its text. If the sender left, raises PeerLost if a run under way lacks the sender's header.
        """
        header = Header.unpack(message, peer)
        if header.kind is ControlKind.CALL:
            raise self._active[header.sequence].header_mismatch(peer, message)
        self._left[peer] = left = header.end(peer, self.size)
        if header.kind is not ControlKind.CLOSE:
            raise MismatchError(str(left)) if header.kind is ControlKind.MISMATCH else left
        for execution in self._active.values():
            self._check_present(execution)

    def _check_present(self, execution: HostExecution) -> None:
        """Raise PeerLost if a rank that left has not sent its header for this run."""
        absent = sorted(self._left.keys() & set(execution.missing_ranks()))
        if absent and not execution.done:
            left = self._left[absent[0]]
            raise PeerLost(f"{left}, and rank {self.rank} called {execution.call_text}", left.rank, left.reason)

    def _overdue(self, late: HostExecution) -> CollectiveTimeout:
        return CollectiveTimeout(f"rank {self.rank} reached the deadline of {late.call_text}: {late.waits_for()}")

    # -- failure and end ---------------------------------------------------------------------------------------------

    def _fail_all(self, error: BaseException) -> None:
        """Fail all runs under way; completed runs keep their results."""
        if self.end.failure is None:
            self._remove_ended()
        self._fail(as_failure(self.rank, error))

    def _fail(self, error: QcclError) -> None:
        """End the group. If an exception interrupts it, it is called again; all of it may be repeated."""
        if self.end.has_left:
            return
        error = self.end.fail(error)
        if self._progress_thread is not None:
            self._progress_thread.stop()
        for execution in self._active.values():
            if execution.request.trace is not None:
                execution.add_trace(execution.request.trace)
        for execution in (*self._active.values(), *self._queue):
            execution.failure = error
            self._over.append(execution)
        self._loop.halt()
        differs = isinstance(error, MismatchError)
        self._shutdown.tell(ControlKind.MISMATCH if differs else ControlKind.ABORT, error)
        try:
            self._shutdown.flush()
            if differs:
                self._shutdown.hear_others()
        finally:
            self._transport.abort(reason_of(self.rank, error))
            _live.discard(self)
            self.end.has_left = True

    def _leave_at_exit(self) -> None:
        """At the end of the process: send the close message unless close() did, and stop the thread that drives.

        A thread that is in native code while the interpreter ends would end the process by abort() when it returns.
        """
        self._end_progress_thread()
        self._loop.halt()
        if not self._take_turn(_HALT_SECONDS):
            return
        if not self.end.has_left:
            in_call = bool(self._active or self._queue or self.end.failure is not None)
            left = f"rank {self.rank} ended its process{' in the middle of a call' if in_call else ''}"
            error = unhandled()
            # the exception may be of another group, which numbers ranks in another way
            failure = PeerLost(left, self.rank) if error is None else gave_up(self.rank, described(error))
            if in_call:
                self._fail(failure)
            else:
                self.end.fail(failure)
                self.end.has_left = True
                self._shutdown.tell(ControlKind.CLOSE, failure)
                self._shutdown.flush()
        self._lock.release()


def _chunking(transport: Transport) -> ChunkPolicy:
    """The default chunks, equal on all ranks."""
    if transport.shares_memory:
        return shared_memory(transport.size)
    return BETWEEN_SITES if transport.is_between_sites else NETWORK


def _threads(local_size: int) -> int:
    """Threads for each of the machine's ``local_size`` ranks: OMP_NUM_THREADS, or the processors over the ranks."""
    # OpenMP, too, takes further numbers for nested regions, and ignores an invalid value.
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if re.fullmatch("[0-9]{1,4}", first) and int(first):
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def _forked(engine: HostEngine) -> None:
    """Replace the lock in a child of os.fork(): the thread that held it does not exist there."""
    engine._lock, engine._progress_thread, engine.detached = threading.RLock(), None, 0


#: open engines, kept alive because their transports hold addresses of posted receives in their memory. The transport of
#: a closed or failed engine keeps that memory itself
_live = Registry((HostEngine._leave_at_exit,), Stage.ENGINES, _forked, keeps=True)
