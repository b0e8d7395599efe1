"""Schedules with state: the verifier accepts them, and refuses them if a part of the state is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from case_schedules import check, schedules
from collective_cases import BOTH, Case, with_state
from schedule_cases import changed, one_rank, places, rejected

import qccl
from qccl.base.dtypes import BFLOAT16
from qccl.codecs import ErrorFeedback, MinMax, Momentum, get
from qccl.collectives.allreduce import ALLREDUCE
from qccl.collectives.analysis import postconditions as expect
from qccl.collectives.analysis.verify import verify
from qccl.collectives.feedback import sums_of
from qccl.collectives.schedule import (
    Commit,
    Encode,
    Exchange,
    Op,
    Reduce,
    Role,
    Schedule,
    Span,
    StateBuffer,
    dependencies,
    tasks,
)

PLAIN = MinMax(bits=4, bucket=8)
WITH_BOTH = Momentum(ErrorFeedback(PLAIN), 0.5)
CODECS = (ErrorFeedback(PLAIN), Momentum(PLAIN), WITH_BOTH)


@pytest.mark.parametrize("case", with_state(BOTH), ids=str)
def test_every_value_that_is_encoded_has_its_residual_and_own_values_their_momentum(case: Case) -> None:
    for rank, schedule in enumerate(schedules(case)):
        seen = {"residual": np.zeros(case.count, int), "momentum": np.zeros(case.count, int)}
        for op in schedule.ops:
            for kind, marks in seen.items():
                each = getattr(op.state, kind) if isinstance(op, Reduce) and op.state else None
                if each is not None:
                    marks[each.old.start : each.old.stop] += 1
        assert (seen["momentum"] == 1).all()
        not_own = np.zeros(case.count, int)
        for name, start, stop in sums_of(schedule):
            assert name == "residual"
            not_own[start:stop] = 1
        senders = np.zeros(case.count, int)
        for op in schedule.ops:
            if isinstance(op, Reduce) and not op.srcs and op.state and op.state.residual:
                senders[op.state.residual.old.start : op.state.residual.old.stop] = 1
        assert (not_own == 1 - senders).all() or "residual" not in schedule.buffers
        if case.name == "reduce_scatter":
            first = sum(case.counts[:rank])
            assert (seen["residual"] == 1 - not_own).all()
            assert not_own.sum() == not_own[first : first + case.counts[rank]].sum() == case.counts[rank]
        elif case.name == "peer_exchange":
            assert (seen["residual"] == 1).all() and not not_own.any()
        elif case.name == "allreduce":
            assert (seen["residual"] == 1).all()


def without_first(kind: str) -> Callable[[list[Op]], None]:
    def mutate(ops: list[Op]) -> None:
        place = next(i for i in places(ops, Reduce) if ops[i].state and getattr(ops[i].state, kind))
        ops[place] = replace(ops[place], state=replace(ops[place].state, **{kind: None}))

    return mutate


@pytest.mark.parametrize("case", with_state(BOTH), ids=str)
@pytest.mark.parametrize("kind", ["residual", "momentum"])
def test_the_verifier_finds_an_operation_without_its_state(case: Case, kind: str) -> None:
    made = changed(schedules(case), without_first(kind), (0,))
    with pytest.raises(qccl.QcclError, match=rf"{kind}.next.* was never written"):
        check(case, made)


def test_no_operation_keeps_a_stateful_codec() -> None:
    for case in itertools.chain(with_state(BOTH), with_state("onebit+ef"), with_state("onebit+nesterov")):
        for schedule in schedules(case):
            assert not any(getattr(op, "codec", get("none")).state_names for op in schedule.ops)


def test_ranks_that_encode_nothing_have_no_state() -> None:
    case = Case("hierarchical_allreduce", 4, (700,), "onebit+ef", node_ids=(0, 0, 1, 1))
    roles = [{b.role for b in schedule.buffers.values()} for schedule in schedules(case)]
    assert [Role.STATE in each for each in roles] == [True, False, True, False]
    one_node = replace(case, node_ids=(0, 0, 0, 0))
    assert not any(Role.STATE in {b.role for b in s.buffers.values()} for s in schedules(one_node))
    assert all(isinstance(op, Encode) or not getattr(op, "state", None) for s in schedules(one_node) for op in s.ops)


# -- all-reduce --------------------------------------------------------------------------------------------------------


def all_ranks(name: str, size: int, count: int | list[int], codec=WITH_BOTH, **options) -> list[Schedule]:
    return [
        one_rank(ALLREDUCE[name], rank, size, count, codec=codec, chunk_elements=16, **options) for rank in range(size)
    ]


def states(schedule: Schedule) -> dict[str, int]:
    return {name: buffer.size for name, buffer in schedule.buffers.items() if buffer.role is Role.STATE}


@pytest.mark.parametrize("name", ["two_round", "one_shot"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_several_arrays(name, size):
    for codec, in_place, scale in itertools.product(CODECS, [False, True], [1.0, 0.25]):
        made = all_ranks(name, size, [401, 3, 0, 50], codec, in_place=in_place, scale=scale, dtype=BFLOAT16)
        verify(made, expect=partial(expect.allreduce, scale=scale))


def test_one_vector_each_whatever_the_algorithm():
    for name, size in itertools.product(["two_round", "one_shot"], [2, 3]):
        assert states(all_ranks(name, size, 100)[0]) == {"residual": 100, "momentum": 100}
        assert states(all_ranks(name, size, 100, ErrorFeedback(PLAIN))[0]) == {"residual": 100}
        assert states(all_ranks(name, size, 100, PLAIN)[0]) == states(all_ranks(name, size, 0)[0]) == {}
    assert states(all_ranks("two_round", 1, 100)[0]) == {"momentum": 100}
    assert states(all_ranks("two_round", 1, 100, ErrorFeedback(PLAIN))[0]) == {}
    (schedule,) = all_ranks("two_round", 1, [5, 0, 7])
    assert states(schedule) == {"momentum 0": 5, "momentum 2": 7}


@pytest.mark.parametrize("per_transfer", [True, False])
def test_the_commit_waits_for_everything(per_transfer):
    schedule = all_ranks("two_round", 3, 100)[1]
    program = list(tasks(schedule, per_transfer=per_transfer))
    assert isinstance(program[-1].op, Commit) and any(isinstance(node.op, Exchange) for node in program)
    assert dependencies(program)[-1] == tuple(range(len(program) - 1))


def with_parts(ops: list[Op], place: int, **parts) -> None:
    ops[place] = replace(ops[place], state=replace(ops[place].state, **parts))


def moved(ops: list[Op]) -> None:
    """The second operation takes the residual of the first."""
    first, second = places(ops, Reduce)[:2]
    with_parts(ops, second, residual=ops[first].state.residual)


def written_at_once(ops: list[Op]) -> None:
    old = ops[0].state.residual.old
    with_parts(ops, 0, residual=StateBuffer(old, old))


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
