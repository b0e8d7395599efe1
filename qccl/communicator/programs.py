"""The compiled programs of a communicator: made once for each collective, and run many times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qccl.collectives import CollectiveSpec
from qccl.collectives.feedback import sums_of
from qccl.collectives.schedule import Role, Schedule
from qccl.communicator.state import Forms, Parts
from qccl.engine.base import Engine, Program

if TYPE_CHECKING:
    from qccl._host import CallTable

__all__ = ["Compiled", "ProgramCache"]

#: bytes of workspace that the idle programs of one communicator may hold together
CACHE_NBYTES = 256 << 20
#: the most collectives whose programs are kept
CACHE_COLLECTIVES = 512
#: the most programs of one collective, and so the most of its calls that run at once
CACHE_PROGRAMS = 16


class Compiled:
    """The programs of one collective, on arrays in place or not, and the state of its codec.

    A call takes a program that no other run uses. If CACHE_PROGRAMS programs are all in use, calls share them, and run
    one after the other.

    Attributes:
        programs: one for each call that was under way at the same time.
        keeps_state: whether the codec keeps state under a key, even if this rank has no part of it.
        state: this rank's state buffers by name: the number of elements, and their type.
        owner: the text of the call that state under a key belongs to (Entry.call).
        sums: see StateStore.take().
        used: the sequence number of the last call that used these programs.
    """

    def __init__(self, engine: Engine, spec: CollectiveSpec, *, in_place: bool, is_counted: bool) -> None:
        """``is_counted``: the statistics count its runs."""
        self._engine, self.spec, self.in_place = engine, spec, in_place
        schedule = self.schedule()
        self.keeps_state = bool(spec.codec.state_names)
        self.state: Forms = {
            name: (buffer.size, buffer.dtype)
            for name, buffer in schedule.buffers.items()
            if buffer.role is Role.STATE and buffer.dtype is not None
        }
        self.owner = spec.state_owner(schedule.name) if self.keeps_state else ""
        self.sums: Parts = sums_of(schedule) if self.state else ()
        self.used = 0
        label = spec.name, spec.codec.spec(), spec.count
        self._counted = engine.tallies.counted(*label) if is_counted else None
        self.programs: list[Program] = [engine.compile(schedule, self._counted)]

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        return sum(program.workspace_nbytes for program in self.programs)

    @property
    def is_busy(self) -> bool:
        """Whether a run of any program has not ended (never on CUDA)."""
        return any(program.users for program in self.programs)

    def schedule(self) -> Schedule:
        """The schedule of this rank."""
        engine = self._engine
        return self.spec.schedule(engine.rank, engine.size, in_place=self.in_place, chunking=engine.chunking)

    def another(self) -> Program:
        """Find or compile a program for a run while the first program is in use."""
        for program in self.programs:
            if not program.users:
                return program
        if len(self.programs) == CACHE_PROGRAMS:
            return min(self.programs, key=lambda program: program.users)
        self.programs.append(self._engine.compile(self.schedule(), self._counted))
        return self.programs[-1]


class ProgramCache:
    """The programs of a communicator's calls, or of a plan's runs.

    If there are too many collectives or too much workspace, the cache drops the idle programs of the collectives that
    were used longest ago. It keeps the programs of the last collective and of calls under way, whatever their size.
    """

    def __init__(self, engine: Engine, calls: CallTable, *, is_counted: bool = True) -> None:
        """``calls``: the table whose calls use these programs; ``is_counted``: the statistics count the runs."""
        self._engine, self._calls, self._is_counted = engine, calls, is_counted
        self._compiled: dict[tuple[CollectiveSpec, bool], Compiled] = {}

    def __iter__(self) -> Iterator[Compiled]:
        return iter(self._compiled.values())

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        return sum([program.workspace_nbytes for compiled in self._compiled.values() for program in compiled.programs])

    def get(self, spec: CollectiveSpec, *, in_place: bool) -> Compiled:
        """The programs of a collective; compiles the first one."""
        found = self._compiled.get((spec, in_place))
        if found is None:
            found = Compiled(self._engine, spec, in_place=in_place, is_counted=self._is_counted)
            self._compiled[spec, in_place] = found
        found.used = self._engine.numbers.sequence
        self._evict(found)
        return found

    def _evict(self, newest: Compiled) -> None:
        nbytes = self.nbytes
        while len(self._compiled) > CACHE_COLLECTIVES or nbytes > CACHE_NBYTES:
            others = [key for key, other in self._compiled.items() if other is not newest and not other.is_busy]
            if not others:
                return
            nbytes -= self._compiled.pop(min(others, key=lambda key: self._compiled[key].used)).nbytes
            self._calls.clear()

    def clear(self) -> None:
        """Drop every program; calls under way keep theirs."""
        self._compiled.clear()
        self._calls.clear()
