"""A plan: a schedule with its workspace and prepared operations, made once and run many times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from qccl.arguments import check_trace, timeout_of
from qccl.arrays import Values, check_unmoved
from qccl.collectives import Binding, CollectiveSpec
from qccl.collectives.feedback import sums_of
from qccl.engine.base import Execution, Program, Progress
from qccl.errors import ArgumentError
from qccl.guard import guarded
from qccl.schedule import Role, Schedule
from qccl.session import Session
from qccl.state import Parts, lr_of
from qccl.trace import TraceEvent
from qccl.work import Work

__all__ = ["Plan", "PlanCache"]

#: bytes of workspace that idle plans of one communicator may hold together
CACHE_NBYTES = 256 << 20
#: specs with idle plans, and plans of one spec: as many calls are in flight at once
CACHE_SPECS = 512
CACHE_PLANS_PER_SPEC = 16


class _Compiled(NamedTuple):
    """A program, the call that its state belongs to, and its state: see StateStore.take()."""

    program: Program
    in_place: bool
    algorithm: str
    state_owner: str
    state: Mapping[str, int]
    sums: Parts


class _Bound(NamedTuple):
    """The arrays of a plan's runs, and the arguments of Session.start() that follow from them."""

    arrays: Mapping[str, Values]
    result: Any
    compiled: _Compiled
    binding: Binding
    text: str  # of the header


class Plan:
    """A prepared collective, like MPI-4's persistent ones: call bind() once, start() and wait() many times.

    Two runs of one plan never overlap: it has one workspace. ``plan(x, out)`` is bind() and run(). ``key`` names the
    state of a stateful codec.

    Attributes:
        nbytes: bytes of workspace held.
    """

    def __init__(self, session: Session, spec: CollectiveSpec, key: str | None = None) -> None:
        self.spec = spec
        self.nbytes = 0
        self._key = key
        self._session = session
        self._programs: dict[bool, _Compiled] = {}
        self._bound: _Bound | None = None
        self._work: Work | None = None  # of the last run, if start() has made it
        self._rerun_of: _Bound | None = None  # what the last run used, if _rerun() has made it
        self._running: Execution | None = None  # the last run that _rerun() has made
        #: runs that _rerun() may run again, by whether they are in place and by Session.call_offset
        self._ended: dict[tuple[bool, int], Execution] = {}
        self._users = 0  # calls under way, if the plan belongs to a cache
        self._used = 0  # number of the group's call that used it last
        self._text = spec.text()
        self._names = spec.counts(session.rank, session.size).keys()
        self._pairs = spec.pairs(session.rank, session.size)
        session.check_consistent(session.with_offset(self._text, spec.codec), self._pairs)

    def __repr__(self) -> str:
        return f"<Plan {self._text}>"

    @guarded
    def bind(self, x: Any, out: Any = None) -> Plan:
        """Set the arrays of later runs, as in the collective's method; returns the plan."""
        return self._bind(x, out)

    def _bind(self, x: Any, out: Any) -> Plan:
        session, spec = self._session, self.spec
        session.check_usable()
        memory, dtype, has_output = session.memory, spec.dtype, "output" in self._names
        given: dict[str, Values] = {}
        if "input" in self._names:
            given["input"] = memory.from_array(x, dtype=dtype, writable=out is None and has_output, what="x")
        if out is not None and has_output:
            given["output"] = memory.from_array(out, dtype=dtype, writable=True, what="out")
        elif has_output:
            source = given.get("input") or memory.from_array(x, dtype=dtype, writable=True, what="x")
            given["output"] = spec.output_in(source, session.rank, session.size)
        spec.check_counts(given, session.rank, session.size)
        result = x if out is None else out
        return self._bind_values(given, result if has_output else None, self._key)

    def _bind_values(self, arrays: Mapping[str, Values], result: Any, key: str | None) -> Plan:
        if self.is_active():
            raise ArgumentError("this plan is still running; wait() for it before binding other arrays")
        self._bound, self._key = self._prepare(arrays, result), key
        return self

    def _prepare(self, arrays: Mapping[str, Values], result: Any, binding: Binding | None = None) -> _Bound:
        """The arguments of runs on these arrays, whose element types and counts were checked.

        ``binding`` is what the spec's bind() returned for arrays of these addresses and of the spec's order.
        """
        spec, session, text, ordered = self.spec, self._session, self._text, self.spec
        if binding is None:
            order = spec.order_of(arrays)
            if order != spec.order:
                ordered = replace(spec, order=order)
                text = ordered.text()
                session.check_consistent(session.with_offset(text, spec.codec), self._pairs)
            binding = spec.bind(arrays, session.rank, session.size)
        compiled = self._program(binding.in_place)
        if compiled.state and ordered is not spec:  # a residual belongs to an element
            compiled = compiled._replace(state_owner=ordered.state_owner(compiled.algorithm))
        return _Bound(arrays, result, compiled, binding, text)

    @guarded
    def start(
        self,
        *,
        stream: Any = None,
        timeout: float | None = None,
        trace: list[TraceEvent] | None = None,
        lr: float | None = None,
    ) -> Work:
        """Collective: start a run with the bound arrays, and return its Work. Arguments: see the method.

        On the host the progress thread drives it if the caller does not wait for it within some milliseconds. Raises
        InvalidBufferError if a tensor's memory was replaced or resized after bind().
        """
        self._session.check_usable()
        timeout = None if timeout is None else timeout_of(timeout)
        check_trace(trace)
        if self._bound is not None:
            self._session.memory.hold(self._bound.arrays.values())
        return self._start(stream, timeout, trace, lr, Progress.SOON)

    def _start(
        self,
        stream: Any = None,
        timeout: float | None = None,
        trace: list[TraceEvent] | None = None,
        lr: float | None = None,
        progress: Progress = Progress.CALLER,
    ) -> Work:
        """Start a run with the bound arrays."""
        if self._bound is None:
            raise ArgumentError("this plan has no arrays yet; call plan.bind(x, out) first")
        if self.is_active():
            raise ArgumentError("this plan is already running; wait() for it before starting it again")
        self._work = self._launch(self._bound, self._key, stream, timeout, trace, lr, progress)
        return self._work

    def _launch(
        self,
        bound: _Bound,
        key: str | None,
        stream: Any,
        timeout: float | None,
        trace: list[TraceEvent] | None,
        lr: float | None,
        progress: Progress,
    ) -> Work:
        """Start a run, also while others are under way: they wait for each other."""
        lr = None if lr is None else lr_of(lr)
        arrays, result, compiled, (_, addresses), text = bound
        session = self._session
        keep: Any = bound
        streams = session.memory.streams(stream, *arrays.values())
        if session.call_offset:
            text = session.with_offset(text, self.spec.codec)
        if key is not None and self.spec.codec.state_names:
            state = session.state.take(key, compiled.state_owner, compiled.state, lr, compiled.sums)
            addresses = addresses | {name: memory.address for name, memory in state.items()}
            text = f"{text}, key={key!r}" + ("" if lr is None else f", lr={lr!r}")
            keep = bound, state
        schedule = None if trace is None else self.schedule(in_place=compiled.in_place)
        run = timeout, trace, schedule, streams, lr, progress, keep
        return Work(session, session.start(compiled.program, addresses, text, self._pairs, *run), result)

    def _wait_and_keep(self, work: Work, *, in_place: bool) -> Any:
        """Wait for a run, and keep it for _rerun().

        Only for codecs without state, and for runs whose headers have this plan's own text.
        """
        execution = work._execution
        result = work._wait()
        if execution is not None and work._execution is None:  # the run has ended, which on CUDA it may not have
            execution.kept = None
            self._ended = {key: each for key, each in self._ended.items() if key[1] == self._session.call_offset}
            self._ended[in_place, self._session.call_offset] = execution
        return result

    def _rerun(self, binding: Binding, timeout: float | None, kept: object) -> bool:
        """Make an earlier run once more, on other arrays or the same, and wait. False if that is not possible now."""
        session = self._session
        ended = self._ended.get((binding.in_place, session.call_offset))
        if ended is None or self._users:
            return False
        self._running = ended
        if session.rerun(ended, binding.addresses, timeout, kept):
            self._used = session.sequence
            return True
        return False

    def wait(self, timeout: float | None = None) -> Any:
        """Work.wait() of the last run."""
        if self._work is not None:
            return self._work.wait(timeout)
        if self._rerun_of is None:
            self._session.check_usable()
            raise ArgumentError("this plan was not started; call plan.start() first")
        if timeout is not None:
            timeout_of(timeout)
        return self._rerun_of.result

    @guarded
    def run(self, *, lr: float | None = None) -> Any:
        """Run once on the bound arrays and return the output array; as start() and wait(), in less time.

        Raises InvalidBufferError if a tensor's memory was replaced or resized after bind().
        """
        self._session.check_usable()
        if self._bound is not None:
            for values in self._bound.arrays.values():
                check_unmoved(values)
        return self._run(lr)

    @guarded
    def __call__(self, x: Any, out: Any = None, *, lr: float | None = None) -> Any:
        """Bind ``x`` (and ``out``), run once and return the output array."""
        return self._bind(x, out)._run(lr)

    def _run(self, lr: float | None) -> Any:
        bound = self._bound
        if bound is None or lr is not None or self.spec.codec.state_names or bound.text != self._text:
            return self._start(lr=lr)._wait()
        if not self.is_active():
            self._work = self._rerun_of = None
            if self._rerun(bound.binding, None, bound):
                self._rerun_of = bound
                return bound.result
        return self._wait_and_keep(self._start(), in_place=bound.binding.in_place)

    def is_active(self) -> bool:
        """Whether a run is under way that must end before the next (never on CUDA). Makes no progress."""
        if self._running is not None and not self._running.done:
            return True
        return self._work is not None and self._work._holds_plan()

    def schedule(self, *, in_place: bool) -> Schedule:
        """The schedule of this rank."""
        session = self._session
        return self.spec.schedule(
            session.rank, session.size, in_place=in_place, default_chunk=session.engine.default_chunk
        )

    def _program(self, in_place: bool) -> _Compiled:
        found = self._programs.get(in_place)
        if found is None:
            schedule = self.schedule(in_place=in_place)
            state = {name: buffer.size for name, buffer in schedule.buffers.items() if buffer.role is Role.STATE}
            state_owner = self.spec.state_owner(schedule.name)
            sums = sums_of(schedule) if state else ()
            program = self._session.engine.compile(schedule)
            found = _Compiled(program, in_place, schedule.name, state_owner, state, sums)
            self._programs[in_place] = found
            self.nbytes += found.program.workspace_nbytes
        return found


class _Pool:
    """The plans of one spec.

    Attributes:
        idle: without calls.
        busy: with calls; the one that was taken last is at the end.
    """

    __slots__ = ("busy", "idle")

    def __init__(self) -> None:
        self.idle: list[Plan] = []
        self.busy: deque[Plan] = deque()

    @property
    def used(self) -> int:
        """The number of the last call of its idle plans."""
        return max(plan._used for plan in self.idle)


class PlanCache:
    """The plans of a communicator's calls.

    A spec has at most CACHE_PLANS_PER_SPEC plans. Where more calls are under way, several share a plan, and run one
    after the other. Idle plans of the specs that were used longest ago are dropped if there are too many specs or too
    much workspace. Plans of the last spec, and those of calls under way, are kept, whatever their size. Any thread may
    give a plan back.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pools: dict[CollectiveSpec, _Pool] = {}
        self._nbytes = 0  # of all workspaces of idle plans

    def take(self, spec: CollectiveSpec) -> Plan:
        """A plan of this spec for one call."""
        with self._session.lock:
            plan = self._find(spec)
        if plan is not None:
            return plan
        plan = Plan(self._session, spec)  # without the lock: on CUDA this may wait for the other ranks
        with self._session.lock:
            self._pools.setdefault(spec, _Pool()).busy.append(plan)
            plan._users += 1
        return plan

    def _find(self, spec: CollectiveSpec) -> Plan | None:
        """A plan that is idle, or that calls share if there are as many as may be."""
        pool = self._pools.get(spec)
        if pool is None:
            return None
        if pool.idle:
            plan = pool.idle.pop()
            self._nbytes -= plan.nbytes
            pool.busy.append(plan)
        elif len(pool.busy) < CACHE_PLANS_PER_SPEC:
            return None
        else:
            plan = pool.busy[0]
            pool.busy.rotate(-1)
        plan._users += 1
        return plan

    def give_back(self, plan: Plan) -> None:
        """The call of a plan has ended, or was refused."""
        with self._session.lock:
            self._give_back(plan)

    def _give_back(self, plan: Plan) -> None:
        plan._users -= 1
        pool = self._pools.get(plan.spec)
        if plan._users or pool is None or plan not in pool.busy:  # clear() has removed the plan
            return
        plan._used = self._session.sequence
        pool.busy.remove(plan)
        pool.idle.append(plan)
        self._nbytes += plan.nbytes
        while len(self._pools) > CACHE_SPECS or self._nbytes > CACHE_NBYTES:
            others = [spec for spec, other in self._pools.items() if other.idle and other is not pool]
            if not others:
                return
            self._drop(min(others, key=lambda spec: self._pools[spec].used))

    def clear(self) -> None:
        """Drop every plan, also those whose calls have ended but were not waited for."""
        with self._session.lock:
            self._pools.clear()
            self._nbytes = 0

    def _drop(self, spec: CollectiveSpec) -> None:
        """Drop the idle plans of a spec."""
        pool = self._pools[spec]
        self._nbytes -= sum(plan.nbytes for plan in pool.idle)
        pool.idle.clear()
        if not pool.busy:
            del self._pools[spec]
