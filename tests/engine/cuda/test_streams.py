"""What the CUDA engine does with a schedule, as data: launches, groups, events, and what can overlap."""

from __future__ import annotations

import itertools

import pytest
from schedule_cases import one_rank

from qccl.base.dtypes import FLOAT32
from qccl.codecs import get
from qccl.collectives import spec_of_plan
from qccl.collectives.allreduce import one_shot, two_round
from qccl.collectives.schedule import (
    Buffer,
    Decode,
    Encode,
    Exchange,
    Queue,
    Reduce,
    Role,
    Schedule,
    Span,
    Task,
    Transfer,
    accesses,
    dependencies,
    tasks,
)
from qccl.engine.cuda.streams import HOME, StreamTask, stream_tasks

CODEC = get("minmax4:bucket=64")
CHUNK = 256
SIZES = range(2, 9)


def schedules(size, count):
    for make, in_place in itertools.product((two_round, one_shot), (False, True)):
        for rank in range(size):
            yield one_rank(make, rank, size, count, FLOAT32, CODEC, in_place=in_place, chunk_elements=CHUNK)


def predecessors(program: tuple[StreamTask, ...], leave_out: tuple[int, int] | None = None) -> list[set[int]]:
    """For each step all steps that are complete before it may start, by queues and events alone."""
    found: list[set[int]] = []
    latest: dict[Queue, int] = {}
    for number, step in enumerate(program):
        direct = {w for w in step.waits if (w, number) != leave_out}
        direct |= {latest[step.queue]} if step.queue in latest else set()
        found.append(direct | {each for d in direct for each in found[d]})
        latest[step.queue] = number
    return found


def required(schedule: Schedule, program: tuple[StreamTask, ...]) -> set[tuple[int, int]]:
    """The pairs of steps that the schedule's dependencies order."""
    step_of = {op: number for number, step in enumerate(program) for op in step.ops}
    needed = dependencies(tuple(tasks(schedule, per_transfer=False)))
    return {(step_of[j], step_of[i]) for i, each in enumerate(needed) for j in each}


def check_waits(program: tuple[StreamTask, ...], pairs: set[tuple[int, int]]) -> None:
    """These pairs of steps are in order, all are between the first and the last step, and no event is to spare."""
    end = len(program) - 1
    pairs |= {(0, number) for number in range(1, end + 1)} | {(number, end) for number in range(end)}
    before = predecessors(program)
    assert all(first in before[second] for first, second in pairs)
    for number, step in enumerate(program):
        for event in step.waits:
            assert program[event].queue is not step.queue and program[event].records
            without = predecessors(program, leave_out=(event, number))
            assert any(first not in without[second] for first, second in pairs), "an event that is implied"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 64 * 3, 20 * CHUNK + 7])
def test_every_dependency_is_kept_and_no_event_is_to_spare(size, count):
    for schedule in schedules(size, count):
        program = stream_tasks(schedule)
        check_waits(program, required(schedule, program))
        waited = {event for step in program for event in step.waits} | {len(program) - 1}
        assert {number for number, step in enumerate(program) if step.records} == waited


@pytest.mark.parametrize("algorithm", ["one_shot", "two_round"])
@pytest.mark.parametrize("layout", ["leader", "sharded"])
@pytest.mark.parametrize("node_ids", [(0, 1), (0, 0, 1, 1), (0, 1, 1, 2, 2)], ids=str)
def test_transfers_through_the_host_have_queues_of_their_own(node_ids, layout, algorithm):
    """Each leg is on one lane, every dependency is kept, and no message waits for the one before to have come."""
    how = {"node_ids": node_ids, "layout": layout, "algorithm": algorithm, "inter": "host"}
    signature = spec_of_plan("hierarchical_allreduce", 20 * CHUNK * len(node_ids), "float32", CODEC, CHUNK, how)
    owners = min(map(node_ids.count, node_ids)) if layout == "sharded" else 1
    for rank, task in enumerate(node_ids):
        schedule = signature.schedule(rank, len(node_ids), in_place=True)
        assert schedule.staged_peers == {r for r, other in enumerate(node_ids) if other != task}
        program = stream_tasks(schedule)
        ops = [(s, i, step.exchange or schedule.ops[i]) for s, step in enumerate(program) for i in step.ops]
        parts = [(s, Task(i, op, *accesses(op))) for s, i, op in ops]
        transfers = [(part.op_index, transfer) for _, part in parts for transfer in transfers_of(part.op)]
        assert sorted(map(str, transfers)) == sorted(
            str((i, transfer)) for i, op in enumerate(schedule.ops) for transfer in transfers_of(op)
        )
        for s, part in parts:
            for transfer in transfers_of(part.op):
                queue = (
                    (Queue.OUT if part.op.sends else Queue.IN) if transfer.peer in schedule.staged_peers else Queue.COMM
                )
                assert program[s].queue is queue
        needed = dependencies([part for _, part in parts])
        check_waits(program, {(parts[j][0], parts[i][0]) for i, each in enumerate(needed) for j in each})
        before = predecessors(program)
        outs, ins = ([s for s, step in enumerate(program) if step.queue is queue] for queue in (Queue.OUT, Queue.IN))
        assert bool(outs) == bool(ins) == (node_ids[:rank].count(task) < owners)
        for earlier, later in zip(ins, outs[1:], strict=False) if algorithm == "one_shot" else ():
            assert earlier not in before[later]


def transfers_of(op):
    return (*op.sends, *op.recvs) if isinstance(op, Exchange) else ()


@pytest.mark.parametrize("size", SIZES)
def test_operations_keep_their_order_on_each_queue(size):
    for schedule in schedules(size, 20 * CHUNK + 7):
        program = stream_tasks(schedule)
        for queue in Queue:
            order = [op for step in program if step.queue is queue for op in step.ops]
            assert order == [i for i, task in enumerate(tasks(schedule, per_transfer=False)) if task.queue is queue]
        assert program[0].ops == program[-1].ops == ()
        assert program[0].queue is program[-1].queue is HOME


def kinds(schedule: Schedule, program: tuple[StreamTask, ...]) -> list[str]:
    return [" ".join(sorted({type(schedule.ops[op]).__name__ for op in step.ops})) for step in program]


@pytest.mark.parametrize("size", SIZES)
def test_launches_of_two_round(size):
    """For each chunk one launch for all peers' encodes, one reduce, one for all decodes, and two groups."""
    chunks = 5
    count = size * chunks * CHUNK
    for rank in range(size):
        schedule = one_rank(two_round, rank, size, count, FLOAT32, CODEC, in_place=True, chunk_elements=CHUNK)
        program = stream_tasks(schedule)
        assert kinds(schedule, program[:4]) == ["", "Encode", "Exchange", "Encode"]
        names = kinds(schedule, program)
        assert {name: names.count(name) for name in set(names)} == {
            "": 2, "Encode": chunks, "Exchange": 2 * chunks, "Reduce": chunks, "Decode": chunks,
        }  # fmt: skip
        for step, name in zip(program, names, strict=True):
            assert len(step.ops) == (0 if not name else size - 1 if name in ("Encode", "Decode") else 1)


def test_a_launch_per_chunk_of_one_shot():
    schedule = one_rank(one_shot, 1, 4, 5 * CHUNK, FLOAT32, CODEC, chunk_elements=CHUNK)
    names = kinds(schedule, stream_tasks(schedule))
    assert {name: names.count(name) for name in set(names)} == {"": 2, "Encode": 5, "Exchange": 5, "Reduce": 5}


def numbered(schedule: Schedule, program: tuple[StreamTask, ...], kind: type, buffer: str) -> list[int]:
    """The steps of a kind that write ``buffer`` (an Exchange: send from it), chunk by chunk."""
    found = []
    for number, step in enumerate(program):
        for op in (schedule.ops[i] for i in step.ops):
            if not isinstance(op, kind):
                continue
            span = op.sends[0].span if isinstance(op, Exchange) else op.wire
            if span.buffer == buffer and number not in found:
                found.append(number)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [two_round, one_shot])
def test_encoding_runs_ahead_of_the_line(make, size):
    """No path in the event graph from the exchange of chunk k to the encode of chunk k + 1."""
    schedule = one_rank(make, 0, size, 12 * size * CHUNK, FLOAT32, CODEC, chunk_elements=CHUNK)
    program = stream_tasks(schedule)
    before = predecessors(program)
    first_round = "scatter.send" if make is two_round else "gather.send"
    encodes = numbered(schedule, program, Encode, first_round)
    exchanges = numbered(schedule, program, Exchange, first_round)
    assert len(encodes) == len(exchanges) >= 12
    for k in range(len(encodes) - 1):
        assert exchanges[k] not in before[encodes[k + 1]]
        assert encodes[k + 1] not in before[exchanges[k]]
    for k in range(len(encodes) - 4):  # but the slot is used again only when its send is done
        assert exchanges[k] in before[encodes[k + 4]]
    if make is two_round:  # the second round of a chunk does not hold up the first round of the next
        second = numbered(schedule, program, Exchange, "gather.send")
        assert all(second[k] not in before[encodes[k + 1]] for k in range(len(encodes) - 1))
        assert all(second[k] not in before[exchanges[k + 1]] for k in range(len(encodes) - 1))


def test_decodes_of_two_chunks_are_two_launches():
    """The first chunk to arrive is not kept waiting for the second."""
    schedule = one_rank(two_round, 0, 3, 3 * 2 * CHUNK, FLOAT32, CODEC, chunk_elements=CHUNK)
    program = stream_tasks(schedule)
    decodes = [step for step, name in zip(program, kinds(schedule, program), strict=True) if name == "Decode"]
    assert [len(step.ops) for step in decodes] == [2, 2]


def wires(*ops):
    buffers = {
        "output": Buffer(256, FLOAT32, Role.OUTPUT),
        "a": Buffer(4096, None, Role.WORK),
        "b": Buffer(4096, None, Role.WORK),
    }
    return Schedule("test", 0, 2, buffers, ops)


WIRE = CODEC.encoded_nbytes(64, FLOAT32)


def encode(start, wire, codec=CODEC):
    return Encode(codec, Span("output", start, start + 64), Span("a", wire, wire + WIRE), start)


def test_what_shares_a_launch():
    alike = wires(encode(0, 0), encode(64, 256))
    assert [step.ops for step in stream_tasks(alike)] == [(), (0, 1), ()]
    other_codec = wires(encode(0, 0), encode(64, 256, get("minmax8:bucket=64")))
    assert [step.ops for step in stream_tasks(other_codec)] == [(), (0,), (1,), ()]
    same_slot = wires(encode(0, 0), encode(64, 0))  # the second overwrites the first
    assert [step.ops for step in stream_tasks(same_slot)] == [(), (0,), (1,), ()]
    decodes = wires(
        *(Decode(CODEC, Span("a", 0, WIRE), Span("output", 64 * i, 64 * i + 64), accumulate=i > 1) for i in range(4))
    )
    assert [step.ops for step in stream_tasks(decodes)] == [(), (0, 1), (2, 3), ()]
    adding_twice = wires(
        *(Decode(CODEC, Span("a", 256 * i, 256 * i + WIRE), Span("output", 0, 64), accumulate=True) for i in range(2))
    )
    assert [step.ops for step in stream_tasks(adding_twice)] == [(), (0,), (1,), ()]
    places = (Span("output", 0, 64), Span("output", 64, 128))
    reduces = wires(*(Reduce(CODEC, (Span("a", 0, WIRE),), place, 0, None, place) for place in places))
    assert [step.ops for step in stream_tasks(reduces)] == [(), (0, 1), ()]


SEND, RECEIVE = Exchange((Transfer(1, Span("a", 0, WIRE)),), ()), Exchange((), (Transfer(1, Span("a", 0, WIRE)),))


@pytest.mark.parametrize(
    ("ops", "waits"),
    [
        ((encode(0, 0), SEND), [(), (), (1,), (2,)]),  # it is done when its send is
        # its slot may still be read by what was there before, on the home queue
        ((RECEIVE, Decode(CODEC, Span("a", 0, WIRE), Span("output", 0, 64))), [(), (0,), (1,), ()]),
        ((), [(), ()]),
    ],
    ids=["only sends", "only receives", "nothing"],
)
def test_the_first_and_the_last_task_surround_all_others(ops, waits):
    program = stream_tasks(wires(*ops))
    assert [task.waits for task in program] == waits
    queues = (Queue.COMM if isinstance(op, Exchange) else Queue.COMPUTE for op in ops)
    assert [task.queue for task in program] == [HOME, *queues, HOME]
    assert program[-1].records and program[0].records == ((0,) in waits)
