"""Schedules with state: the verifier accepts them, and refuses them if a part of the state is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from schedule_cases import changed, one_rank, places, rejected

from qccl.analysis.postconditions import allreduce
from qccl.analysis.verify import verify
from qccl.codecs import ErrorFeedback, MinMax, Momentum
from qccl.collectives.allreduce import ALLREDUCE
from qccl.dtypes import BFLOAT16, FLOAT16
from qccl.schedule import Commit, Encode, Exchange, Op, Reduce, Role, Schedule, Span, StateBuffer, dependencies, tasks

PLAIN = MinMax(bits=4, bucket=8)
BOTH = Momentum(ErrorFeedback(PLAIN), 0.5)
CODECS = (ErrorFeedback(PLAIN), Momentum(PLAIN), BOTH)


def all_ranks(name: str, size: int, count: int | list[int], codec=BOTH, **options) -> list[Schedule]:
    return [
        one_rank(ALLREDUCE[name], rank, size, count, codec=codec, chunk_elements=16, **options) for rank in range(size)
    ]


def states(schedule: Schedule) -> dict[str, int]:
    return {name: buffer.size for name, buffer in schedule.buffers.items() if buffer.role is Role.STATE}


@pytest.mark.parametrize("name", ["two_round", "one_shot"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_are_right(name, size):
    for codec, count, in_place, scale in itertools.product(CODECS, [0, 1, 8, 401], [False, True], [1.0, 0.25]):
        expect = partial(allreduce, scale=scale)
        schedules = all_ranks(name, size, count, codec, in_place=in_place, scale=scale, dtype=FLOAT16)
        verify(schedules, expect=expect)
        together = all_ranks(name, size, [count, 3, 0, 50], codec, in_place=in_place, scale=scale, dtype=BFLOAT16)
        verify(together, expect=expect)


def test_one_vector_each_whatever_the_algorithm():
    for name, size in itertools.product(["two_round", "one_shot"], [2, 3]):
        assert states(all_ranks(name, size, 100)[0]) == {"residual": 100, "momentum": 100}
        assert states(all_ranks(name, size, 100, ErrorFeedback(PLAIN))[0]) == {"residual": 100}
        assert states(all_ranks(name, size, 100, PLAIN)[0]) == states(all_ranks(name, size, 0)[0]) == {}
    assert states(all_ranks("two_round", 1, 100)[0]) == {"momentum": 100}
    assert states(all_ranks("two_round", 1, 100, ErrorFeedback(PLAIN))[0]) == {}
    (schedule,) = all_ranks("two_round", 1, [5, 0, 7])
    assert states(schedule) == {"momentum 0": 5, "momentum 2": 7}


def test_every_value_that_is_encoded_has_its_residual_and_own_values_their_momentum():
    for schedule in all_ranks("two_round", 3, 100):
        covered = {"residual": set(), "momentum": set()}
        for op in schedule.ops:
            assert not isinstance(op, Encode)
            for kind in covered:
                state_buffers = getattr(op.state, kind) if isinstance(op, Reduce) and op.state else None
                for i in range(state_buffers.old.start, state_buffers.old.stop) if state_buffers else ():
                    assert i not in covered[kind]
                    covered[kind].add(i)
        assert covered == {"residual": set(range(100)), "momentum": set(range(100))}


@pytest.mark.parametrize("per_transfer", [True, False])
def test_the_commit_waits_for_everything(per_transfer):
    schedule = all_ranks("two_round", 3, 100)[1]
    program = list(tasks(schedule, per_transfer=per_transfer))
    assert isinstance(program[-1].op, Commit) and any(isinstance(node.op, Exchange) for node in program)
    assert dependencies(program)[-1] == tuple(range(len(program) - 1))


def with_state(ops: list[Op], place: int, **parts) -> None:
    ops[place] = replace(ops[place], state=replace(ops[place].state, **parts))


def without(kind: str, place: int) -> Callable[[list[Op]], None]:
    return lambda ops: with_state(ops, places(ops, Reduce)[place], **{kind: None})


def moved(ops: list[Op]) -> None:
    """The second operation takes the residual of the first."""
    first, second = places(ops, Reduce)[:2]
    with_state(ops, second, residual=ops[first].state.residual)


def written_at_once(ops: list[Op]) -> None:
    old = ops[0].state.residual.old
    with_state(ops, 0, residual=StateBuffer(old, old))


def early(ops: list[Op]) -> None:
    ops.insert(-2, ops.pop())


def unguarded(ops: list[Op]) -> None:
    (span,) = ops[-1].guard
    ops[-1] = replace(ops[-1], guard=(Span(span.buffer, 0, len(span) - 1),))


def half(ops: list[Op]) -> None:
    ops[-1] = replace(
        ops[-1],
        state_buffers=tuple(
            StateBuffer(Span(c.old.buffer, 0, 8), Span(c.new.buffer, 0, 8)) for c in ops[-1].state_buffers
        ),
    )


@pytest.mark.parametrize(
    "mutate, reason",
    [
        (without("residual", 0), "residual.next.* was never written"),
        (without("residual", -1), "residual.next.* was never written"),
        (without("momentum", 0), "momentum.next.* was never written"),
        (moved, "to values from element 0 on"),
        (written_at_once, "only a Commit may change"),
        (early, "before the end"),
        (unguarded, "not all of the output"),
        (half, "ends as"),
        (lambda ops: ops.pop(), "ends as"),
        (lambda ops: ops.__setitem__(0, replace(ops[0], op="max")), "keeps state of a reduction by max"),
        (lambda ops: ops.__setitem__(0, replace(ops[0], wire=None, out=Span("output", 0, 16))), "makes no code"),
    ],
)
def test_wrong_state_is_found(mutate, reason):
    rejected(changed(all_ranks("two_round", 3, 96), mutate), reason)
