"""A schedule compiled for the host.

A HostProgram holds everything that is the same in each run: the workspace, and the steps (kernels/engine/steps.h),
which are kernel calls bound to their addresses, transfers, and the dependencies between them. Native code runs the
steps (kernels/engine/run.h, loop.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from qccl import _host
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import EngineError
from qccl.collectives.schedule import (
    Commit,
    Decode,
    Encode,
    Reduce,
    Role,
    Schedule,
    Span,
    State,
    StateBuffer,
    Task,
    Transfer,
    tasks,
)
from qccl.engine.base import caller_buffers
from qccl.engine.control import Block
from qccl.engine.host.zero_copy import remove_copies
from qccl.engine.labels import Label, labels
from qccl.observe.tallies import Counted, traffic

__all__ = ["HostProgram"]

_ALIGNMENT = 64
#: least bytes of values that a send takes from the caller's array; copying fewer takes less than 1 us
_LEAST_DIRECT = 16 << 10
_OPS = {"sum": 0, "min": 1, "max": 2}


class HostProgram:
    """A compiled schedule with its workspace; one run at a time, and others wait for it.

    Attributes:
        rank: the schedule's rank.
        memory: the addresses of all buffers, and the numbers of the run (_host.Memory).
        workspace_nbytes: bytes of the workspace.
        callers: the caller's buffers, by name; each run is given their addresses.
        running: a run is under way.
        users: runs that were accepted and have not ended, queued ones included.
        header_text: the text in the native run's headers; a next run with the same text sends these headers again.
        addresses: the addresses of the caller's buffers in the last run.
        labels: the label of each task in a trace; empty before label().
        native: the program in native code, which keeps one run's headers, progress and trace.
    """

    def __init__(
        self,
        schedule: Schedule,
        threads: int,
        eager_nbytes: int,
        sends_ahead: Sequence[int] = (),
        counted: Counted | None = None,
    ) -> None:
        """``threads`` may share an operation; ``eager_nbytes`` of data may be sent with a header.

        ``sends_ahead``: see transports/base.py. ``counted``: the totals to which runs are added when they end, or None.
        """
        self.rank = schedule.rank
        self.running = False
        self.users = 0
        self.header_text: str | None = None
        self.labels: list[Label] = []
        self._numbers = {name: i for i, name in enumerate(schedule.buffers)}
        self.callers = caller_buffers(schedule)
        self.addresses: Mapping[str, int] | None = None
        self.memory = _host.Memory(len(self._numbers))
        self.memory.threads = threads
        for name, buffer in self.callers.items():
            self.memory.add_caller(self._numbers[name], buffer.nbytes, buffer.role in (Role.OUTPUT, Role.STATE))
        self._workspace = self._allocate(schedule)
        self.workspace_nbytes = self._workspace.nbytes
        self._least = max(_LEAST_DIRECT, eager_nbytes + 1)
        self.steps = _host.Steps(schedule.rank, schedule.size, eager_nbytes, sends_ahead)
        self._direct: list[tuple[int, str, int]] = []  # sends from the caller's memory: step, buffer and offset
        self._add_steps(schedule)
        self.steps.link()
        self.native = _host.Run(self.steps, self.memory)
        if counted is not None:
            self.native.count_in(*counted, *traffic(schedule))

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Set the caller's addresses, when no run is under way."""
        if addresses != self.addresses:
            for name in self.callers:
                self.memory[self._numbers[name]] = addresses[name]
            for step, name, offset in self._direct:
                self.steps.set_source(step, addresses[name] + offset)
        self.addresses = addresses

    def label(self, schedule: Schedule) -> None:
        """Find the label of each task, before the first run with a trace; ``schedule`` is the compiled one."""
        if not self.labels:
            every = tasks(schedule, per_transfer=True)
            known = dict(zip(map(_identity, every), labels(every, schedule.buffers), strict=True))
            kept, _ = remove_copies(every, self._least)
            self.labels = [known[_identity(task)] for task in kept]

    def _allocate(self, schedule: Schedule) -> Block:
        """Allocate one block for all work buffers, and enter their addresses into the memory table."""
        offsets, total = {}, 0
        for name, buffer in schedule.buffers.items():
            if buffer.role is Role.WORK:
                offsets[name] = total
                total += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = Block(total)
        for name, offset in offsets.items():
            self.memory[self._numbers[name]] = block.address + offset
        return block

    def _add_steps(self, schedule: Schedule) -> None:
        # the tasks are not kept: they are most of a long schedule's memory
        every, needs = remove_copies(tasks(schedule, per_transfer=True), self._least)
        buffers = schedule.buffers
        spans = {span for task in every for span in (*task.reads, *task.writes)}
        places = {span: (self._numbers[span.buffer], span.start * buffers[span.buffer].itemsize) for span in spans}
        codes = _DTypeCodes({name: each.dtype.code for name, each in buffers.items() if each.dtype is not None})
        outputs = {name for name, each in buffers.items() if each.role is Role.OUTPUT}
        for task, needed in zip(every, needs, strict=True):
            if task.transfer is None:
                operation = self._operation(task, places, codes)
                writes_output = not outputs.isdisjoint(map(attrgetter("buffer"), task.writes))
                self.steps.add_operation(operation, needed, writes_output)
                continue
            if task.source is not None:
                self._direct.append((len(self.steps), task.source.buffer, places[task.source][1]))
            (number, offset), span = places[task.transfer.span], task.transfer.span
            self.steps.add_transfer(
                task.is_send,
                task.transfer.peer,
                1 + task.sequence % _host.TAGS_PER_RUN,
                self.memory[number] + offset,
                (span.stop - span.start) * buffers[span.buffer].itemsize,
                needed,
            )

    def _operation(
        self, task: Task, places: Mapping[Span, tuple[int, int]], codes: Mapping[str, int]
    ) -> _host.Operation:
        """Bind an operation to its buffers.

        ``places`` has the buffer and the offset in bytes of each span, ``codes`` the element type of each buffer.
        """
        memory, rank = self.memory, self.rank
        match task.op:
            case Encode(codec, src, wire, index, round_):
                code, count = codes[src.buffer], src.stop - src.start
                return _host.Encode(memory, codec.host(), code, places[src], places[wire], count, index, round_, rank)
            case Decode(codec, wire, dst, accumulate, index, round_, maker):
                code, count, ends = codes[dst.buffer], dst.stop - dst.start, (places[wire], places[dst])
                return _host.Decode(memory, codec.host(), code, *ends, count, accumulate, index, round_, maker)
            case Reduce() as op:
                values = op.own if op.own is not None else op.out
                if values is None:
                    raise EngineError(f"operation {task.op_index} is a Reduce with neither own values nor an output")
                return _host.Reduce(
                    memory,
                    op.codec.host(),
                    codes[values.buffer],
                    list(map(places.__getitem__, op.srcs)),
                    None if op.own is None else places[op.own],
                    op.own_index,
                    None if op.wire is None else places[op.wire],
                    None if op.out is None else places[op.out],
                    values.stop - values.start,
                    _OPS[op.op],
                    op.scale,
                    op.index,
                    op.round,
                    rank,
                    op.src_ranks,
                    op.src_round,
                    *(() if op.state is None else _state(op.state, places)),
                )
            case Commit(guard, state_buffers):
                copies = [
                    (places[each.new], places[each.old], len(each.new) * each.dtype.itemsize) for each in state_buffers
                ]
                return _host.Commit(memory, [(codes[span.buffer], places[span], len(span)) for span in guard], copies)
            case _:
                raise EngineError(f"the host engine cannot run {type(task.op).__name__} (operation {task.op_index})")


class _DTypeCodes(dict[str, int]):
    """The numbers of the buffers' element types in the kernels."""

    def __missing__(self, name: str) -> int:
        raise EngineError(f"an operation takes values from {name!r}, a buffer of bytes")


def _state(state: State, places: Mapping[Span, tuple[int, int]]) -> tuple[Any, ...]:
    """The last arguments of a Reduce: where its state is."""

    def old_and_new(buffers: StateBuffer | None) -> Any:
        return None if buffers is None else (places[buffers.old], places[buffers.new])

    residual, momentum = state.residual, state.momentum
    dtype = FLOAT32 if residual is None else residual.dtype
    return old_and_new(residual), old_and_new(momentum), state.mu, state.beta, dtype.code


def _identity(task: Task) -> tuple[int, Transfer | None, bool, int]:
    """A key that identifies a task in its schedule, also after remove_copies() has changed the source of its send."""
    return task.op_index, task.transfer, task.is_send, task.sequence
