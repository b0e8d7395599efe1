"""Keys of all-reduce with error feedback and momentum: what their state follows from, saving, loading and resetting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import hard_data, stored
from collective_cases import kept_by
from kernel_calls import assert_same_bits
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError


def steps(ranks: int, count: int, number: int) -> list[list[np.ndarray]]:
    """The inputs of each rank for several calls."""
    seeds = [[100 * step + rank for rank in range(ranks)] for step in range(number)]
    return [[hard_data("normal", count, np.dtype(np.float32), seed) for seed in each] for each in seeds]


def run(comm: qccl.Communicator, calls: list[list[np.ndarray]], lrs: list[float | None], **arguments: Any) -> list:
    """The results of several calls with one key, every second one in place."""
    results = []
    for step, (inputs, lr) in enumerate(zip(calls, lrs, strict=True)):
        x = inputs[comm.rank].copy()
        out = x if step % 2 else np.empty_like(x)
        comm.quantized_allreduce(x, out=out, key="a", lr=lr, **arguments)
        results.append(stored(out).copy())
    return results


@on_ranks(2)
def test_a_state_in_bfloat16_is_rounded_saved_and_loaded(comm: qccl.Communicator):
    """A residual takes two bytes, is saved as float32, and comes back unchanged; another type's state is refused."""
    codec, count = "minmax2:bucket=64+ef:dtype=bfloat16", 1000
    xs = [np.random.default_rng(step).standard_normal((2, count)).astype(np.float32) for step in range(3)]

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


@pytest.mark.parametrize(("lr", "other"), [(0.5, None), (None, 0.5)])
def test_calls_go_on_with_or_without_a_learning_rate_after_loading(lr, other):
    calls, codec = steps(2, 300, 1), "minmax2+ef"

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


@on_ranks(2)
def test_reset_is_a_new_beginning(comm: qccl.Communicator):
    calls, codec = steps(2, 500, 2), "minmax2:bucket=64+ef"
    first = run(comm, calls, [None] * 2, codec=codec)
    comm.quantized_allreduce(calls[0][comm.rank].copy(), codec=codec, key="b")
    comm.reset("a")
    assert set(kept_by(comm)) == {"b"}
    assert [y.tobytes() for y in run(comm, calls, [None] * 2, codec=codec)] == [y.tobytes() for y in first]
    comm.reset()
    assert kept_by(comm) == {}
    with pytest.raises(ArgumentError, match=r"no state under key='a'; the keys are none yet"):
        comm.reset("a")


@on_ranks(3)
def test_calls_under_way_with_one_key_are_in_order(comm: qccl.Communicator):
    calls, codec = steps(3, 20_000, 6), "minmax4:bucket=64+ef"
    one_by_one = run(comm, calls, [None] * 6, codec=codec)
    kept = kept_by(comm)["a"]["values"]["residual"]
    comm.reset()
    arrays = [xs[comm.rank].copy() for xs in calls]
    works = [comm.quantized_allreduce(x, codec=codec, key="a", async_op=True) for x in arrays]
    assert kept_by(comm)["a"]["values"]["residual"].tobytes() == kept.tobytes()  # waits for all
    for work, x, wanted in zip(works, arrays, one_by_one, strict=True):
        work.wait()
        assert x.tobytes() == wanted.tobytes()


@on_ranks(2)
def test_plans_have_a_key(comm: qccl.Communicator):
    calls, codec = steps(2, 300, 3), "minmax2:bucket=64+ef+nesterov"
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


@on_ranks(2)
def test_keys_and_learning_rates_of_plain_codecs_do_nothing(comm: qccl.Communicator):
    for key in ("a", None):
        assert comm.quantized_allreduce(np.ones(3, np.float32), key=key, lr=0.5, codec="none")[0] == 2
    assert kept_by(comm) == {}


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@on_ranks(2)
def test_what_is_too_large_for_a_residual_does_not_spoil_later_calls(comm: qccl.Communicator, algorithm):
    """Stochastic rounding may err by 4e38: the result is finite, but the residual would not be."""
    given = {"codec": "minmax1:bucket=16,rounding=stochastic+ef", "key": "a", "op": "avg", "algorithm": algorithm}
    huge = np.full(64, 1e38, np.float32)
    huge[::16], huge[1::16] = 3e38, -3e38
    for _ in range(4):
        comm.quantized_allreduce(huge * np.float32(0.0 if comm.rank else 1.0), **given)
        residual = kept_by(comm)["a"]["values"]["residual"]
        assert np.isfinite(residual).all() and (comm.rank == 1 or residual.any())  # rank 1 has only zeros
