"""The session: engine, memory, state, call numbers and the end (end.py), which all calls of a communicator share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from qccl.base.arrays import Values
from qccl.base.errors import ArgumentError, EngineError, QcclError, as_failure, gave_up
from qccl.base.guard import Mark, abandoned, is_inside, register_guard
from qccl.base.lifetime import Registry
from qccl.collectives import CollectiveSpec
from qccl.communicator.programs import Compiled, ProgramCache
from qccl.communicator.state import StateArray, StateStore
from qccl.engine.base import Backend, Bound, Execution, Program, Request
from qccl.observe.call_records import CallRecord
from qccl.observe.metrics import Endpoint, serve
from qccl.observe.ranges import Ranges
from qccl.observe.records import FOLDER, GroupRecord, Measured, watch_signal, write_record
from qccl.observe.statistics import Statistics

__all__ = ["Session"]

_T = TypeVar("_T")

#: how often the clean-up after an exception is started again when further exceptions interrupt it, such as Ctrl-C
_ATTEMPTS = 100


class Session:
    """One rank's engine with everything that its calls have in common.

    Attributes:
        group: its name, for records.
        engine, memory: of the backend.
        calls: finds calls that were made before with equal arguments, on the same memory.
        programs: of the communicator's calls; plans and measurements have their own.
        state: the state of stateful codecs, by key.
        end, numbers: of the group, and of its next call: the engine's.
        statistics: totals of the calls.
        unsettled: by thread, the mark of the call that it has begun and not settled (guard.py); empty between calls.
        ending: the Works that are being ended, and may check their results; each with the number of its thread.
        making: the mark of the latest call that made a group, and the function that ends that group if an exception,
            which it gets, ends the call.
        calling: the Works whose functions a thread is calling, and that thread's number.
    """

    def __init__(self, backend: Backend, timeout: float, group: str, ranges: Ranges | None) -> None:
        """``ranges``: makes a profiler's range around the start of a call; None: no ranges."""
        self.group, self.engine, self.memory = group, backend.engine, backend.memory
        self.rank, self.size = rank, size = self.engine.rank, self.engine.size
        if ranges is not None:  # calls without ranges pay nothing for them
            self.engine.start = _ranged(self.engine.start, ranges)  # type: ignore[method-assign]
        self.calls = self.memory.call_table()
        self.programs = ProgramCache(self.engine, self.calls)
        self.state = StateStore(rank, size, self.engine.persistent)
        self.end, self.numbers, self.engine.timeout = self.engine.end, self.engine.numbers, timeout
        self.statistics = Statistics(rank, size, self.group, self.engine.tallies)
        self._measured: Measured | None = None  # the last measurement
        self._endpoint: Endpoint | None = None
        self._is_recorded = False  # whether a record of the failure was written
        self.unsettled: dict[int, Mark] = {}
        self.making: tuple[Mark | None, Callable[[BaseException], None]] = None, lambda error: None
        self.calling: dict[object, tuple[int]] = {}
        self.ending: dict[object, tuple[int]] = {}
        _sessions.add(self)
        watch_signal(_write_all)

    def serve_metrics(self, local_rank: int, *, is_thread: bool) -> None:
        """Show the totals at an endpoint until close(), if QCCL_METRICS is set; see metrics.serve()."""
        self._endpoint = serve(self.statistics, local_rank, is_thread=is_thread)

    def check_usable(self) -> None:
        """Raise the error of an earlier failure, or ArgumentError after close() and in a function of a Work."""
        if not self.end.closed:
            self.check_thread()
            self._record_failure()
        self.end.check_usable()

    def check_thread(self) -> None:
        """Raise ArgumentError in a function of a Work."""
        if self.calling and any(thread == get_ident() for (thread,) in self.calling.copy().values()):
            raise ArgumentError(
                "a function that was passed to Work.add_done_callback() cannot make calls on the communicator or close "
                "it, because another thread may be making a call; let it wake the thread that makes the program's calls"
            )

    def start(
        self,
        compiled: Compiled,
        bound: Bound,
        request: Request,
        kept: object = None,
        streams: Sequence[int] = (),
        began: Callable[[Execution], None] | None = None,
    ) -> None:
        """Start the next call, of a program that is idle if there is one; see Engine.start(). ``began`` gets the run.

        It is a guard (guard.py), so that the methods of calls and plans need none: nothing is sent before this, and
        what follows must be one ``return``. An error of the call ends the group; a call that is refused has changed
        nothing.
        """
        session, unsettled, thread, numbers = self, self.unsettled, get_ident(), self.numbers
        if unsettled:
            session.check_abandoned()
        before, number = unsettled.get(thread), numbers.sequence
        try:
            if compiled.keeps_state and request.key is not None:
                bound, request, kept = self._with_state(request.key, compiled, bound, request, kept)
            program = compiled.programs[0]
            if program.users:
                program = compiled.another()
            if request.trace is not None:
                program.label(compiled.schedule())
            compiled.used = number
            unsettled[thread] = (numbers.calls,)
            execution = self.engine.start(program, bound, request, kept, streams)
            if began is not None:
                began(execution)
        except BaseException as error:
            session.interrupted(error, before, number)
            raise
        if before is None:
            unsettled.pop(thread, None)
        else:
            unsettled[thread] = before

    def bind(
        self,
        spec: CollectiveSpec,
        arrays: Mapping[str, Values],
        key: str | None,
        programs: ProgramCache,
        *,
        again: bool = False,
    ) -> tuple[Compiled, Bound]:
        """Check how a call's arrays lie in memory; returns the programs for their order, and the memory.

        Collective on CUDA, where the ranks compare each new call (``again``: also a known one), and make the groups
        that it needs: raises MismatchError if theirs differ, and on all ranks EngineError if one cannot compile its
        programs, which are then in ``programs``.
        """
        order = spec.order_of(arrays)
        if order != spec.order:
            spec = replace(spec, order=order)
        binding = spec.bind(arrays, self.rank, self.size)
        text, pairs = self.text_of(spec), spec.pairs(self.rank, self.size)
        compiled = self.agreed(text, pairs, partial(programs.get, spec, in_place=binding.in_place), again=again)
        if key is not None:  # also without state: ranks that name arrays compare the names
            text = f"{text}, key={key!r}"
        return compiled, Bound(binding.addresses, text, pairs)

    def _with_state(
        self, key: str, compiled: Compiled, bound: Bound, request: Request, kept: object
    ) -> tuple[Bound, Request, object]:
        """The call's memory with that of the codec's state; with a learning rate the ranks must agree on that, too."""
        entry, lr = self.state.entries.get(key), request.lr
        if entry is None or entry.bound is not bound or entry.lr is not (lr is not None):
            if key in self.state.moves:
                self.engine.wait_until_idle(self.engine.timeout)
            entry = self.state.take(key, compiled.owner, compiled.state, lr, compiled.sums)
            entry.bound, entry.whole = bound, _with_memory(bound, entry.memory)
        whole, memory = entry.whole, entry.memory
        assert whole is not None  # set with ``bound``
        if lr is not None:
            if lr == 0:  # engines learn nothing of it: there are no residuals to multiply
                memory = self.state.at_rest(entry)
                whole, request = _with_memory(bound, memory), request._replace(lr=None)
            whole = whole._replace(text=f"{whole.text}, lr={lr!r}")
        return whole, request, (kept, memory)

    def run_collective(self, name: str, act: Callable[[], _T]) -> _T:
        """Make a call that moves no arrays: wait until every rank has made it, then ``act``.

        The guard of the communicator's method sets the mark back, when the program has the result.
        """
        self.check_usable()
        self.unsettle(self.numbers.calls)
        self.engine.barrier(name)
        try:
            return act()
        except EngineError:
            self.engine.check(self.engine.timeout)  # if the group has failed meanwhile, its failure says why
            raise

    def run_measurement(self, name: str, act: Callable[[], _T]) -> _T:
        """Do run_collective(), with calls in ``act`` that give their numbers back and leave no records."""

        def measure() -> _T:
            numbers = self.numbers
            before = numbers.calls
            self._measured = measured = Measured(self._records(), numbers.sequence)
            try:
                result = act()
            finally:
                numbers.go_back(before)
            measured.end(numbers.sequence)
            return result

        return self.run_collective(name, measure)

    def agreed(self, text: str, pairs: tuple[str, ...], act: Callable[[], _T], *, again: bool = False) -> _T:
        """Do ``act`` before check_consistent(): if it raises an error here, the other ranks raise EngineError."""
        try:
            result = act()
        except QcclError as error:  # the other ranks would make the call, and wait for this one
            self.check_consistent(text, pairs, str(error), again=again)
            raise
        self.check_consistent(text, pairs, again=again)
        return result

    def check_consistent(
        self, text: str, pairs: tuple[str, ...], refusal: str = "", *, again: bool = False
    ) -> None:  # fmt: skip
        """Collective on engines that do not compare every call (CUDA): raise MismatchError if this one differs.

        ``again``: also if the ranks have compared it before. ``refusal``: why this rank cannot make the call. Then the
        others raise EngineError. The group remains usable.
        """
        before = self.unsettle(self.numbers.calls)  # other ranks may go on without this one after an exception
        try:
            found = self.engine.check_consistent(text, pairs, refusal, again=again)
        except QcclError as error:
            self.fail(error)
            self.settle(before)
            raise
        self.settle(before)
        if found and not refusal:
            raise EngineError(found)

    def text_of(self, spec: CollectiveSpec) -> str:
        """The text that the ranks compare, with the offset of the call numbers if the codec draws random numbers."""
        text, offset = spec.text(), self.numbers.offset
        return f"{text}, {offset:+} calls" if offset and spec.codec.kernel().draws else text

    def mark(self) -> Mark | None:
        """The mark of this thread: the call that it has begun and not settled; see guard.py."""
        return self.unsettled.get(get_ident())

    def unsettle(self, call: int) -> Mark | None:
        """Let an exception in this thread end the group from now on; returns the mark from before."""
        thread = get_ident()
        before = self.unsettled.get(thread)
        self.unsettled[thread] = (call,)
        return before

    def settle(self, before: Mark | None) -> None:
        """Set this thread's mark back to ``before``."""
        thread = get_ident()
        if before is not None:
            self.unsettled[thread] = before
        elif thread in self.unsettled:
            del self.unsettled[thread]

    def fail(self, error: QcclError, call: int | None = None) -> None:
        """End the group in call number ``call``, also if an exception has ended this before."""
        if call is not None:
            self.numbers.go_back(call)  # not every rank has made it
        self.engine.fail(error)
        self._record_failure()

    def record(self, reason: str | QcclError) -> GroupRecord:
        """Record the last calls; see Communicator.record()."""
        return GroupRecord.of(self.group, self.rank, self.size, self._records(), reason)

    def _records(self) -> list[CallRecord]:
        found = self.engine.records()
        return found if self._measured is None else self._measured.records(found)

    def write_record(self, reason: str | QcclError) -> None:
        """Write the record to the folder that QCCL_RECORDS names, if it is set."""
        if folder := os.environ.get(FOLDER):
            write_record(self.record(reason), folder)

    def _record_failure(self) -> None:
        if self.end.failure is not None and not self._is_recorded:
            self._is_recorded = True
            self.write_record(self.end.failure)

    def retire(self) -> None:
        """Make no more calls; on the host the other ranks may still be in the last one (HostEngine.retire)."""
        self._record_failure()
        if not self.end.is_over:
            self._is_recorded = True  # leaving is not a failure
            self.engine.retire(gave_up(self.rank, "shrink() was called"))

    def interrupted(self, error: BaseException, before: Mark | None, number: int | None = None) -> None:
        """Clean up after an exception leaves a call (guard.py), even if further exceptions interrupt this.

        If the group's next call still has the ``number`` that it had at the begin, nothing was sent.
        """
        for _ in range(_ATTEMPTS):
            try:
                mark = self.mark()
                if mark is not None and mark is not before and self.numbers.sequence != number:
                    of_call = error if number is not None and isinstance(error, QcclError) else None
                    self.fail(of_call or as_failure(self.rank, error), mark[0])
                    if self.making[0] is mark:
                        self.making[1](error)
                self.settle(before)
                if not is_inside(self, self.engine):
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
            self.fail(gave_up(self.rank, "exceptions have ended an earlier call at several points"), mark[0])
            self.unsettled.pop(thread, None)

    def check_process(self) -> None:
        """Raise EngineError in a child of os.fork()."""
        if self.end.is_forked:
            self.end.check()

    def close(self) -> None:
        """Leave the group, unless that was done before or a failure has ended it."""
        if self._endpoint is not None:
            self._endpoint.remove(self.statistics)
        if self.end.failure is None:
            self.engine.close(self.engine.timeout)
        self.end.close()


def _with_memory(bound: Bound, state: Mapping[str, StateArray]) -> Bound:
    own = {name: array.memory.address for name, array in state.items()}
    return bound._replace(addresses={**bound.addresses, **own})


def _ranged(usual: Callable[..., Execution], ranges: Ranges) -> Callable[..., Execution]:
    """Engine.start() as a range; its name has no learning rate, because profilers keep each name."""

    def start(program: Program, bound: Bound, *others: Any, **named: Any) -> Execution:
        with ranges(bound.text.partition(", lr=")[0]):
            return usual(program, bound, *others, **named)

    return start


def _write_all() -> None:
    for session in _sessions:
        if not session.end.closed:
            session.write_record("the signal SIGUSR1 came")


def _forked(session: Session) -> None:
    """In a child of os.fork(): threads that held locks, or were making calls, are not there."""
    for each in (session.unsettled, session.ending, session.calling):
        each.clear()
    session._is_recorded = True


register_guard(Session.start)
_sessions = Registry(at_fork=_forked)
