"""All-reduce with error feedback and momentum: exact results and state; saving, loading and resetting state."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from cases import NUMPY, hard_data
from feedback_cases import kept_by
from laws import assert_same_bits, stored
from oracle_feedback import Group

import qccl
from qccl.errors import ArgumentError

CODECS = [
    "minmax2:bucket=64+ef",
    "minmax8:bucket=shard+ef+nesterov",
    "minmax3:bucket=8,rounding=stochastic,seed=4+ef",
    "minmax5:bucket=4096,rounding=stochastic,seed=9+ef+nesterov:mu=0.5",
    "onebit:bucket=32,reconstruct=scale+ef+nesterov:mu=0.5",
    "onebit:bucket=128,reconstruct=mean+ef",
    "onebit+nesterov",
    "none+ef",
    "none+nesterov:mu=0.25",
    "minmax2:bucket=64+ef:beta=0.95",
    "topk:k=0.1,block=64+ef:beta=0.9,dtype=bfloat16+nesterov:mu=0.5",
]
LENGTHS = [0, 1, 63, 65, 1000, 9001]


def steps(
    ranks: int, count: int, dtype: str, number: int, kinds: tuple[str, ...] = ("normal",)
) -> list[list[np.ndarray]]:
    """The inputs of each rank for several calls."""
    data = []
    for step in range(number):
        kind = kinds[step % len(kinds)]
        data.append([hard_data(kind, count, NUMPY[dtype], 100 * step + rank) for rank in range(ranks)])
    return data


def run(comm: qccl.Communicator, calls: list[list[np.ndarray]], lrs: list[float | None], **arguments: Any) -> list:
    """The results of several calls with one key, every second one in place."""
    results = []
    for step, (inputs, lr) in enumerate(zip(calls, lrs, strict=True)):
        x = inputs[comm.rank].copy()
        out = x if step % 2 else np.empty_like(x)
        comm.quantized_allreduce(x, out=out, key="a", lr=lr, **arguments)
        results.append(stored(out).copy())
    return results


def assert_equals_oracle(group: Group, found: list, wanted: list[np.ndarray], state: dict, rank: int) -> None:
    for step, (y, expected) in enumerate(zip(found, wanted, strict=True)):
        assert_same_bits(y, expected, f"rank {rank}, step {step}")
    kept = group.kept[rank]
    expected_state = {"residual": None if group.ranks == 1 else kept.residual, "momentum": kept.momentum}
    for kind, values in expected_state.items():
        if values is None or not group.count:
            assert kind not in state["values"]
        else:
            assert_same_bits(state["values"][kind], values, f"rank {rank}, {kind}")


def cases() -> list[tuple]:
    draw = random.Random(3)
    rows = itertools.product(CODECS, ["two_round", "one_shot"], [1, 2, 3, 4])
    return [
        (
            *(codec, algorithm, ranks, draw.choice(LENGTHS), draw.choice([*NUMPY])),
            *(draw.choice(["sum", "avg"]), draw.choice([None, 64, 300]), draw.random() < 0.3),
        )
        for codec, algorithm, ranks in rows
    ]


@pytest.mark.parametrize("codec, algorithm, ranks, count, dtype, op, chunk, changing", cases())
def test_results_and_state_are_the_oracles(codec, algorithm, ranks, count, dtype, op, chunk, changing):
    kinds = ("normal", "outliers", "zeros", "negative")
    calls, lrs = steps(ranks, count, dtype, 4, kinds), [0.1, 0.1, 0.02, 3.0] if changing else [None] * 4
    group = Group(codec, ranks, count, dtype, algorithm, op)
    wanted = [group.step([stored(x) for x in xs], lr or 1.0) for xs, lr in zip(calls, lrs, strict=True)]
    arguments = {"codec": codec, "algorithm": algorithm, "op": op, "chunk": chunk}
    found = qccl.run_ranks(ranks, lambda comm: (run(comm, calls, lrs, **arguments), kept_by(comm)))
    for rank, (results, state) in enumerate(found):
        assert_equals_oracle(group, results, wanted, state["a"], rank)


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("spoil", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_leaves_the_state_on_every_rank(algorithm, spoil):
    ranks, count, codec = 3, 700, "minmax2:bucket=64+ef+nesterov"
    calls = steps(ranks, count, "float32", 5)
    calls[2][1][333] = spoil
    group = Group(codec, ranks, count, "float32", algorithm)

    def states(comm: qccl.Communicator) -> tuple[list, list]:
        results, kept = [], []
        for xs in calls:
            results += [
                stored(comm.quantized_allreduce(xs[comm.rank].copy(), codec=codec, key="a", algorithm=algorithm))
            ]
            kept.append(kept_by(comm))
        return results, kept

    wanted = [group.step(xs) for xs in calls]
    assert not np.isfinite(wanted[2]).all() and np.isfinite(wanted[4]).all()
    for rank, (results, kept) in enumerate(qccl.run_ranks(ranks, states)):
        assert_equals_oracle(group, results, wanted, kept[-1]["a"], rank)
        for kind in ("residual", "momentum"):
            before, after, later = (kept[step]["a"]["values"][kind] for step in (1, 2, 3))
            assert_same_bits(after, before, f"rank {rank}, {kind}")
            assert (later != before).any()


def test_a_state_in_bfloat16_is_rounded_saved_and_loaded():
    """A residual takes two bytes, is saved as float32, and comes back unchanged; another type's state is refused."""
    codec, count = "minmax2:bucket=64+ef:dtype=bfloat16", 1000
    xs = [np.random.default_rng(step).standard_normal((2, count)).astype(np.float32) for step in range(3)]

    def run(comm: qccl.Communicator) -> None:
        def step(number: int, spec: str = codec) -> bytes:
            return comm.quantized_allreduce(xs[number][comm.rank].copy(), codec=spec, key="a").tobytes()

        step(0)
        assert comm._session.state.nbytes == 2 * count
        saved = comm.state_dict()
        residual = saved["keys"]["a"]["values"]["residual"]
        assert residual.dtype == np.float32 and residual.any()
        assert not (residual.view(np.uint32) & 0xFFFF).any()  # bfloat16 has the upper half of the bits
        wanted = step(1), step(2)
        comm.load_state_dict(saved)
        assert (step(1), step(2)) == wanted
        assert comm._session.state.nbytes == 2 * count
        comm.load_state_dict(saved)
        with pytest.raises(ArgumentError, match=r"belongs to .*ef:dtype=bfloat16.*and this is .*ef.*reset\('a'\)"):
            step(1, "minmax2:bucket=64+ef")

    qccl.run_ranks(2, run)


def test_beta_makes_an_error_fade():
    """Of 0.3 beside the levels 0 and 1 the errors add up to a level; with beta = 1/4 they stay below 0.4."""
    x = np.full(64, 0.3, np.float32)
    x[0], x[1] = 0, 1  # the two levels

    def total(comm: qccl.Communicator, spec: str) -> float:
        calls = [comm.quantized_allreduce(x.copy(), codec=spec, algorithm="one_shot", key=spec) for _ in range(20)]
        return sum(float(y[5]) for y in calls) / comm.size

    for beta, wanted in ((1, 20 * 0.3), (0.25, 0)):
        for found in qccl.run_ranks(2, lambda comm, beta=beta: total(comm, f"minmax1:bucket=64+ef:beta={beta}")):
            assert abs(found - wanted) <= (1 if wanted else 0), (beta, found)


def test_chunks_do_not_matter():
    calls = steps(3, 5000, "float16", 3)

    def both(comm: qccl.Communicator) -> tuple[list, dict]:
        found, state = [], {}
        for chunk in (None, 64, 1000):
            found.append(run(comm, calls, [None] * 3, codec="onebit:bucket=64,reconstruct=mean+ef", chunk=chunk))
            state[chunk] = kept_by(comm)["a"]["values"]["residual"]
            comm.reset("a")
        assert all(state[None].tobytes() == each.tobytes() for each in state.values())
        return found

    for found in qccl.run_ranks(3, both):
        for others in found[1:]:
            assert [y.tobytes() for y in others] == [y.tobytes() for y in found[0]]


def test_several_arrays_under_one_key():
    counts, ranks, codec = [700, 0, 65, 3000], 3, "minmax2:bucket=64+ef+nesterov:mu=0.5"

    def calls(comm: qccl.Communicator) -> tuple:
        rng = np.random.default_rng(comm.rank)
        data = [[rng.standard_normal(n).astype(np.float32) for n in counts] for _ in range(3)]
        for xs in data:
            ys = comm.quantized_allreduce_coalesced(
                [x.copy() for x in xs], codec=codec, key="all", algorithm="one_shot"
            )
        singles = []
        for i in range(len(counts)):
            for xs in data:
                y = comm.quantized_allreduce(xs[i].copy(), codec=codec, key=str(i), algorithm="one_shot")
            singles.append(y)
        state = kept_by(comm)
        for i in (0, 2, 3):
            for kind in ("residual", "momentum"):
                assert np.array_equal(state["all"]["values"][f"{kind} {i}"], state[str(i)]["values"][kind])
        return ys, singles

    for together, singles in qccl.run_ranks(ranks, calls):
        for a, b in zip(together, singles, strict=True):
            assert_same_bits(a, b, "coalesced")


def test_state_goes_on_after_it_was_saved_and_loaded():
    calls, codec = steps(2, 500, "float32", 6), "onebit:bucket=64,reconstruct=scale+ef+nesterov"

    def first(comm: qccl.Communicator) -> tuple:
        start = run(comm, calls[:3], [0.5] * 3, codec=codec)
        saved = comm.state_dict()
        rest = run(comm, calls[3:], [0.25] * 3, codec=codec)
        assert (saved["keys"]["a"]["values"]["residual"] != kept_by(comm)["a"]["values"]["residual"]).any()
        comm.load_state_dict(saved)
        again = run(comm, calls[3:], [0.25] * 3, codec=codec)
        assert [a.tobytes() for a in rest] == [a.tobytes() for a in again]
        return saved, start, rest

    saved = qccl.run_ranks(2, first)

    def second(comm: qccl.Communicator) -> list:
        comm.load_state_dict(saved[comm.rank][0])
        return run(comm, calls[3:], [0.25] * 3, codec=codec)

    for rank, results in enumerate(qccl.run_ranks(2, second)):
        assert [y.tobytes() for y in results] == [y.tobytes() for y in saved[rank][2]]


@pytest.mark.parametrize(("lr", "other"), [(0.5, None), (None, 0.5)])
def test_calls_go_on_with_or_without_a_learning_rate_after_loading(lr, other):
    calls, codec = steps(2, 300, "float32", 1), "minmax2+ef"

    def first(comm: qccl.Communicator) -> dict:
        run(comm, calls, [lr], codec=codec)
        return comm.state_dict()

    saved = qccl.run_ranks(2, first)

    def second(comm: qccl.Communicator) -> None:
        comm.load_state_dict(saved[comm.rank])
        with pytest.raises(ArgumentError, match="give lr in all calls or in none"):
            run(comm, calls, [other], codec=codec)
        run(comm, calls, [lr], codec=codec)

    qccl.run_ranks(2, second)


def test_reset_is_a_new_beginning():
    calls, codec = steps(2, 500, "float32", 2), "minmax2:bucket=64+ef"

    def again(comm: qccl.Communicator) -> None:
        first = run(comm, calls, [None] * 2, codec=codec)
        comm.quantized_allreduce(calls[0][comm.rank].copy(), codec=codec, key="b")
        comm.reset("a")
        assert set(kept_by(comm)) == {"b"}
        assert [y.tobytes() for y in run(comm, calls, [None] * 2, codec=codec)] == [y.tobytes() for y in first]
        comm.reset()
        assert kept_by(comm) == {}
        with pytest.raises(ArgumentError, match=r"no state under key='a'; the keys are none yet"):
            comm.reset("a")

    qccl.run_ranks(2, again)


def test_calls_under_way_with_one_key_are_in_order():
    calls, codec = steps(3, 20_000, "float32", 6), "minmax4:bucket=64+ef"

    def both(comm: qccl.Communicator) -> None:
        one_by_one = run(comm, calls, [None] * 6, codec=codec)
        kept = kept_by(comm)["a"]["values"]["residual"]
        comm.reset()
        arrays = [xs[comm.rank].copy() for xs in calls]
        works = [comm.quantized_allreduce(x, codec=codec, key="a", async_op=True) for x in arrays]
        assert kept_by(comm)["a"]["values"]["residual"].tobytes() == kept.tobytes()  # waits for all
        for work, x, wanted in zip(works, arrays, one_by_one, strict=True):
            work.wait()
            assert x.tobytes() == wanted.tobytes()

    qccl.run_ranks(3, both)


def test_plans_have_a_key():
    calls, codec = steps(2, 300, "float32", 3), "minmax2:bucket=64+ef+nesterov"

    def both(comm: qccl.Communicator) -> None:
        wanted = run(comm, calls, [0.5, 0.25, 0.25], codec=codec)
        comm.reset()
        plan = comm.plan("allreduce", 300, codec=codec, key="p")
        found = [plan(xs[comm.rank].copy(), lr=lr) for xs, lr in zip(calls, [0.5, 0.25, 0.25], strict=True)]
        assert [y.tobytes() for y in found] == [y.tobytes() for y in wanted]
        x = np.empty(300, np.float32)
        plan.bind(x)
        comm.reset("p")  # after bind: the next run starts without state
        x[:] = calls[0][comm.rank]
        plan.start(lr=0.5).wait()
        assert x.tobytes() == wanted[0].tobytes()
        with pytest.raises(ArgumentError, match="pass key="):
            comm.plan("allreduce", 300, codec=codec)
        with pytest.raises(ArgumentError, match="use another key"):  # other elements have these places
            plan.bind(np.ones((20, 15), np.float32).T).start(lr=0.5)

    qccl.run_ranks(2, both)


def test_keys_and_learning_rates_of_plain_codecs_do_nothing():
    def call(comm: qccl.Communicator) -> None:
        for key in ("a", None):
            assert comm.quantized_allreduce(np.ones(3, np.float32), key=key, lr=0.5, codec="none")[0] == 2
        assert kept_by(comm) == {}

    qccl.run_ranks(2, call)


def test_a_learning_rate_is_the_number_however_it_is_held():
    def call(comm: qccl.Communicator) -> None:
        for lr in ((1, 1.0), (np.float64(0.1), 0.1)):
            comm.quantized_allreduce(np.ones(100, np.float32), codec="minmax2+ef", key="a", lr=lr[comm.rank])

    qccl.run_ranks(2, call)


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
def test_what_is_too_large_for_a_residual_does_not_spoil_later_calls(algorithm):
    """Stochastic rounding may err by 4e38: the result is finite, but the residual would not be."""

    def call(comm: qccl.Communicator) -> None:
        given = {"codec": "minmax1:bucket=16,rounding=stochastic+ef", "key": "a", "op": "avg", "algorithm": algorithm}
        huge = np.full(64, 1e38, np.float32)
        huge[::16], huge[1::16] = 3e38, -3e38
        for _ in range(4):
            comm.quantized_allreduce(huge * np.float32(0.0 if comm.rank else 1.0), **given)
            residual = kept_by(comm)["a"]["values"]["residual"]
            assert np.isfinite(residual).all() and (comm.rank == 1 or residual.any())  # rank 1 has only zeros

    qccl.run_ranks(2, call)
