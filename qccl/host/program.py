"""A schedule made ready for the host, and one run of it.

A Program has everything that can be done beforehand: the workspace, and the steps (kernels/engine/steps.h): the kernel
calls bound to their addresses, the transfers, and what waits for what. How they are run is native code, too
(kernels/engine/run.h, loop.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qccl import _host
from qccl.dtypes import FLOAT32
from qccl.engine.control import Block, Header, data_nbytes_of, disagreement
from qccl.engine.labels import Label, labels
from qccl.errors import ArgumentError, EngineError, MismatchError, QcclError
from qccl.host.zero_copy import direct
from qccl.schedule import Commit, Decode, Encode, Node, Reduce, Role, Schedule, Span, StateBuffer, Transfer, nodes

if TYPE_CHECKING:
    from qccl.host.engine import HostEngine
    from qccl.trace import TraceEvent
    from qccl.transports.base import Transport

__all__ = ["Execution", "Program"]

_ALIGNMENT = 64
#: bytes of values that are sent from where they lie; fewer are copied, which costs less than a microsecond
_LEAST_DIRECT = 16 << 10
_OPS = {"sum": 0, "min": 1, "max": 2}


class Program:
    """A compiled schedule with its workspace; one run at a time.

    Attributes:
        workspace_nbytes: bytes of the workspace.
        extents: of the caller's memory, first address, end, and whether it is written.
    """

    def __init__(self, engine: HostEngine, schedule: Schedule, transport: Transport) -> None:
        if (schedule.rank, schedule.size) != (transport.rank, transport.size):
            raise ArgumentError(
                f"the schedule is for rank {schedule.rank} of {schedule.size}, and this is rank {transport.rank} of "
                f"{transport.size}"
            )
        self.engine = engine
        self.running = False
        self._numbers = {name: i for i, name in enumerate(schedule.buffers)}
        self._callers = {n: buffer for n, buffer in schedule.buffers.items() if buffer.role is not Role.WORK}
        self._bindings: dict[str, int] | None = None
        self.extents: tuple[tuple[int, int, bool], ...] = ()
        self._memory = _host.Memory(len(self._numbers))
        self._memory.threads = engine.threads
        self._workspace = self._allocate(schedule)
        self.workspace_nbytes = self._workspace.nbytes
        self._least = max(_LEAST_DIRECT, transport.eager_nbytes + 1)
        # not kept: they are most of what a long schedule takes
        every, needs = direct(tuple(nodes(schedule, per_transfer=True)), self._least)
        self.steps = _host.Steps(schedule.rank, schedule.size, transport.eager_nbytes)
        self._direct: list[tuple[int, str, int]] = []  # sends from the caller's memory: buffer and offset
        for node, needed in zip(every, needs, strict=True):
            if node.transfer is None:
                writes_output = any(schedule.buffers[span.buffer].role is Role.OUTPUT for span in node.writes())
                self.steps.add_operation(self._operation(node, schedule), needed, writes_output)
            else:
                self._add_transfer(node, node.transfer, needed, schedule)
        self.steps.link()
        self.run = _host.Run(self.steps)

    def start(
        self,
        bindings: Mapping[str, int],
        *,
        call: int,
        header: Header,
        deadline: float,
        trace: list[TraceEvent] | None = None,
        schedule: Schedule | None = None,
        streams: Sequence[int] = (),
        lr: float = 1.0,
    ) -> Execution:
        """Begin a run.

        Args:
            bindings: address of each of the caller's buffers, by its name in the schedule.
            call: the counter that keys the random numbers.
            header: what the ranks must agree on; its sequence number is the next one of the group.
            deadline: in time.monotonic() seconds.
            trace: a list that gets an event per node.
            schedule: with trace, the one that the program was made of, which is not kept.
            streams: none; the host has no streams.
            lr: the learning rate that residuals count by.

        Failures of the group come from the Execution. Raises ArgumentError for a run that cannot be begun.
        """
        if self.running:
            raise ArgumentError("this program is still running; a program has one workspace, so wait for it first")
        self._bind(bindings)
        self._memory.call, self._memory.lr = call, lr
        said = [] if trace is None or schedule is None else self._labels(schedule)
        execution = Execution(self, header, deadline, trace, said)
        self.engine.start(execution)
        return execution

    def _labels(self, schedule: Schedule) -> list[Label]:
        """The label of each step in a trace."""
        every = tuple(nodes(schedule, per_transfer=True))
        said = dict(zip(map(_identity, every), labels(every, schedule.buffers), strict=True))
        kept, _ = direct(every, self._least)
        return [said[_identity(node)] for node in kept]

    def _bind(self, bindings: Mapping[str, int]) -> None:
        """Enter the caller's addresses, unless they are those of the last run."""
        if bindings == self._bindings:
            return
        if bindings.keys() != self._callers.keys():
            raise ArgumentError(f"addresses are needed for {sorted(self._callers)}, not for {sorted(bindings)}")
        for name in self._callers:
            self._memory[self._numbers[name]] = bindings[name]
        self._bindings = dict(bindings)
        for step, name, offset in self._direct:
            self.steps.place(step, self._memory[self._numbers[name]] + offset)
        extents = []
        for name, buffer in self._callers.items():
            extents.append((bindings[name], bindings[name] + buffer.nbytes, buffer.role in (Role.OUTPUT, Role.STATE)))
        self.extents = tuple(extents)

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
            def places(state_buffers: StateBuffer | None) -> Any:
                return None if state_buffers is None else (at(state_buffers.old), at(state_buffers.new))

            return (
                (None, None, 0.0)
                if op.state is None
                else (places(op.state.residual), places(op.state.momentum), op.state.mu)
            )

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
            raise EngineError(f"operation {node.op_index} transfers {span.buffer!r}; legs must be in work buffers")
        address = self._memory[self._numbers[span.buffer]] + span.start * buffer.itemsize
        if node.place is not None:
            offset = node.place.start * schedule.buffers[node.place.buffer].itemsize
            self._direct.append((len(self.steps), node.place.buffer, offset))
        tag = 1 + node.sequence % _host.TAGS_PER_RUN
        self.steps.add_transfer(node.is_send, transfer.peer, tag, address, len(span) * buffer.itemsize, needed)


def _identity(node: Node) -> tuple[int, Transfer | None, bool, int]:
    """A key that identifies a node in its schedule, also after direct() has changed the source of its send."""
    return node.op_index, node.transfer, node.is_send, node.sequence


class Execution:
    """One run of a Program. ``done`` turns true when it has ended well; failures are raised by step() and run().

    Attributes:
        sequence, deadline: as given to Program.start.
        begun: it is not lined up any more.
        detached: the run progresses without its caller.
    """

    __slots__ = (
        "_extents",
        "_header",
        "_labels",
        "_program",
        "_trace",
        "begun",
        "deadline",
        "detached",
        "done",
        "kept",
        "sequence",
    )

    is_ordered = False

    def __init__(
        self,
        program: Program,
        header: Header,
        deadline: float,
        trace: list[TraceEvent] | None = None,
        labels: Sequence[Label] = (),
    ) -> None:
        self.kept: object = None
        self._program = program
        self._header = header
        self._extents = program.extents
        self._trace, self._labels = trace, labels
        self.sequence = header.sequence
        self.deadline = deadline
        self.begun = self.done = self.detached = False
        program.running = True

    def step(self) -> bool:
        """Advance all that is under way on the engine a little; whether this run is done. Never blocks for long."""
        if not self.done:
            try:
                self._program.engine.step()
            except QcclError:
                self._unless_done()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        """Advance all that is under way until this run is done; raises CollectiveTimeout at its deadline."""
        try:
            self._program.engine.run(self, math.inf if limit is None else limit)
        except QcclError:
            self._unless_done()
        return self.done

    def _unless_done(self) -> None:
        """Raise the failure being handled, unless this run ended before it: the next call raises it."""
        if not self.done:
            raise

    def detach(self, *, at_once: bool) -> None:
        """Let this run progress without its caller: at once, or if he does not wait for it within a moment."""
        self._program.engine.detach(self, at_once=at_once)

    def order(self) -> None:
        """Nothing: there are no streams."""

    @property
    def what(self) -> str:
        """The call, for messages."""
        return f"{self._header.text} (call {self.sequence} of the group)"

    def waits_for(self) -> str:
        """Why this run is not done, for messages."""
        if not self.begun:
            return "it is lined up behind calls that have not ended"
        run = self._program.run
        if unheard := run.unheard():
            return f"rank {', '.join(map(str, unheard))} did not make this call"
        waits = [(run.waits_for(True), "send to"), (run.waits_for(False), "receive from")]
        if parts := [f"{verb} rank {', '.join(map(str, ranks))}" for ranks, verb in waits if ranks]:
            return f"waiting to {' and to '.join(parts)}"
        return "every rank has made this call, and this rank is not done with its own part"

    def conflicts(self, other: Execution) -> bool:
        """Whether one of the two writes memory of the caller's that the other reads or writes."""
        for start, stop, written in self._extents:
            for first, end, also_written in other._extents:
                if start < end and first < stop and (written or also_written):
                    return True
        return False

    # -- used by the engine ------------------------------------------------------------------------------------------

    def begin(self, loop: _host.Loop, unusual: Callable[[int, bytes], None]) -> None:
        """Send the header and start everything that depends on nothing."""
        self.begun = True
        header = self._header
        headers = [header.pack(peer) for peer in range(loop.size)] if header.pairs else [header.pack()]
        loop.begin(self._program.run, headers, self.sequence, self.deadline, self._trace is not None, unusual)

    def unheard(self) -> list[int]:
        """The ranks whose header has not come yet."""
        return self._program.run.unheard()

    def disagreement(self, peer: int, message: bytes) -> MismatchError:
        """The error for ``peer``'s header, which is not as this rank expects it."""
        mine = self._header.pack(peer)
        if not message.startswith(mine):
            return disagreement(mine, message, self._program.engine.rank, peer)
        expected = self._program.run.data_nbytes(peer) or "none"
        return MismatchError(
            f"rank {peer} sent {data_nbytes_of(message)} bytes with the header of a call, expected are {expected}"
        )

    def end(self) -> None:
        """The run has completed, or failed."""
        self._program.running = False
        if self._trace is not None:
            from qccl.trace import TraceEvent

            rank = self._program.engine.rank
            for i, start, stop in self._program.run.trace():
                queue, name, args = self._labels[i]
                args = {**args, "call": self.sequence}
                self._trace.append(TraceEvent(rank, queue, name, start, stop, args))
