"""A schedule's tasks on streams: kernel launches and NCCL groups, each on a queue, and the events between queues.

A queue is a stream, whose work runs in order. An event makes one queue wait for a point on another. Both are data here,
derived from the schedule's dependencies without a GPU library, so tests need no GPU.

Transfers with Schedule.staged_peers go through host memory, on two queues of their own: OUT copies codes to the host,
IN copies them to the device. So a copy waits neither for NCCL nor for another message.

Program order within a queue is never changed: NCCL needs the same order of groups on all ranks. Every dependency
between queues follows from events and program order; redundant events are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qccl.base.dtypes import DType
from qccl.collectives.schedule import (
    Commit,
    Decode,
    Encode,
    Exchange,
    Op,
    Queue,
    Reduce,
    Schedule,
    Span,
    Task,
    accesses,
    dependencies,
    tasks,
)

__all__ = ["HOME", "StreamTask", "stream_tasks"]

#: the queue on which a run begins and ends
HOME = Queue.COMPUTE


@dataclass(frozen=True, slots=True)
class StreamTask:
    """One launch (Encodes, Decodes or Reduces), one group of transfers, or an end of the run.

    Attributes:
        queue: the task's stream.
        ops: the numbers of the task's operations in the schedule; () for the first and the last task. Several tasks may
            share an Exchange.
        waits: the tasks of other queues whose events the task waits for.
        records: an event is recorded after the task, because a later task or the caller waits for it.
        exchange: the transfers of an Exchange that go on this queue.
    """

    queue: Queue
    ops: tuple[int, ...]
    waits: tuple[int, ...]
    records: bool
    exchange: Exchange | None = None


def stream_tasks(schedule: Schedule) -> tuple[StreamTask, ...]:
    """Make the tasks of a run, in the order in which they are put on their streams.

    The first and the last have no operations. The first stands for the work before the run: the caller's data, and the
    previous run, which used the same workspace. The last is complete when all others are.
    """
    program = tuple(_tasks(schedule))
    needed = dependencies(program)
    batches = _batches(schedule, program, needed)
    task_of = {i: s for s, batch in enumerate(batches, 1) for i in batch}
    queues = [HOME, *(program[batch[0]].queue for batch in batches), HOME]
    required = [set[int]()]
    required += [{0} | {task_of[j] for i in batch for j in needed[i]} for batch in batches]
    required.append(set(range(len(queues) - 1)))
    waits = _events(queues, required)
    recorded = {task for each in waits for task in each} | {len(queues) - 1}
    ops = [(), *(tuple(program[i].op_index for i in batch) for batch in batches), ()]
    moved = [None, *(_exchange(program[batch[0]]) for batch in batches), None]
    return tuple(StreamTask(queues[s], ops[s], waits[s], s in recorded, moved[s]) for s in range(len(queues)))


@dataclass(slots=True)
class _Half(Task):
    """The sends of an Exchange to staged peers, or its receives from them; ``op`` has no other transfers."""

    @property
    def queue(self) -> Queue:
        return Queue.OUT if isinstance(self.op, Exchange) and self.op.sends else Queue.IN


def _tasks(schedule: Schedule) -> Iterator[Task]:
    """Yield the operations, with each Exchange divided by queue.

    Sends precede the receives of the same Exchange. So no wait precedes the work that it waits for on another rank,
    even if the hardware maps several streams to one queue.
    """
    for task in tasks(schedule, per_transfer=False):
        if not (schedule.staged_peers and isinstance(task.op, Exchange)):
            yield task
            continue
        near, far = _parted(task.op, schedule.staged_peers)
        for kind, part in ((_Half, Exchange(far.sends, ())), (Task, near), (_Half, Exchange((), far.recvs))):
            if part.sends or part.recvs:
                yield kind(task.op_index, part, *accesses(part))


def _parted(op: Exchange, staged_peers: Collection[int]) -> tuple[Exchange, Exchange]:
    """Divide an Exchange into the transfers with other peers, and the transfers with staged peers."""

    def chosen(far: bool) -> Exchange:
        sends, recvs = (
            tuple(transfer for transfer in transfers if (transfer.peer in staged_peers) == far)
            for transfers in (op.sends, op.recvs)
        )
        return Exchange(sends, recvs)

    return chosen(False), chosen(True)


def _exchange(task: Task) -> Exchange | None:
    return task.op if isinstance(task.op, Exchange) else None


def _batches(schedule: Schedule, program: Sequence[Task], needed: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Group neighbouring operations that share a launch.

    They are of one kind, independent of each other, and wait for the same operation of another queue, so a chunk that
    has arrived does not wait for the next one.
    """
    batches: list[list[int]] = []
    last: object = None
    for i, task in enumerate(program):
        kind = _kind(schedule, task.op)
        if kind is not None:
            kind = kind, max((j for j in needed[i] if program[j].queue is not task.queue), default=None)
        if kind is not None and kind == last and not set(needed[i]) & set(batches[-1]):
            batches[-1].append(i)
        else:
            batches.append([i])
        last = kind
    return [tuple(batch) for batch in batches]


def _kind(schedule: Schedule, op: Op) -> object:
    """A key that operations of one launch have in common; None for operations that never share one."""

    def dtype(*spans: Span | None) -> DType | None:
        return next((schedule.buffers[span.buffer].dtype for span in spans if span is not None), None)

    match op:
        case Encode(codec, src):
            return Encode, codec, dtype(src), op.round
        case Decode(codec, _, dst, accumulate):
            return Decode, codec, dtype(dst), accumulate
        case Reduce(codec, srcs, own, own_index, wire, out):
            shape = (len(srcs), own is None, own_index, wire is None, out is None, op.op, op.scale, op.round)
            state = op.state and (
                *(each and each.dtype for each in (op.state.residual, op.state.momentum)),
                op.state.mu,
            )
            return Reduce, codec, dtype(own, out), shape, state
        case Commit() | Exchange():
            return None


def _events(queues: Sequence[Queue], required: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """Find for each task the tasks of other queues that it must wait for, without implied ones.

    Each task has a vector clock: the last task of each queue that is complete before it. The clock follows from its
    predecessor on its own queue and from the tasks it waits for. Earlier tasks are implied.
    """
    known: list[Mapping[Queue, int]] = []
    latest: dict[Queue, int] = {}
    result = []
    for task, queue in enumerate(queues):
        clock = dict(known[latest[queue]]) if queue in latest else {}
        furthest: dict[Queue, int] = {}
        for other in required[task]:
            if queues[other] is not queue:
                furthest[queues[other]] = max(other, furthest.get(queues[other], -1))
        waits = []
        for other in sorted(furthest.values(), reverse=True):  # only a later task can imply another
            if clock.get(queues[other], -1) < other:
                waits.append(other)
                for each, reached in known[other].items():
                    clock[each] = max(reached, clock.get(each, -1))
        clock[queue] = task
        latest[queue] = task
        known.append(clock)
        result.append(tuple(sorted(waits)))
    return result
