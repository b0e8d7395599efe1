"""A plan: a collective that is prepared once, bound to arrays, and run many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qccl.base.arrays import Values, check_unmoved
from qccl.base.errors import ArgumentError
from qccl.base.guard import guarded
from qccl.base.tensors import is_tensor
from qccl.base.trace import TraceEvent
from qccl.collectives import CollectiveSpec, input_and_output
from qccl.collectives.arguments import check_trace, timeout_of
from qccl.collectives.schedule import Role, Schedule
from qccl.collectives.topology import explain
from qccl.communicator.dynamo import not_traced
from qccl.communicator.profile import CallChoice
from qccl.communicator.programs import Compiled, ProgramCache
from qccl.communicator.session import Session
from qccl.communicator.state import lr_of
from qccl.communicator.work import Work
from qccl.engine.base import Bound, Progress, Request

__all__ = ["Plan"]

#: the request of start() without arguments
_SOON = Request(Progress.SOON)


class _Arrays(NamedTuple):
    """The arrays of a plan's runs, and everything prepared for them.

    Attributes:
        arrays: by the names of the schedule's buffers.
        tensors: the PyTorch tensors among them, whose memory may be replaced between runs.
        objects: the caller's array objects.
        result: the return value of a run.
        request: for run(); start() makes its own.
        offset: Numbers.offset at the time of bind(). The text that the ranks compare contains it.
    """

    arrays: Mapping[str, Values]
    tensors: tuple[Values, ...]
    objects: tuple[Any, ...]
    result: Any
    compiled: Compiled
    bound: Bound
    request: Request
    offset: int


@not_traced
class Plan:
    """A prepared collective, like MPI-4's persistent ones: call bind() once, start() and wait() many times.

    Two runs of one plan never overlap: it has one workspace. ``plan(x, out)`` is bind() and run(). ``key`` names the
    state of a stateful codec.
    """

    def __init__(
        self,
        session: Session,
        asked: CollectiveSpec,
        key: str | None,
        nodes: Sequence[int],
        choice: CallChoice,
    ) -> None:
        """``nodes``: for each rank, the number of its node; ``choice``: how the call is made."""
        self._asked, self._nodes, self._choice = asked, nodes, choice
        self.spec = spec = self._choice.spec
        self._key = key
        self._session = session
        self._programs = ProgramCache(session.engine, session.calls)
        self._bound: _Arrays | None = None
        self._is_prepared = False  # whether a first bind() has succeeded on all ranks
        self._work: Work | None = None  # of the last run, if start() made that run
        self._result: tuple[Any] | None = None  # of the last run, if run() made that run
        self._names = spec.buffers(session.rank, session.size).declared.keys()
        session.check_consistent(session.text_of(spec), spec.pairs(session.rank, session.size))

    def __repr__(self) -> str:
        return f"<Plan {self.spec.text()}>"

    @property
    def codec(self) -> str:
        """The codec of the plan's runs, as text; with ``codec="auto"`` the chosen codec."""
        return self.spec.codec.spec()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the plan alone holds: on the host a workspace, on CUDA tables and pinned memory."""
        return self._programs.nbytes

    @guarded
    def bind(self, x: Any, out: Any = None) -> Plan:
        """Set the arrays of later runs, as in the collective's method; returns the plan.

        On CUDA the first bind() of a plan is collective: if a rank cannot prepare the plan, for example because its GPU
        has no room, all ranks raise EngineError. The plan can then be bound again.
        """
        session, spec = self._session, self.spec
        session.check_usable()
        has_output = "output" in self._names
        given = input_and_output(self._find, x, out, reads="input" in self._names, writes=has_output)
        spec.fit(given, session.rank, session.size)
        result = x if out is None else out
        return self._bind_values(given, result if has_output else None)

    def _find(self, array: Any, what: str, *, writable: bool = True) -> Values:
        return self._session.memory.from_array(array, dtype=self.spec.dtype, writable=writable, what=what)

    @guarded
    def bind_buffers(self, arrays: Mapping[str, Any], result: Any = None) -> Plan:
        """Bind arrays by the names of their buffers (CollectiveSpec.buffers()), also several inputs or outputs.

        ``result`` is the return value of run(). Raises the errors of bind().
        """
        session, spec = self._session, self.spec
        session.check_usable()
        declared = spec.buffers(session.rank, session.size).declared
        if not isinstance(arrays, Mapping):
            raise ArgumentError(f"arrays must be a dict of arrays by names of buffers, not {type(arrays).__name__}")
        if arrays.keys() != declared.keys():
            raise ArgumentError(f"the buffers of this call are {sorted(declared)}, not {sorted(arrays)}")
        given = {
            name: self._find(arrays[name], name, writable=buffer.role is Role.OUTPUT)
            for name, buffer in declared.items()
        }
        spec.fit(given, session.rank, session.size)
        return self._bind_values(given, result)

    def _bind_values(self, arrays: Mapping[str, Values], result: Any) -> Plan:
        if self.is_active():
            raise ArgumentError("this plan is still running; wait() for it before binding other arrays")
        self._bound = self._prepare(arrays, result, self._key)
        return self

    @guarded
    def _prepare(self, arrays: Mapping[str, Values], result: Any, key: str | None) -> _Arrays:
        """Prepare later runs on arrays whose element types and counts were checked."""
        first = not self._is_prepared
        compiled, bound = self._session.bind(self.spec, arrays, key, self._programs, again=first)
        self._is_prepared = True
        values = tuple(dict.fromkeys(arrays.values()))
        tensors, objects = tuple(filter(_is_tensor, values)), tuple(each.array for each in values)
        offset = self._session.numbers.offset
        return _Arrays(arrays, tensors, objects, result, compiled, bound, Request(key=key), offset)

    def start(
        self,
        *,
        stream: Any = None,
        timeout: float | None = None,
        trace: list[TraceEvent] | None = None,
        lr: float | None = None,
    ) -> Work:
        """Collective: start a run with the bound arrays, and return its Work. Arguments: see the collective's method.

        On the host the progress thread drives the run if the caller does not wait for it within some milliseconds.
        Raises InvalidBufferError if a tensor's memory was replaced or resized after bind().
        """
        ready = self._ready()
        timeout = None if timeout is None else timeout_of(timeout)
        if trace is not None:
            check_trace(trace)
        session, memory = self._session, self._session.memory
        if ready.tensors:
            memory.hold(ready.tensors)
        request = _SOON
        if timeout is not None or trace is not None or lr is not None or stream is not None or self._key is not None:
            lr = None if lr is None else lr_of(lr)
            request = Request(Progress.SOON, timeout, self._key, lr, stream, trace)
        streams = memory.streams(stream, ready.objects) if memory.has_streams or stream is not None else ()
        self._result = None
        self._work = work = Work(session, ready.result)
        session.start(ready.compiled, ready.bound, request, ready.arrays, streams, work._begin)
        return work

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the last run, as Work.wait(), and return its result."""
        if self._work is not None and self._work._call >= 0:
            return self._work.wait(timeout)
        if self._result is None:
            self._session.check_usable()
            raise ArgumentError("this plan was not started; call plan.start() first")
        if timeout is not None:
            timeout_of(timeout)
        return self._result[0]

    def run(self, *, lr: float | None = None) -> Any:
        """Run once on the bound arrays and return the output array: like start() and wait(), in less time.

        Raises InvalidBufferError if a tensor's memory was replaced or resized after bind().
        """
        ready = self._ready()
        for each in ready.tensors:
            check_unmoved(each)
        request = ready.request
        if lr is not None:
            request = request._replace(lr=lr_of(lr))
        session, memory = self._session, self._session.memory
        streams = memory.streams(None, ready.objects) if memory.has_streams else ()
        self._work, self._result, number = None, (ready.result,), session.numbers.sequence
        try:
            session.start(ready.compiled, ready.bound, request, ready.arrays, streams)
        except BaseException:
            if session.end.is_over or session.numbers.sequence == number:
                self._result = None
            raise
        return ready.result

    def __call__(self, x: Any, out: Any = None, *, lr: float | None = None) -> Any:
        """Bind ``x`` (and ``out``), run once and return the output array."""
        return self.bind(x, out).run(lr=lr)

    def _ready(self) -> _Arrays:
        """Check that a run may begin, and return its arrays; bind them again after load_state_dict()."""
        session, bound, work = self._session, self._bound, self._work
        if session.end.is_over or session.calling:
            self._check_usable()
        if bound is None:
            raise ArgumentError("this plan has no arrays yet; call plan.bind(x, out) first")
        if bound.compiled.programs[0].users or (work is not None and work._execution is not None):
            self._refuse_if_active()
        if bound.offset != session.numbers.offset:  # load_state_dict() has changed it
            bound = self._bound = self._prepare(bound.arrays, bound.result, self._key)
        return bound

    @guarded
    def _check_usable(self) -> None:
        self._session.check_usable()

    def _refuse_if_active(self) -> None:
        if self.is_active():
            raise ArgumentError("this plan is already running; wait() for it before starting it again")

    def is_active(self) -> bool:
        """Whether a run is under way, and must end before the next one begins; never on CUDA. Does not advance it."""
        if self._bound is not None and self._bound.compiled.programs[0].users:
            return True
        return self._work is not None and self._work._is_under_way()

    def explain(self) -> str:
        """Which algorithm the ranks use and why, their chunks, and the bytes that this rank's node sends to others.

        If the group's profile decided, the text also has the predicted time of each codec and algorithm.
        """
        session, choice = self._session, self._choice
        return explain(self._asked, choice.spec, self._nodes, session.rank, session.engine.chunking, choice.reason())

    def schedule(self, *, in_place: bool) -> Schedule:
        """The schedule of this rank."""
        session = self._session
        return self.spec.schedule(session.rank, session.size, in_place=in_place, chunking=session.engine.chunking)


def _is_tensor(values: Values) -> bool:
    return is_tensor(values.array)
