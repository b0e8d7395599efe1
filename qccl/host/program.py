"""A schedule compiled for the host.

A Program holds everything that is the same in each run: the workspace, and the steps (kernels/engine/steps.h), which
are kernel calls bound to their addresses, transfers, and the dependencies between them. Native code runs the steps
(kernels/engine/run.h, loop.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qccl import _host
from qccl.dtypes import FLOAT32
from qccl.engine.control import Block
from qccl.engine.labels import Label, labels
from qccl.errors import ArgumentError, EngineError
from qccl.host.zero_copy import remove_copies
from qccl.schedule import Commit, Decode, Encode, Node, Reduce, Role, Schedule, Span, StateBuffer, Transfer, nodes

__all__ = ["Extent", "Program", "conflict"]

_ALIGNMENT = 64
#: a send takes values from the caller's array if they have at least so many bytes; copying fewer takes less than 1 us
_LEAST_DIRECT = 16 << 10
_OPS = {"sum": 0, "min": 1, "max": 2}


class Extent(NamedTuple):
    """Memory from one address to another, not empty, and whether it is written."""

    start: int
    stop: int
    is_written: bool


def conflict(ours: Iterable[Extent], theirs: Iterable[Extent]) -> bool:
    """Whether one of two lists writes memory that is also in the other list.

    Lists in ascending order are compared in linear time: sorted() merges them.
    """
    every = sorted([(extent, 0) for extent in ours] + [(extent, 1) for extent in theirs])
    ends, written_ends = [0, 0], [0, 0]  # of each list's extents so far
    for (start, stop, is_written), side in every:
        if start < (ends if is_written else written_ends)[1 - side]:
            return True
        ends[side] = max(ends[side], stop)
        if is_written:
            written_ends[side] = max(written_ends[side], stop)
    return False


class Program:
    """A compiled schedule with its workspace; one run at a time, and others wait for it.

    Attributes:
        rank: of the schedule.
        workspace_nbytes: bytes of the workspace.
        running: a run is under way.
        header_writes: how many runs have written their headers, which a later run can send again.
        extents: of the caller's memory, in ascending order.
    """

    def __init__(self, schedule: Schedule, threads: int, eager_nbytes: int) -> None:
        """``threads`` may share an operation; ``eager_nbytes`` of data may be sent with a header."""
        self.rank = schedule.rank
        self.running = False
        self.header_writes = 0
        self._numbers = {name: i for i, name in enumerate(schedule.buffers)}
        self._callers = {n: buffer for n, buffer in schedule.buffers.items() if buffer.role is not Role.WORK}
        self._addresses: dict[str, int] | None = None
        self.extents: Sequence[Extent] = ()
        self._memory = _host.Memory(len(self._numbers))
        self._memory.threads = threads
        self._workspace = self._allocate(schedule)
        self.workspace_nbytes = self._workspace.nbytes
        self._least = max(_LEAST_DIRECT, eager_nbytes + 1)
        # the nodes are not kept: they are most of the memory that a long schedule takes
        every, needs = remove_copies(tuple(nodes(schedule, per_transfer=True)), self._least)
        self.steps = _host.Steps(schedule.rank, schedule.size, eager_nbytes)
        self._direct: list[tuple[int, str, int]] = []  # sends from the caller's memory: step, buffer and offset
        for node, needed in zip(every, needs, strict=True):
            if node.transfer is None:
                writes_output = any(schedule.buffers[span.buffer].role is Role.OUTPUT for span in node.writes())
                self.steps.add_operation(self._operation(node, schedule), needed, writes_output)
            else:
                self._add_transfer(node, node.transfer, needed, schedule)
        self.steps.link()
        self.run = _host.Run(self.steps)

    def check(self, addresses: Mapping[str, int]) -> None:
        """Raise ArgumentError unless all of the caller's buffers have an address, and no others."""
        if addresses.keys() != self._callers.keys():
            raise ArgumentError(f"addresses are needed for {sorted(self._callers)}, not for {sorted(addresses)}")

    def bind(self, addresses: Mapping[str, int], call: int, lr: float) -> None:
        """Set the caller's addresses and the numbers of the next run; not during a run."""
        self._memory.call, self._memory.lr = call, lr
        if addresses == self._addresses:
            return
        for name in self._callers:
            self._memory[self._numbers[name]] = addresses[name]
        self._addresses = dict(addresses)
        for step, name, offset in self._direct:
            self.steps.set_source(step, self._memory[self._numbers[name]] + offset)
        self.extents = sorted(
            Extent(addresses[name], addresses[name] + buffer.nbytes, buffer.role in (Role.OUTPUT, Role.STATE))
            for name, buffer in self._callers.items()
            if buffer.nbytes
        )

    def labels(self, schedule: Schedule) -> list[Label]:
        """The label of each step in a trace; ``schedule`` is the one that was compiled."""
        every = tuple(nodes(schedule, per_transfer=True))
        known = dict(zip(map(_identity, every), labels(every, schedule.buffers), strict=True))
        kept, _ = remove_copies(every, self._least)
        return [known[_identity(node)] for node in kept]

    def _allocate(self, schedule: Schedule) -> Block:
        """One block for all work buffers; enters their addresses into the memory table."""
        offsets, total = {}, 0
        for name, buffer in schedule.buffers.items():
            if buffer.role is Role.WORK:
                offsets[name] = total
                total += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = Block(total)
        for name, offset in offsets.items():
            self._memory[self._numbers[name]] = block.address + offset
        return block

    def _operation(self, node: Node, schedule: Schedule) -> _host.Operation:
        def at(span: Span) -> tuple[int, int]:
            return self._numbers[span.buffer], span.start * schedule.buffers[span.buffer].itemsize

        def code(span: Span) -> int:
            dtype = schedule.buffers[span.buffer].dtype
            if dtype is None:
                raise EngineError(f"operation {node.op_index} takes values from {span.buffer!r}, a buffer of bytes")
            return dtype.code

        def state(op: Reduce) -> tuple[Any, Any, float]:
            def old_and_new(buffers: StateBuffer | None) -> Any:
                return None if buffers is None else (at(buffers.old), at(buffers.new))

            if op.state is None:
                return None, None, 0.0
            return old_and_new(op.state.residual), old_and_new(op.state.momentum), op.state.mu

        memory, rank = self._memory, schedule.rank
        match node.op:
            case Encode(codec, src, wire, index, round_):
                return _host.Encode(memory, codec.host(), code(src), at(src), at(wire), len(src), index, round_, rank)
            case Decode(codec, wire, dst, accumulate, index, round_, maker):
                return _host.Decode(
                    memory, codec.host(), code(dst), at(wire), at(dst), len(dst), accumulate, index, round_, maker
                )
            case Reduce() as op:
                values = op.own if op.own is not None else op.out
                if values is None:
                    raise EngineError(f"operation {node.op_index} is a Reduce with neither own values nor an output")
                return _host.Reduce(
                    memory,
                    op.codec.host(),
                    code(values),
                    [at(src) for src in op.srcs],
                    None if op.own is None else at(op.own),
                    op.own_index,
                    None if op.wire is None else at(op.wire),
                    None if op.out is None else at(op.out),
                    len(values),
                    _OPS[op.op],
                    op.scale,
                    op.index,
                    op.round,
                    rank,
                    op.src_ranks,
                    op.src_round,
                    *state(op),
                )
            case Commit(guard, state_buffers):
                copies = [(at(each.new), at(each.old), len(each.new) * FLOAT32.itemsize) for each in state_buffers]
                return _host.Commit(memory, [(code(span), at(span), len(span)) for span in guard], copies)
            case _:
                raise EngineError(f"the host engine cannot run {type(node.op).__name__} (operation {node.op_index})")

    def _add_transfer(self, node: Node, transfer: Transfer, needed: Sequence[int], schedule: Schedule) -> None:
        span = transfer.span
        buffer = schedule.buffers[span.buffer]
        if buffer.role is not Role.WORK:
            raise EngineError(f"operation {node.op_index} transfers {span.buffer!r}; transfers must be in work buffers")
        address = self._memory[self._numbers[span.buffer]] + span.start * buffer.itemsize
        if node.source is not None:
            offset = node.source.start * schedule.buffers[node.source.buffer].itemsize
            self._direct.append((len(self.steps), node.source.buffer, offset))
        tag = 1 + node.sequence % _host.TAGS_PER_RUN
        self.steps.add_transfer(node.is_send, transfer.peer, tag, address, len(span) * buffer.itemsize, needed)


def _identity(node: Node) -> tuple[int, Transfer | None, bool, int]:
    """A key that identifies a node in its schedule, also after remove_copies() has changed the source of its send."""
    return node.op_index, node.transfer, node.is_send, node.sequence
