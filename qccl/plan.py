"""A plan: a schedule with its workspace and prepared operations, made once and run many times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from qccl import buffers
from qccl.buffers import Values
from qccl.codecs.base import Codec
from qccl.collectives import ALLREDUCE, choose_allreduce
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Schedule

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.engines.base import Program
    from qccl.trace import TraceEvent
    from qccl.work import Work

__all__ = ["Plan", "PlanCache", "Signature"]

#: bytes of workspace that idle plans of one communicator may hold together
CACHE_NBYTES = 256 << 20
#: signatures with idle plans, and idle plans of one signature (as many calls may be under way)
CACHE_SIGNATURES = 512
CACHE_ALIKE = 16


@dataclass(frozen=True, slots=True)
class Signature:
    """What makes two calls the same collective: everything the ranks must agree on, and how it is carried out."""

    collective: str
    count: int
    dtype: DType
    codec: Codec
    op: str
    algorithm: str
    chunk: int | None
    order: str = "C"  # which element follows which in memory (Values.order)

    def text(self) -> str:
        """All of it, for the ranks to compare and for messages."""
        rest = "" if self.order == "C" else f", order={self.order}"
        return (
            f"{self.collective}(count={self.count}, dtype={self.dtype}, op={self.op}, codec={self.codec.spec()}, "
            f"algorithm={self.algorithm}, chunk={self.chunk}{rest})"
        )

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """The schedule of one rank; ``default_chunk`` where the caller named none (None: the collective's own)."""
        scale = 1.0 / size if self.op == "avg" else 1.0
        combine = "sum" if self.op == "avg" else self.op
        name = self.algorithm
        if name == "auto":
            name = choose_allreduce(self.count, size, self.dtype, self.codec)
        return ALLREDUCE[name](
            rank,
            size,
            self.count,
            self.dtype,
            self.codec,
            combine,
            scale=scale,
            in_place=in_place,
            chunk_elements=default_chunk if self.chunk is None else self.chunk,
        )


class _Bound(NamedTuple):
    """The arrays of a plan's runs, and what follows from them: made once, so that a run has nothing to work out."""

    source: Values
    target: Values
    result: Any
    program: Program
    addresses: dict[str, int]
    text: str  # what all ranks must agree on


class Plan:
    """A collective made ready, in the manner of MPI-4's persistent ones: bind() once, start() and wait() many times.

    Two runs of one plan never overlap: it has one workspace. ``plan(x, out)`` is bind, start and wait.
    """

    def __init__(self, comm: Communicator, signature: Signature) -> None:
        self.signature = signature
        self._comm = comm
        self._programs: dict[bool, Program] = {}
        self._bound: _Bound | None = None
        self._work: Work | None = None
        self._text = signature.text()
        comm._agree(self._text)

    def __repr__(self) -> str:
        s = self.signature
        return f"<Plan {s.collective} {s.count} x {s.dtype} {s.codec.spec()} {s.op} {s.algorithm}>"

    @property
    def nbytes(self) -> int:
        """Bytes of workspace held."""
        return sum(program.workspace_nbytes for program in self._programs.values())

    def bind(self, x: Any, out: Any = None) -> Plan:
        """Fix the arrays (as in quantized_allreduce) of the runs to come; returns the plan."""
        s = self.signature
        memory = self._comm._memory
        source = memory.from_array(x, dtype=s.dtype, writable=out is None, what="x")
        target = source if out is None else memory.from_array(out, dtype=s.dtype, writable=True, what="out")
        return self._bind_values(source, target, x if out is None else out)

    def _bind_values(self, source: Values, target: Values, result: Any) -> Plan:
        self._comm._check_usable()
        if self.is_active():
            raise ArgumentError("this plan is still running; wait() for it before binding other arrays")
        self._bound = None
        for what, values in (("x", source), ("out", target)):
            if values.count != self.signature.count:
                raise ArgumentError(
                    f"{what} has {values.count} elements, but the plan is for {self.signature.count}; "
                    f"make a plan for each size"
                )
        if source.order != target.order:
            raise ArgumentError(
                f"x and out lie differently in memory (shape, strides in elements): {source.layout} and "
                f"{target.layout}; pass arrays of one shape and one order of axes"
            )
        text = self._text
        if source.order != self.signature.order:
            text = replace(self.signature, order=source.order).text()
            self._comm._agree(text)
        if buffers.same_or_disjoint(source, target):
            program, addresses = self._program(True), {"output": target.address}
        else:
            program, addresses = self._program(False), {"input": source.address, "output": target.address}
        self._bound = _Bound(source, target, result, program, addresses, text)
        return self

    def start(self, *, stream: Any = None, timeout: float | None = None, trace: list[TraceEvent] | None = None) -> Work:
        """Begin one run with the bound arrays; all ranks must. Arguments: see quantized_allreduce. Returns its Work.

        On the host it progresses while the caller computes, if it is not waited for within a moment.
        """
        work = self._start(stream=stream, timeout=timeout, trace=trace)
        work._detach(at_once=False)
        return work

    def _start(
        self, *, stream: Any = None, timeout: float | None = None, trace: list[TraceEvent] | None = None
    ) -> Work:
        """Begin a run that progresses only while it is waited for (on the host)."""
        if self._bound is None:
            raise ArgumentError("this plan has no arrays yet; call plan.bind(x, out) first")
        if self.is_active():
            raise ArgumentError("this plan is already running; wait() for it before starting it again")
        source, target, result, program, addresses, text = self._bound
        self._work = self._comm._launch(
            program,
            text,
            addresses,
            result,
            keep=self._bound,
            streams=self._comm._memory.streams(stream, source, target),
            timeout=timeout,
            trace=trace,
        )
        return self._work

    def wait(self, timeout: float | None = None) -> Any:
        """Return the output array when what comes next may use it: Work.wait() of the last run."""
        if self._work is None:
            raise ArgumentError("this plan was not started; call plan.start() first")
        return self._work.wait(timeout)

    def __call__(self, x: Any, out: Any = None) -> Any:
        """Run once on ``x`` (and ``out``) and return the output array."""
        return self.bind(x, out)._start().wait()

    def is_active(self) -> bool:
        """Whether a run is under way that must end before the next (never on CUDA); makes no progress."""
        return self._work is not None and self._work._holds_plan()

    def schedule(self, *, in_place: bool) -> Schedule:
        """What this rank does in a run."""
        comm = self._comm
        return self.signature.schedule(
            comm.rank, comm.size, in_place=in_place, default_chunk=comm._engine.chunk_elements
        )

    def _program(self, in_place: bool) -> Program:
        found = self._programs.get(in_place)
        if found is None:
            found = self._programs[in_place] = self._comm._engine.compile(self.schedule(in_place=in_place))
        return found


class PlanCache:
    """Plans that are not running, most recently used last; the oldest go when there are too many or too large ones."""

    def __init__(self) -> None:
        self._idle: dict[Signature, list[Plan]] = {}
        self._nbytes = 0  # of workspace, in all of them

    def take(self, comm: Communicator, signature: Signature) -> Plan:
        """An idle plan of this signature, or a new one."""
        idle = self._idle.get(signature)
        if not idle:
            return Plan(comm, signature)
        plan = idle.pop()
        self._nbytes -= plan.nbytes
        return plan

    def give_back(self, plan: Plan) -> None:
        """Keep a plan that has ended, for the next call like it."""
        plan._bound = plan._work = None
        idle = self._idle.pop(plan.signature, [])
        self._idle[plan.signature] = idle
        if len(idle) < CACHE_ALIKE:
            idle.append(plan)
            self._nbytes += plan.nbytes
        while len(self._idle) > CACHE_SIGNATURES or (self._nbytes > CACHE_NBYTES and len(self._idle) > 1):
            for dropped in self._idle.pop(next(iter(self._idle))):
                self._nbytes -= dropped.nbytes

    def clear(self) -> None:
        """Drop every plan."""
        self._idle.clear()
        self._nbytes = 0
