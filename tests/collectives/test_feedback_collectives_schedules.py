"""The schedules of reduce-scatter, all-reduce in two levels and peer exchange with state: verified without running."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from feedback_cases import BOTH, Case, cases, three
from schedule_cases import changed, places, rejected

import qccl
from qccl.analysis import postconditions as expect
from qccl.analysis.verify import verify
from qccl.codecs import get
from qccl.collectives import HierarchicalSpec, PeerExchangeSpec, ReduceScatterSpec
from qccl.collectives.feedback import sums_of
from qccl.schedule import Encode, Op, Reduce, Role, Schedule


def schedules(case: Case) -> list[Schedule]:
    shared = case.count, case.dtype, case.codec, case.chunk
    if case.name == "reduce_scatter":
        specs = [ReduceScatterSpec.from_arguments(*shared, op=case.op, counts=case.counts)] * case.ranks
    elif case.name == "hierarchical_allreduce":
        levels = {"layout": case.layout, "node_ids": case.node_ids, "algorithm": case.algorithm}
        specs = [HierarchicalSpec.from_arguments(*shared, op=case.op, **levels)] * case.ranks
    else:
        specs = [
            PeerExchangeSpec.from_arguments(
                *shared, send_to=[(r + 1) % case.ranks], receive_from=[(r - 1) % case.ranks], applied=True
            )
            for r in range(case.ranks)
        ]
    return [spec.schedule(rank, case.ranks, in_place=case.in_place) for rank, spec in enumerate(specs)]


def check(case: Case, made: list[Schedule] | None = None) -> None:
    scale = 1 / case.ranks if case.op == "avg" else 1.0
    made = schedules(case) if made is None else made
    if case.name == "reduce_scatter":
        verify(made, expect=partial(expect.reduce_scatter, counts=case.counts, scale=scale))
    elif case.name == "hierarchical_allreduce":
        verify(made, expect=partial(expect.allreduce, scale=scale))
    else:
        back = [[(rank - 1) % case.ranks] for rank in range(case.ranks)]
        verify(made, expect=partial(expect.exchanged, receive_from=back), given=expect.given_replicas)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_verified(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", three(BOTH), ids=str)
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


def without_state(kind: str) -> Callable[[list[Op]], None]:
    def mutate(ops: list[Op]) -> None:
        place = next(i for i in places(ops, Reduce) if ops[i].state and getattr(ops[i].state, kind))
        ops[place] = replace(ops[place], state=replace(ops[place].state, **{kind: None}))

    return mutate


@pytest.mark.parametrize("case", three(BOTH), ids=str)
@pytest.mark.parametrize("kind", ["residual", "momentum"])
def test_the_verifier_finds_an_operation_without_its_state(case: Case, kind: str) -> None:
    made = changed(schedules(case), without_state(kind), (0,))
    with pytest.raises(qccl.QcclError, match=rf"{kind}.next.* was never written"):
        check(case, made)


def test_the_verifier_finds_state_that_is_not_kept() -> None:
    case = Case("reduce_scatter", 2, (64, 64), "minmax4:bucket=8+ef")
    rejected(
        changed(schedules(case), lambda ops: ops.pop()),
        "residual.* ends as",
        expect=partial(expect.reduce_scatter, counts=case.counts),
    )


def test_no_operation_keeps_a_stateful_codec() -> None:
    for case in itertools.chain(three(BOTH), three("onebit+ef"), three("onebit+nesterov")):
        for schedule in schedules(case):
            assert not any(getattr(op, "codec", get("none")).state_names for op in schedule.ops)


def test_ranks_that_encode_nothing_have_no_state() -> None:
    case = Case("hierarchical_allreduce", 4, (700,), "onebit+ef", node_ids=(0, 0, 1, 1))
    roles = [{b.role for b in schedule.buffers.values()} for schedule in schedules(case)]
    assert [Role.STATE in each for each in roles] == [True, False, True, False]
    one_node = replace(case, node_ids=(0, 0, 0, 0))
    assert not any(Role.STATE in {b.role for b in s.buffers.values()} for s in schedules(one_node))
    assert all(isinstance(op, Encode) or not getattr(op, "state", None) for s in schedules(one_node) for op in s.ops)
