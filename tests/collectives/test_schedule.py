"""Derived dependencies against the pairwise definition; tasks, transfers and spans."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from schedule_cases import one_rank

from qccl.base.dtypes import BFLOAT16, FLOAT32
from qccl.base.errors import ArgumentError
from qccl.codecs import MinMax
from qccl.collectives.allreduce import ALLREDUCE
from qccl.collectives.schedule import (
    Buffer,
    Decode,
    Encode,
    Exchange,
    Queue,
    Role,
    Schedule,
    Span,
    Task,
    Transfer,
    accesses,
    dependencies,
    tasks,
)

CODEC = MinMax(bits=8, bucket=8)


def conflict(a: Task, b: Task) -> bool:
    """Whether both touch the same element and one writes it."""
    pairs = [(x, y) for x in a.writes for y in (*b.reads, *b.writes)]
    pairs += [(x, y) for x in a.reads for y in b.writes]
    return any(x.buffer == y.buffer and x.start < y.stop and y.start < x.stop for x, y in pairs)


def closure(before: list[tuple[int, ...]]) -> list[set[int]]:
    """For each task, everything that has completed when it starts."""
    found: list[set[int]] = []
    for first in before:
        found.append(set(first).union(*(found[i] for i in first)))
    return found


def random_program(draw: random.Random) -> list[Task]:
    """Operations that read and write random spans of two buffers."""

    def span() -> Span:
        start = draw.randrange(40)
        return Span(draw.choice("ab"), start, start + draw.randrange(1, 12))

    ops = [Decode(CODEC, span(), span()) for _ in range(30)]
    return [Task(i, op, *accesses(op)) for i, op in enumerate(ops)]


def test_dependencies_are_the_conflicts() -> None:
    """Directly only real conflicts; through others all of them."""
    draw = random.Random(7)
    for _ in range(60):
        program = random_program(draw)
        before = dependencies(program)
        everything = closure(before)
        for i, task in enumerate(program):
            assert list(before[i]) == sorted(set(before[i]))
            for j in range(i):
                if j in before[i]:
                    assert conflict(program[j], task)
                if conflict(program[j], task):
                    assert j in everything[i]


def test_dependencies_of_an_exchange_are_those_of_its_transfers() -> None:
    for name, make in ALLREDUCE.items():
        schedule = one_rank(make, 1, 4, 700, FLOAT32, CODEC, chunk_elements=24, depth=3, in_place=name == "one_shot")
        transfers = list(tasks(schedule, per_transfer=True))
        whole = dependencies(list(tasks(schedule, per_transfer=False)))
        pairs = zip(transfers, dependencies(transfers), strict=True)
        for i, group in groupby(pairs, key=lambda pair: pair[0].op_index):
            assert set(whole[i]) == {transfers[j].op_index for _, before in group for j in before}


def test_nodes() -> None:
    span = [Span("wire", 8 * i, 8 * i + 8) for i in range(5)]
    ops = (
        Encode(CODEC, Span("output", 0, 0), span[0], 0),
        Exchange((Transfer(1, span[0]), Transfer(2, span[0])), (Transfer(2, span[1]),)),
        Exchange((Transfer(2, span[2]),), (Transfer(2, span[3]), Transfer(1, span[4]))),
    )
    buffers = {"wire": Buffer(40, None, Role.WORK), "output": Buffer(0, BFLOAT16, Role.OUTPUT)}
    schedule = Schedule("test", 0, 3, buffers, ops)
    found = [
        (n.op_index, n.transfer and n.transfer.peer, n.is_send, n.sequence) for n in tasks(schedule, per_transfer=True)
    ]
    assert found == [
        (0, None, False, 0),
        (1, 2, False, 0),
        (1, 1, True, 0),
        (1, 2, True, 0),
        (2, 2, False, 1),
        (2, 1, False, 0),
        (2, 2, True, 1),
    ]
    whole = list(tasks(schedule, per_transfer=False))
    assert [n.queue for n in whole] == [Queue.COMPUTE, Queue.COMM, Queue.COMM]
    assert whole[1].reads == (span[0], span[0]) and whole[1].writes == (span[1],)
    assert schedule.sent_nbytes() == 24
    assert (buffers["wire"].nbytes, Buffer(3, BFLOAT16, Role.WORK).nbytes, Buffer(3, FLOAT32, Role.WORK).nbytes) == (
        40,
        6,
        12,
    )


def test_an_engine_refuses_the_schedule_of_another_rank():
    schedule = Schedule("made", 1, 3, {}, ())
    schedule.check_rank(1, 3)
    with pytest.raises(ArgumentError, match="for rank 1 of 3, not for rank 0 of 3"):
        schedule.check_rank(0, 3)
