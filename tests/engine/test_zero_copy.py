"""Sends from where values lie: which copies are left out, and that nothing overtakes what is still being sent."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from schedule_cases import one_rank

import qccl
from qccl import codecs
from qccl.base import dtypes
from qccl.collectives.allreduce import ALLREDUCE
from qccl.collectives.hierarchical import NodeLevels, hierarchical
from qccl.collectives.schedule import Encode, Exchange, Reduce, Role, Schedule, Span, Task, Transfer, tasks
from qccl.engine.host.zero_copy import remove_copies

NONE, MINMAX = codecs.get("none"), codecs.get("minmax8")
NODES = ((0, 1, 2), (3, 4))


def two_levels(rank: int, *, parts: int = 2, in_place: bool = False, algorithm: str = "one_shot") -> Schedule:
    levels = NodeLevels(NODES, parts, algorithm, NONE)
    options = {"in_place": in_place, "levels": levels, "chunk_elements": 1 << 13}
    return one_rank(hierarchical, rank, 5, 300_000, dtypes.FLOAT32, MINMAX, **options)


def raw(name: str, rank: int, *, in_place: bool) -> Schedule:
    make = ALLREDUCE[name]
    return one_rank(make, rank, 3, 100_000, dtypes.FLOAT32, NONE, "sum", in_place=in_place, chunk_elements=1 << 13)


SCHEDULES = [
    *(
        two_levels(rank, parts=parts, in_place=in_place)
        for rank in (0, 1, 2, 4)
        for parts in (1, 2)
        for in_place in (0, 1)
    ),
    *(raw(name, 1, in_place=in_place) for name in ALLREDUCE for in_place in (False, True)),
]


def made(schedule: Schedule, least: int = 1) -> tuple[list[Task], list[tuple[int, ...]]]:
    return remove_copies(tuple(tasks(schedule, per_transfer=True)), least)


def copies(program: Sequence[Task]) -> list[Encode]:
    return [task.op for task in program if isinstance(task.op, Encode) and task.op.codec is NONE]


def ancestors(needed: Sequence[Sequence[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for needs in needed:
        found.append(set(needs).union(*(found[j] for j in needs)))
    return found


def overlap(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_only_copies_that_are_sent_are_left_out(schedule: Schedule) -> None:
    before = list(tasks(schedule, per_transfer=True))
    program, needed = made(schedule)
    placed = {task.transfer.span: task.source for task in program if task.source is not None}
    gone = [op for op in copies(before) if op not in copies(program)]
    assert [task.op for task in before if task.op not in gone] == [task.op for task in program]
    assert {op.wire for op in gone} == placed.keys()
    for task in program:
        if task.source is not None:
            assert task.is_send and schedule.buffers[task.source.buffer].role is not Role.WORK
            assert len(task.transfer.span) == 4 * len(task.source)
    assert all(j < i for i, needs in enumerate(needed) for j in needs)
    # In one_shot each rank's own wire is summed, too; in the second round of two_round there is no copy to leave out.
    assert bool(placed) == (schedule.name != "one_shot")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_what_is_written_waits_for_what_is_sent_and_the_other_way_round(schedule: Schedule) -> None:
    program, needed = made(schedule)
    before = ancestors(needed)
    for i, task in enumerate(program):
        for j in range(i):
            for source in program[j].reads:
                if any(overlap(source, target) for target in task.writes):
                    assert j in before[i], f"{i} overwrites what {j} reads"
            if any(overlap(target, source) for source in task.reads for target in program[j].writes):
                assert j in before[i], f"{i} reads what {j} writes"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_no_more_sends_to_a_rank_are_under_way_than_there_are_slots(schedule: Schedule) -> None:
    program, needed = made(schedule)
    before = ancestors(needed)
    last: dict[tuple[int, Span], int] = {}
    rings = {name: set() for name in schedule.buffers}
    for i, task in enumerate(program):
        if task.transfer is None or not task.is_send:
            continue
        start = task.transfer.peer, task.transfer.span.buffer, task.transfer.span.start
        assert start not in last or last[start] in before[i]
        last[start] = i
        rings[task.transfer.span.buffer].add(task.transfer.span.start)
    assert all(len(starts) <= 3 * schedule.size for starts in rings.values())


def test_what_is_small_or_coded_or_read_by_others_is_copied() -> None:
    assert not copies(made(two_levels(0))[0])
    assert copies(made(two_levels(0), least=1 << 30)[0]) == copies(tasks(two_levels(0), per_transfer=True))
    # Pieces of several parts lie next to each other in one message, and not in memory.
    assert copies(made(two_levels(0, algorithm="two_round"))[0])

    wire, half, x = Span("wire", 0, 4096), Span("wire", 0, 2048), Span("x", 0, 1024)
    encode, send = Encode(NONE, x, wire, 0), Exchange((Transfer(1, wire),), ())
    write = Reduce(NONE, (), Span("y", 0, 1024), 0, None, x)
    add = Reduce(NONE, (wire,), None, 0, None, Span("y", 0, 1024))
    for ops, leaves_out in (
        ([encode, send], True),
        ([encode, send, write], True),
        ([encode, write, send], False),
        ([encode, send, add], False),
        ([encode, Exchange((Transfer(1, half),), ())], False),
        ([encode, Exchange((Transfer(1, wire), Transfer(2, half)), ())], False),
        ([encode, Exchange((Transfer(1, wire), Transfer(2, wire)), ())], True),
        ([encode, Encode(NONE, Span("y", 0, 8), Span("wire", 32, 64), 0), send], False),
        ([encode, send, encode, send], True),
        ([encode, write, encode, send], True),
        ([encode], False),
    ):
        program, _ = remove_copies(tuple(tasks(Schedule("made", 0, 3, {}, tuple(ops)), per_transfer=True)), 1)
        assert any(task.source == x for task in program) == leaves_out, ops


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("late", [0, 2])
def test_values_arrive_whoever_comes_late(late: int, in_place: bool) -> None:
    """Whole numbers, so that sums are exact in any order; parts and chunks are large enough to be sent directly."""
    count = 500_001
    inputs = [np.random.default_rng(r).integers(-99, 99, count).astype(np.float32) for r in range(5)]
    total = sum(inputs)

    def run(comm: qccl.Communicator) -> list[np.ndarray]:
        found = []
        for call in (
            lambda x, out: comm.hierarchical_allreduce(
                x, out, codec="none", node_ids=[0, 0, 0, 1, 1], layout="sharded"
            ),
            lambda x, out: comm.hierarchical_allreduce(x, out, codec="none", node_ids=[0, 1, 0, 1, 0]),
            lambda x, out: comm.quantized_allreduce(x, out, codec="none", algorithm="two_round"),
            lambda x, out: comm.quantized_broadcast(x if comm.rank else total, out, codec="none"),
        ):
            for _ in range(2):
                x = inputs[comm.rank].copy()
                out = x if in_place else np.empty_like(x)
                if comm.rank == late:
                    time.sleep(0.02)
                call(x, None if in_place else out)
                assert in_place or (x == inputs[comm.rank]).all()
                found.append(out if not (in_place and comm.rank == 0 and len(found) >= 6) else total)
                x = None
        return found

    for found in qccl.run_ranks(5, run):
        for each in found:
            assert np.array_equal(each, total)


def test_arrays_of_a_call_that_failed_live_as_long_as_something_may_send_from_them() -> None:
    begun = threading.Event()

    def run(comm: qccl.Communicator) -> bool:
        if comm.rank == 1:
            assert begun.wait(60)
            comm.abort("for a test")
            return True
        x = np.ones(1 << 20, np.float32)
        alive = weakref.ref(x)
        work = comm.quantized_allreduce(x, codec="none", async_op=True)
        begun.set()
        with pytest.raises(qccl.PeerLost):
            work.wait()
        del work, x
        gc.collect()
        return alive() is not None

    assert qccl.run_ranks(2, run) == [True, True]
