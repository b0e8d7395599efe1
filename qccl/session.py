"""What the plans and calls of one communicator share: engine, memory, state, call numbers, and the first failure."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import TypeVar

from qccl.codecs.base import Codec
from qccl.engine.base import Backend, Execution, Program, Progress, Rerun, RunArguments
from qccl.engine.control import Header, Kind
from qccl.errors import ArgumentError, EngineError, PeerLost, QcclError, forked, gave_up
from qccl.guard import Mark, abandoned, is_inside, release_all
from qccl.schedule import Schedule
from qccl.state import StateStore
from qccl.trace import TraceEvent

__all__ = ["Session"]

_T = TypeVar("_T")

#: how often settling an exception begins anew when further exceptions interrupt it, as of impatient users
_ATTEMPTS = 100

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """One rank's engine with everything that its calls have in common.

    Attributes:
        engine, memory: of the backend.
        state: the state of stateful codecs, by key.
        timeout: seconds until a call that does not finish fails, where the caller gives no other number.
        sequence: number of the group's next call, barriers included.
        calls: collectives started. This keys the random numbers, so it does not count barriers, which change no result.
        call_offset: the number that load_state_dict() has added to ``calls``.
        failure: the first one; it ended the group.
        unsettled: by thread, what it has begun and not settled (guard.py); empty between calls.
        lock: guards the cache of plans; never held while anything waits.
        ending: the Works that a thread is ending, which may check their results; and that thread's number.
        calling: the Works whose functions a thread is calling, and that thread's number.
    """

    def __init__(self, rank: int, size: int, backend: Backend, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.engine, self.memory = backend.engine, backend.memory
        self.state = StateStore(rank, size, self.engine.persistent)
        self.sequence = self.calls = self.call_offset = 0
        self.failure: QcclError | None = None
        self.closed = False
        self.unsettled: dict[int, Mark] = {}
        self.calling: dict[object, tuple[int]] = {}
        self.ending: dict[object, tuple[int]] = {}
        self.lock = threading.RLock()
        self._process = os.getpid()
        _sessions.add(self)

    def check_usable(self) -> None:
        """Raise the error of an earlier failure, or ArgumentError after close() and in a function of a Work."""
        if self.closed:
            raise ArgumentError("this communicator is closed; make another with qccl.init()")
        self.check_thread()
        if self.failure is None:
            self.failure = self.engine.failure
        if self.failure is not None:
            text = f"this communicator failed earlier and is unusable: {self.failure}"
            raise type(self.failure)(text) from self.failure  # a variable would keep this call's arrays alive

    def check_thread(self) -> None:
        """Raise ArgumentError in a function of a Work."""
        if self.calling and any(thread == get_ident() for (thread,) in self.calling.copy().values()):
            raise ArgumentError(
                "a function that was passed to Work.add_done_callback() cannot make calls on the communicator or close "
                "it, because another thread may be making a call; let it wake the thread that makes the program's calls"
            )

    def start(
        self,
        program: Program,
        addresses: Mapping[str, int],
        text: str,
        pairs: tuple[str, ...],
        timeout: float | None,
        trace: list[TraceEvent] | None,
        schedule: Schedule | None,
        streams: tuple[int, ...],
        lr: float | None,
        progress: Progress,
        kept: object,
    ) -> Execution:
        """Start the next call; ``text`` and ``pairs`` are those of Header, the others those of RunArguments."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        header, lr = Header(Kind.CALL, self.sequence, text, pairs), 1.0 if lr is None else lr
        run = deadline, trace, schedule, streams, lr, progress, kept, self._take_number
        return self.engine.start(program, RunArguments(addresses, self.calls, header, *run))

    def rerun(self, execution: Execution, addresses: Mapping[str, int], timeout: float | None, kept: object) -> bool:
        """Make the call of an execution that has ended once more, and wait. False: the engine cannot; use start()."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        if not self.engine.rerun(execution, Rerun(addresses, self._take_number, deadline, kept)):
            return False
        execution.kept = None
        return True

    def _take_number(self) -> tuple[int, int]:
        """The numbers of the next call, in the group, and among those that key random numbers; before it sends."""
        numbers = self.sequence, self.calls
        self.unsettled[get_ident()] = (self.calls,)
        self.sequence += 1
        self.calls += 1
        return numbers

    def run_collective(self, name: str, act: Callable[[], _T]) -> _T:
        """One call that moves no arrays: wait until every rank has made it, then ``act``."""
        self.check_usable()
        header = Header(Kind.CALL, self.sequence, name)
        before = self.unsettle(self.calls)
        self.sequence += 1
        self.engine.barrier(header, self.timeout)
        result = act()
        self.settle(before)
        return result

    def check_consistent(self, text: str, pairs: tuple[str, ...]) -> None:
        """Collective on engines that do not compare every call (CUDA): raise MismatchError if this one differs."""
        try:
            self.engine.check_consistent(Header(Kind.CALL, self.sequence, text, pairs), self.timeout)
        except QcclError as error:
            self.fail(error)
            raise

    def with_offset(self, text: str, codec: Codec) -> str:
        """Append the offset of the call numbers if the codec draws random numbers: it must be the same on all ranks."""
        return f"{text}, {self.call_offset:+} calls" if self.call_offset and codec.kernel().draws else text

    def mark(self) -> Mark | None:
        """What this thread has begun and not settled; see guard.py."""
        return self.unsettled.get(get_ident())

    def unsettle(self, call: int) -> Mark | None:
        """Let an exception in this thread end the group from now on; returns what was unsettled before."""
        thread = get_ident()
        before = self.unsettled.get(thread)
        self.unsettled[thread] = (call,)
        return before

    def settle(self, before: Mark | None) -> None:
        """Nothing more is unsettled in this thread than ``before``."""
        thread = get_ident()
        if before is not None:
            self.unsettled[thread] = before
        elif thread in self.unsettled:
            del self.unsettled[thread]

    def fail(self, error: QcclError, call: int | None = None) -> None:
        """Keep the first failure, of call number ``call``, and abort the engine (the host's tells the other ranks)."""
        if call is not None:
            self.calls = min(self.calls, call)  # not every rank has made it
        if self.failure is None:
            self.failure = error
        self.engine.abort(str(self.failure))  # again if an exception has ended it before

    def interrupted(self, error: BaseException, before: Mark | None) -> None:
        """Settle what an exception has left that leaves a call (guard.py); further exceptions do not end this."""
        for _ in range(_ATTEMPTS):
            try:
                mark = self.mark()
                if mark is not None and mark is not before:
                    self.fail(gave_up(self.rank, error), mark[0])
                self.settle(before)
                if not is_inside(self, self.engine):
                    release_all(self.lock)
                    for turns in (self.ending, self.calling):
                        for work, (thread,) in turns.copy().items():
                            if thread == get_ident():
                                turns.pop(work, None)
                    self.engine.recover()
                return
            except BaseException as another:
                del another

    def check_abandoned(self) -> None:
        """End the group if an exception has ended a call, and another one has ended interrupted()."""
        for thread, mark in abandoned(self).items():
            reason = f"rank {self.rank} gave up: exceptions have ended an earlier call at several points"
            self.fail(PeerLost(reason), mark[0])
            self.unsettled.pop(thread, None)

    def check_process(self) -> None:
        """Raise EngineError in a child of os.fork()."""
        if os.getpid() != self._process:
            raise EngineError(forked(self.rank))

    def close(self) -> bool:
        """Leave the group. False if that was done before, or if a failure has ended the group."""
        if self.closed:
            return False
        self.closed = True
        if self.failure is None:
            self.engine.close(self.timeout)
        return self.failure is None


def _forked() -> None:
    """In the child of os.fork(): threads that held locks, or were making calls, are not there."""
    for session in list(_sessions):
        session.lock = threading.RLock()
        for each in (session.unsettled, session.ending, session.calling):
            each.clear()


os.register_at_fork(after_in_child=_forked)
