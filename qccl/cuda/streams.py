"""What a schedule becomes on streams: launches and groups, each on a lane, and the few events between the lanes.

A lane is a stream: what is put on it runs in the order in which it was put there. An event makes one lane wait for a
point on another. Both are data here, derived from the schedule's dependencies with no GPU library in sight, so that
what the CUDA engine will do can be tested anywhere.

Transfers to and from Schedule.staged_peers go through host memory, on two queues of their own: one copies what is sent
to the host, the other copies what has come to the device. So a copy waits neither for NCCL nor for another message.

Two laws. Program order within a lane is never changed (on the communication lane it is part of correctness: NCCL needs
the same order of groups on all ranks). And every dependency between lanes is implied by an event and program order; an
event that others already imply is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qccl.dtypes import DType
from qccl.schedule import (
    Commit,
    Decode,
    Encode,
    Exchange,
    Node,
    Op,
    Queue,
    Reduce,
    Schedule,
    Span,
    dependencies,
    nodes,
)

__all__ = ["HOME", "Step", "queues_of", "steps"]

#: the lane that a run begins and ends on
HOME = Queue.COMPUTE


@dataclass(frozen=True, slots=True)
class Step:
    """One launch (Encodes, Decodes or Reduces), one group of transfers, or an end of the run.

    Attributes:
        lane: which stream it is put on.
        ops: the numbers of the schedule's operations that it does at once; none for the first and the last step.
            Several steps may share an Exchange.
        waits: the steps of other lanes whose events its lane must wait for before it.
        records: whether a later step, or the caller, waits for it: an event is recorded behind it.
        exchange: the transfers that it does: those of an Exchange that go on this lane.
    """

    queue: Queue
    ops: tuple[int, ...]
    waits: tuple[int, ...]
    records: bool
    exchange: Exchange | None = None


def steps(schedule: Schedule) -> tuple[Step, ...]:
    """The steps of a run in the order in which they are put on their lanes.

    The first has no operations and stands for everything that came before the run (the caller's data, and the last
    run, which used the same workspace); the last likewise has none, and is complete when everything is.
    """
    program = tuple(_nodes(schedule))
    needed = dependencies(program)
    batches = _batches(schedule, program, needed)
    step_of = {i: s for s, batch in enumerate(batches, 1) for i in batch}
    queues = [HOME, *(program[batch[0]].queue for batch in batches), HOME]
    required = [set[int]()]
    required += [{0} | {step_of[j] for i in batch for j in needed[i]} for batch in batches]
    required.append(set(range(len(queues) - 1)))
    waits = _events(queues, required)
    recorded = {step for each in waits for step in each} | {len(queues) - 1}
    ops = [(), *(tuple(program[i].op_index for i in batch) for batch in batches), ()]
    moved = [None, *(_exchange(program[batch[0]]) for batch in batches), None]
    return tuple(Step(queues[s], ops[s], waits[s], s in recorded, moved[s]) for s in range(len(queues)))


def queues_of(program: Sequence[Step]) -> tuple[Queue, ...]:
    """The lanes that have steps, the home lane first."""
    return tuple(dict.fromkeys(step.queue for step in program))


@dataclass(frozen=True, slots=True)
class _Half(Node):
    """The legs of an Exchange to distant peers, or those from them: ``op`` has these alone."""

    @property
    def queue(self) -> Queue:
        return Queue.OUT if isinstance(self.op, Exchange) and self.op.sends else Queue.IN


def _nodes(schedule: Schedule) -> Iterator[Node]:
    """The operations, with each Exchange in as many parts as it needs lanes.

    What goes out comes before what the same Exchange waits for: put on the device in this order, no wait stands before
    what it waits for on another rank, even where the hardware runs several streams as one.
    """
    for node in nodes(schedule, per_transfer=False):
        if not (schedule.staged_peers and isinstance(node.op, Exchange)):
            yield node
            continue
        near, far = _parted(node.op, schedule.staged_peers)
        if far.sends:
            yield _Half(node.op_index, Exchange(far.sends, ()))
        if near.sends or near.recvs:
            yield Node(node.op_index, near)
        if far.recvs:
            yield _Half(node.op_index, Exchange((), far.recvs))


def _parted(op: Exchange, staged_peers: Collection[int]) -> tuple[Exchange, Exchange]:
    """The legs with near peers, and those with distant ones."""

    def chosen(far: bool) -> Exchange:
        sends, recvs = (
            tuple(transfer for transfer in transfers if (transfer.peer in staged_peers) == far)
            for transfers in (op.sends, op.recvs)
        )
        return Exchange(sends, recvs)

    return chosen(False), chosen(True)


def _exchange(node: Node) -> Exchange | None:
    return node.op if isinstance(node.op, Exchange) else None


def _batches(schedule: Schedule, program: Sequence[Node], needed: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Runs of neighbouring operations that one launch can do.

    They are alike, independent of each other, and wait for the same operation of another lane: a chunk that is here
    does not wait for the next one.
    """
    batches: list[list[int]] = []
    last: object = None
    for i, node in enumerate(program):
        kind = _kind(schedule, node.op)
        if kind is not None:
            kind = kind, max((j for j in needed[i] if program[j].queue is not node.queue), default=None)
        if kind is not None and kind == last and not set(needed[i]) & set(batches[-1]):
            batches[-1].append(i)
        else:
            batches.append([i])
        last = kind
    return [tuple(batch) for batch in batches]


def _kind(schedule: Schedule, op: Op) -> object:
    """What operations must have in common to share a launch; None for those that never do."""

    def dtype(*spans: Span | None) -> DType | None:
        return next((schedule.buffers[span.buffer].dtype for span in spans if span is not None), None)

    match op:
        case Encode(codec, src):
            return Encode, codec, dtype(src), op.round
        case Decode(codec, _, dst, accumulate):
            return Decode, codec, dtype(dst), accumulate
        case Reduce(codec, srcs, own, own_index, wire, out):
            shape = (len(srcs), own is None, own_index, wire is None, out is None, op.op, op.scale, op.round)
            state = op.state and (op.state.residual is None, op.state.momentum is None, op.state.mu)
            return Reduce, codec, dtype(own, out), shape, state
        case Commit() | Exchange():
            return None


def _events(queues: Sequence[Queue], required: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """For each step the steps of other lanes that it must wait for, without those that are implied.

    A step knows of each lane how far it has come for certain (a vector clock): from its predecessor on its own lane,
    and from the steps it waits for. What it requires within that is implied.
    """
    known: list[Mapping[Queue, int]] = []
    latest: dict[Queue, int] = {}
    result = []
    for step, queue in enumerate(queues):
        clock = dict(known[latest[queue]]) if queue in latest else {}
        furthest: dict[Queue, int] = {}
        for other in required[step]:
            if queues[other] is not queue:
                furthest[queues[other]] = max(other, furthest.get(queues[other], -1))
        waits = []
        for other in sorted(furthest.values(), reverse=True):  # only a later step can imply another
            if clock.get(queues[other], -1) < other:
                waits.append(other)
                for each, reached in known[other].items():
                    clock[each] = max(reached, clock.get(each, -1))
        clock[queue] = step
        latest[queue] = step
        known.append(clock)
        result.append(tuple(sorted(waits)))
    return result
