"""A schedule made ready for the host, and one run of it.

A Program has everything that can be done beforehand: the workspace, the kernel calls bound to their addresses, the
transport's buffers, and the dependencies as counts and lists of successors. An Execution adds two small lists: how many
dependencies each node still has, and a heap of the compute operations that are ready, in program order.

Dependencies hold per leg, not per Exchange: a leg whose data is ready does not wait for its neighbours. Gates hold back
what the ranks' agreement must come before:

- A receive is posted when its sender's header has come and agrees, so that the sizes are equal (an MPI library may
  write past the end of a receive that is too small). The header comes before the data, so this costs no waiting. Where
  the first data for a peer is small and waits for nobody, it is in the header's own message (an eager leg).
- Whatever writes the caller's output or follows a transfer waits for the headers of all ranks. So nothing received is
  used before, and a rank that has not made the call yet gets one window of messages at most (a library that buffers
  small ones would take them until it has no memory left for the news that this rank gave up).
"""

from __future__ import annotations

import ctypes
import math
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from qccl.dtypes import FLOAT32
from qccl.engines.agreement import (
    CONTROL_TAG,
    HEADER_NBYTES,
    Block,
    Header,
    data_nbytes,
    disagreement,
)
from qccl.errors import ArgumentError, EngineError, MismatchError
from qccl.schedule import Carried, Commit, Decode, Encode, Node, Reduce, Role, Schedule, Span, dependencies, nodes

if TYPE_CHECKING:
    from qccl.engines.host import HostEngine
    from qccl.trace import TraceEvent
    from qccl.transports.base import Transport

__all__ = ["CALLS_IN_FLIGHT", "Eager", "Execution", "Leg", "Program"]

#: calls that may have messages under way at once, so that their tags differ
CALLS_IN_FLIGHT = 16
_TAGS_PER_CALL = 1024
_ALIGNMENT = 64
_OPS = {"sum": 0, "min": 1, "max": 2}


@dataclass(frozen=True, slots=True)
class Leg:
    """A transfer made ready; ``tag`` is counted from the first tag of the call."""

    start: Callable[[int, int, Any, Hashable], None]
    peer: int
    tag: int
    buffer: Any
    address: int
    nbytes: int


class Eager:
    """A control message with data: ``nbytes`` from ``source``, for one peer or several."""

    __slots__ = ("_block", "_sequence", "_source", "buffer", "nbytes")

    def __init__(self, transport: Transport, source: int, nbytes: int) -> None:
        self._source, self.nbytes = source, nbytes
        self._block = Block(HEADER_NBYTES + nbytes)
        self.buffer = transport.buffer(self._block.address, HEADER_NBYTES + nbytes)
        self._sequence = -1

    def fill(self, packed: bytes, sequence: int) -> None:
        """Put the header of a call and its data into the message, once for all peers."""
        if sequence != self._sequence:
            self._sequence = sequence
            self._block.write(packed + data_nbytes(self.nbytes))
            ctypes.memmove(self._block.address + HEADER_NBYTES, self._source, self.nbytes)


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
        from qccl import _host
        from qccl.engines.onestep import OneStep

        self.engine = engine
        self.transport = transport
        self.running = False
        every = tuple(nodes(schedule, per_leg=True))  # not kept: they are most of what a long schedule takes
        self._numbers = {name: i for i, name in enumerate(schedule.buffers)}
        self._callers = {n: buffer for n, buffer in schedule.buffers.items() if buffer.role is not Role.WORK}
        self._bindings: dict[str, int] | None = None
        self.extents: tuple[tuple[int, int, bool], ...] = ()
        self.memory = _host.Memory(len(self._numbers))
        self.memory.threads = engine.threads
        self._workspace = self._allocate(schedule)
        self.workspace_nbytes = self._workspace.nbytes
        self.kernels: list[Callable[[], None] | None] = []
        self.legs: list[Leg | None] = []
        self._buffers: dict[tuple[int, int], Any] = {}  # of the transport; chunks take turns in the same slots
        for node in every:
            is_leg = node.leg is not None
            self.kernels.append(None if is_leg else self._kernel(node, schedule))
            self.legs.append(self._leg(node, schedule) if is_leg else None)
        self.header = Block(HEADER_NBYTES)
        self.header_buffer = transport.buffer(self.header.address, HEADER_NBYTES)
        self._headers: dict[int, tuple[Block, Any]] = {}  # of calls in which they differ, by peer
        self._link(schedule, every)
        waiting = self._waiting()
        #: sends whose data goes with the header (unless headers differ), their peers, and those that get a header alone
        self.eager = self._eager_sends(every, waiting)
        self.with_data = {self.legs[i].peer for i in self.eager}  # type: ignore[union-attr]
        self.bare_peers = tuple(p for p in range(schedule.size) if p != schedule.rank and p not in self.with_data)
        #: by peer, the receive whose data may come with the header
        self.first_data = {
            leg.peer: i
            for i, (leg, node) in enumerate(zip(self.legs, every, strict=True))
            if leg is not None and not node.is_send and not node.sequence
        }
        #: all nodes; among several ranks also the gate and the headers without data
        self.total = self.gate + (1 + len(self.bare_peers) if schedule.size > 1 else 0)
        self.one_step = OneStep.of(self, every, waiting)
        kinds = {type(node.op): type(node.op).__name__.lower() for node in every}
        self._kinds = tuple(kinds[type(node.op)] for node in every)
        self._op_indices = array("I", (node.op_index for node in every))

    def start(
        self,
        bindings: Mapping[str, int],
        *,
        call: int,
        header: Header,
        deadline: float,
        trace: list[TraceEvent] | None = None,
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
            streams: none; the host has no streams.
            lr: the learning rate that residuals count by.

        Failures of the group come from the Execution. Raises ArgumentError for a run that cannot be begun.
        """
        if self.running:
            raise ArgumentError("this program is still running; a program has one workspace, so wait for it first")
        from qccl.engines.onestep import OneStepExecution

        self._bind(bindings)
        self.memory.call, self.memory.lr = call, lr
        execution: Execution
        if trace is not None:
            execution = _TracedExecution(self, header, deadline, trace)
        elif self.one_step is not None and not header.pairs:
            execution = OneStepExecution(self, header, deadline, self.one_step)
        else:
            execution = Execution(self, header, deadline)
        self.engine.start(execution)
        return execution

    def header_to(self, peer: int, packed: bytes) -> Any:
        """The transport's buffer of a header that goes to ``peer`` alone."""
        if peer not in self._headers:
            block = Block(HEADER_NBYTES)
            self._headers[peer] = block, self.transport.buffer(block.address, HEADER_NBYTES)
        block, buffer = self._headers[peer]
        block.write(packed)
        return buffer

    def label(self, node: int) -> tuple[str, str]:
        """Lane and name of a node in a trace."""
        leg, index = self.legs[node], self._op_indices[node]
        if leg is None:
            return "compute", f"{self._kinds[node]} {index}"
        if leg.start == self.transport.send:
            return "send", f"send {index} to {leg.peer}"
        return "recv", f"recv {index} from {leg.peer}"

    def _bind(self, bindings: Mapping[str, int]) -> None:
        """Enter the caller's addresses, unless they are those of the last run."""
        if bindings == self._bindings:
            return
        if bindings.keys() != self._callers.keys():
            raise ArgumentError(f"addresses are needed for {sorted(self._callers)}, not for {sorted(bindings)}")
        for name in self._callers:
            self.memory[self._numbers[name]] = bindings[name]
        self._bindings = dict(bindings)
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
            self.memory[self._numbers[name]] = block.address + offset
        return block

    def _kernel(self, node: Node, schedule: Schedule) -> Callable[[], None]:
        from qccl import _host

        def at(span: Span) -> tuple[int, int]:
            return self._numbers[span.buffer], span.start * schedule.buffers[span.buffer].itemsize

        def code(span: Span) -> int:
            dtype = schedule.buffers[span.buffer].dtype
            if dtype is None:
                raise EngineError(f"operation {node.op_index} takes values from {span.buffer!r}, a buffer of bytes")
            return dtype.code

        def state(op: Reduce) -> tuple[Any, Any, float]:
            def places(carried: Carried | None) -> Any:
                return None if carried is None else (at(carried.old), at(carried.new))

            return (
                (None, None, 0.0)
                if op.state is None
                else (places(op.state.residual), places(op.state.momentum), op.state.mu)
            )

        memory, rank = self.memory, schedule.rank
        kernel: Callable[[], None]
        match node.op:
            case Encode(codec, src, wire, index, round_):
                kernel = _host.Encode(memory, codec.host(), code(src), at(src), at(wire), len(src), index, round_, rank)
            case Decode(codec, wire, dst, accumulate, index, round_, maker):
                kernel = _host.Decode(
                    memory, codec.host(), code(dst), at(wire), at(dst), len(dst), accumulate, index, round_, maker
                )
            case Reduce() as op:
                values = op.own if op.own is not None else op.out
                if values is None:
                    raise EngineError(f"operation {node.op_index} is a Reduce with neither own values nor an output")
                kernel = _host.Reduce(
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
            case Commit(guard, carried):
                copies = [(at(each.new), at(each.old), len(each.new) * FLOAT32.itemsize) for each in carried]
                kernel = _host.Commit(memory, [(code(span), at(span), len(span)) for span in guard], copies)
            case _:
                raise EngineError(f"the host engine cannot run {type(node.op).__name__} (operation {node.op_index})")
        return kernel

    def _leg(self, node: Node, schedule: Schedule) -> Leg:
        assert node.leg is not None
        span = node.leg.span
        buffer = schedule.buffers[span.buffer]
        if buffer.role is not Role.WORK:
            raise EngineError(f"operation {node.op_index} transfers {span.buffer!r}; legs must be in work buffers")
        address = self.memory[self._numbers[span.buffer]] + span.start * buffer.itemsize
        nbytes = len(span) * buffer.itemsize
        start = self.transport.send if node.is_send else self.transport.receive
        prepared = self._buffers.get((address, nbytes))
        if prepared is None:
            prepared = self._buffers[address, nbytes] = self.transport.buffer(address, nbytes)
        return Leg(start, node.leg.peer, 1 + node.sequence % _TAGS_PER_CALL, prepared, address, nbytes)

    def _link(self, schedule: Schedule, every: Sequence[Node]) -> None:
        """Counts of dependencies and lists of successors, with the two kinds of gate (see above)."""
        self.gate = len(every)
        successors: list[list[int]] = [[] for _ in range(self.gate + 2)]
        by_peer: list[list[int]] = [[] for _ in range(schedule.size)]
        counts = []
        for i, (node, needed) in enumerate(zip(every, dependencies(every), strict=True)):
            for j in needed:
                successors[j].append(i)
            follows_leg = any(self.legs[j] is not None for j in needed)
            writes_output = any(schedule.buffers[span.buffer].role is Role.OUTPUT for span in node.writes())
            gates: list[list[int]] = []
            if schedule.size > 1 and (follows_leg or writes_output):
                gates = [successors[self.gate]]
            elif node.leg is not None and not node.is_send:
                gates = [by_peer[node.leg.peer]]
            for gate in gates:
                gate.append(i)
            counts.append(len(needed) + len(gates))
        self.first_receives = [tuple(nodes) for nodes in by_peer]
        self.successors = [tuple(s) for s in successors]
        self.counts = [*counts, 0, 0]  # and of the gate and the headers, which nothing counts down
        self.first = tuple(i for i, count in enumerate(counts) if not count)

    def _waiting(self) -> set[int]:
        """The nodes that may have to wait for another rank."""
        found = set(self.successors[self.gate])
        for i, leg in enumerate(self.legs):
            if i in found or leg is not None:
                found.update(self.successors[i])
        return found

    def _eager_sends(self, every: Sequence[Node], waiting: set[int]) -> dict[int, Eager]:
        """The first send to each peer, where it is small and waits for no other rank."""
        most = self.transport.eager_nbytes
        found: dict[int, Eager] = {}
        messages: dict[int, Eager] = {}  # by address: the same data may go to several peers
        for i, (leg, node) in enumerate(zip(self.legs, every, strict=True)):
            if leg is None or not node.is_send or node.sequence or i in waiting or leg.nbytes > most:
                continue
            message = messages.get(leg.address)
            if message is None or message.nbytes != leg.nbytes:
                message = messages[leg.address] = Eager(self.transport, leg.address, leg.nbytes)
            found[i] = message
        return found


class Execution:
    """One run of a Program. ``done`` turns true when it has ended well; failures are raised by step() and run().

    Attributes:
        sequence, deadline: as given to Program.start.
        begun: it is not lined up any more.
        ready: heap of the compute nodes that may run.
        unheard: the ranks whose header has not come yet.
        detached: the run progresses without its caller.
    """

    __slots__ = (
        "_base",
        "_counts",
        "_data",
        "_eager",
        "_extents",
        "_header",
        "_kernels",
        "_left",
        "_legs",
        "_packed",
        "_program",
        "_successors",
        "begun",
        "deadline",
        "detached",
        "done",
        "kept",
        "ready",
        "sequence",
        "unheard",
    )

    is_ordered = False

    def __init__(self, program: Program, header: Header, deadline: float) -> None:
        self.kept: object = None
        self._program = program
        self._kernels, self._legs, self._successors = program.kernels, program.legs, program.successors
        self._eager = {} if header.pairs else program.eager  # whose messages may be for several peers
        self._data: dict[int, bytes] = {}  # that came with headers, by the receive it is for
        self._extents = program.extents
        self._header = header
        self._packed = header.pack()
        self.sequence = header.sequence
        self._base = header.sequence % CALLS_IN_FLIGHT * _TAGS_PER_CALL
        self.deadline = deadline
        self.begun = self.done = self.detached = False
        self.ready: list[int] = []
        self.unheard: set[int] = set()
        self._counts = program.counts.copy()
        self._left = program.total + (len(program.with_data) if header.pairs else 0)
        program.running = True

    def step(self) -> bool:
        """Advance all that is under way on the engine a little; whether this run is done. Never blocks for long."""
        if not self.done:
            self._program.engine.step()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        """Advance all that is under way until this run is done; raises CollectiveTimeout at its deadline."""
        self._program.engine.run(self, math.inf if limit is None else limit)
        return self.done

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
        if self.unheard:
            return f"rank {', '.join(map(str, sorted(self.unheard)))} did not make this call"
        counts, send = self._counts, self._program.transport.send
        posted = [leg for i, leg in enumerate(self._legs) if leg is not None and counts[i] == 0]
        sends = sorted({leg.peer for leg in posted if leg.start == send})
        receives = sorted({leg.peer for leg in posted if leg.start != send})
        return f"waiting to send to ranks {sends} and to receive from ranks {receives}"

    def conflicts(self, other: Execution) -> bool:
        """Whether one of the two writes memory of the caller's that the other reads or writes."""
        for start, stop, written in self._extents:
            for first, end, also_written in other._extents:
                if start < end and first < stop and (written or also_written):
                    return True
        return False

    # -- used by the engine ------------------------------------------------------------------------------------------

    def begin(self, peers: tuple[int, ...]) -> None:
        """Send the header and start everything that depends on nothing."""
        program = self._program
        self.begun = True
        self.unheard = set(peers)
        token = (self, program.gate + 1)
        if self._header.pairs:
            for peer in peers:
                buffer = program.header_to(peer, self._header.pack(peer) + data_nbytes(0))
                program.transport.send(peer, CONTROL_TAG, buffer, token)
        elif program.bare_peers:
            program.header.write(self._packed + data_nbytes(0))
            for peer in program.bare_peers:
                program.transport.send(peer, CONTROL_TAG, program.header_buffer, token)
        for node in program.first:
            self._launch(node)
        if not self._left:
            self._finish()

    def agree(self, peer: int, message: bytes) -> None:
        """Compare ``peer``'s header with the own one. Raises MismatchError."""
        mine = self._header.pack(peer) if self._header.pairs else self._packed
        if not message.startswith(mine):
            raise disagreement(mine, message, self._program.transport.rank, peer)
        self.unheard.discard(peer)
        if len(message) > HEADER_NBYTES:
            self._keep(peer, message[HEADER_NBYTES:])
        counts = self._counts
        for node in self._program.first_receives[peer]:
            counts[node] -= 1
            if not counts[node]:
                self._launch(node)
        if not self.unheard:
            self.completed(self._program.gate)

    def _keep(self, peer: int, data: bytes) -> None:
        """Data that came with ``peer``'s header, until it can be put where it belongs."""
        node = self._program.first_data.get(peer)
        leg = None if node is None else self._legs[node]
        if node is None or leg is None or leg.nbytes != len(data):
            expected = "none" if leg is None else leg.nbytes
            raise MismatchError(
                f"rank {peer} sent {len(data)} bytes with the header of a call, expected are {expected}"
            )
        self._data[node] = data

    def compute(self) -> None:
        """Run the first compute operation that is ready."""
        node = heappop(self.ready)
        self._kernels[node]()  # type: ignore[misc]
        self.completed(node)

    def completed(self, node: int) -> None:
        """Start what waited for ``node`` alone."""
        counts = self._counts
        for successor in self._successors[node]:
            left = counts[successor] - 1
            counts[successor] = left
            if not left:
                self._launch(successor)
        self._left -= 1
        counts[node] = -1
        if not self._left:
            self._finish()

    def _launch(self, node: int) -> None:
        leg = self._legs[node]
        if leg is None:
            heappush(self.ready, node)
        elif node in self._eager:
            message = self._eager[node]
            message.fill(self._packed, self.sequence)
            leg.start(leg.peer, CONTROL_TAG, message.buffer, (self, node))
        elif node in self._data:
            ctypes.memmove(leg.address, self._data.pop(node), leg.nbytes)
            self.completed(node)
        else:
            leg.start(leg.peer, self._base + leg.tag, leg.buffer, (self, node))

    def _finish(self) -> None:
        self.done = True
        self._program.running = False
        self._program.engine.finished(self)


class _TracedExecution(Execution):
    """An Execution that writes down when each node started and completed."""

    __slots__ = ("_started", "_trace")

    def __init__(self, program: Program, header: Header, deadline: float, trace: list[TraceEvent]) -> None:
        super().__init__(program, header, deadline)
        self._trace = trace
        self._started: dict[int, float] = {}

    def compute(self) -> None:
        self._started[self.ready[0]] = time.perf_counter()
        super().compute()

    def completed(self, node: int) -> None:
        from qccl.trace import TraceEvent

        start = self._started.pop(node, None)
        if start is not None:
            lane, name = self._program.label(node)
            self._trace.append(TraceEvent(self._program.transport.rank, lane, name, start, time.perf_counter()))
        super().completed(node)

    def _launch(self, node: int) -> None:
        if self._legs[node] is not None:
            self._started[node] = time.perf_counter()
        super()._launch(node)
