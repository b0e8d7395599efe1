"""Error feedback and momentum in reduce-scatter, all-reduce in two levels and peer exchange: results and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from collective_cases import BOTH, Case, assert_state, call, kept_by, run, with_state
from cuda_ranks import ranks as gpu_ranks
from fake_cuda import World, array, installed
from fake_kernels import work
from oracle import to_float
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError

pytestmark = pytest.mark.starts_first


@pytest.mark.parametrize("case", with_state(BOTH), ids=str)
@pytest.mark.parametrize("spoil", [np.nan, -np.inf])
def test_a_step_that_is_not_finite_leaves_the_state_of_those_that_see_it(case: Case, spoil: float) -> None:
    """In an all-reduce these are all ranks; otherwise the rank itself, and those whose result it spoils."""
    inputs, oracle = replace(case, data=("normal",) * 6).inputs(), case.oracle()
    inputs[2][1][3] = spoil

    def states(comm: qccl.Communicator) -> list[dict]:
        found = []
        for xs in inputs:
            call(case, comm, xs[comm.rank])
            found.append(kept_by(comm)["a"]["values"])
        return found

    wanted = []
    for xs in inputs:
        oracle.step(xs)
        wanted.append(list(oracle.kept))
    everyone = "allreduce" in case.name
    for rank, found in enumerate(qccl.run_ranks(4, states)):
        for step, values in enumerate(found):
            assert_state(values, wanted[step][rank], rank)
            assert all(np.isfinite(each).all() for each in values.values())
        sees = everyone or rank == 1 or (case.name == "reduce_scatter" and rank == 0)
        for kind, values in found[1].items():
            assert (values.tobytes() == found[2][kind].tobytes()) == sees


@pytest.mark.parametrize("case", with_state(BOTH) + with_state("randomk:k=0.1,block=32+nesterov:mu=0.5"), ids=str)
def test_a_momentum_that_overflows_does_not_spoil_later_calls(case: Case) -> None:
    """Rank 1 sends what overflows, and need not see it in its own result."""
    inputs, oracle = replace(case, data=("normal",) * 6).inputs(), case.oracle()
    for step in range(2):
        inputs[step][1][::7] = 3e38
    for xs in inputs:
        oracle.step(xs)
    for rank, (results, state) in enumerate(qccl.run_ranks(4, partial(run, case, inputs))):
        assert_state(state["a"]["values"], oracle.kept[rank], rank)
        assert all(np.isfinite(each).all() for each in (*results[-1], *state["a"]["values"].values()))


@pytest.mark.parametrize("case", with_state("onebit:bucket=64,reconstruct=mean+ef"), ids=str)
@pytest.mark.cupy
def test_chunks_and_engines_do_not_matter(case: Case) -> None:
    inputs = case.inputs()
    wanted = qccl.run_ranks(4, partial(run, case, inputs))
    assert_same_runs(qccl.run_ranks(4, partial(run, replace(case, chunk=64), inputs)), wanted)
    if case.name == "peer_exchange":
        return  # its fake arrays need no test of their own: test_peer_exchange_on_the_device

    def on_device(comm: qccl.Communicator) -> tuple[list, dict]:
        found = []
        for xs in inputs:
            x = array(xs[comm.rank], comm.rank)
            how = {"codec": case.codec, "key": "a", "chunk": 640}
            if case.name == "allreduce":
                y = comm.quantized_allreduce(x, algorithm=case.algorithm, **how)
            elif case.name == "reduce_scatter":
                y = array(np.zeros(case.counts[comm.rank], np.float32), comm.rank)
                comm.quantized_reduce_scatter(x, y, counts=case.counts, **how)
            else:
                y = x
                levels = {"node_ids": case.node_ids, "layout": case.layout, "algorithm": case.algorithm}
                comm.hierarchical_allreduce(x, **how, **levels)
            comm.check()
            found.append([y.get()])
        return found, kept_by(comm)

    with installed(World(), work):
        assert_same_runs(gpu_ranks(4, on_device), wanted)


def assert_same_runs(found: list, wanted: list) -> None:
    for (results, state), (expected, state_expected) in zip(found, wanted, strict=True):
        assert [y.tobytes() for ys in results for y in ys] == [y.tobytes() for ys in expected for y in ys]
        values, values_expected = (each["a"]["values"] for each in (state, state_expected))
        assert {k: v.tobytes() for k, v in values.items()} == {k: v.tobytes() for k, v in values_expected.items()}


@pytest.mark.cupy
def test_peer_exchange_on_the_device() -> None:
    """With momentum, which overflows once; other tests of the device have it in all-reduces."""

    def steps(comm: qccl.Communicator, make: Callable[[np.ndarray], Any], take: Callable[[Any], np.ndarray]) -> tuple:
        found = []
        for step in range(4):
            values = np.random.default_rng([step, comm.rank]).standard_normal(700).astype(np.float32)
            if step < 2:
                values[:3] = 3e38
            z = make(values)
            model, replica = make(np.zeros(700, np.float32)), make(np.zeros(700, np.float32))
            other = 1 - comm.rank
            comm.peer_exchange(z, send_to=[other], replicas={other: replica}, applied=model, codec=BOTH, key="a")
            comm.check()
            found.append([take(model), take(replica)])
        return found, kept_by(comm)

    wanted = qccl.run_ranks(2, lambda comm: steps(comm, np.array, np.array))
    with installed(World(), work):
        found = gpu_ranks(2, lambda comm: steps(comm, lambda x: array(x, comm.rank), lambda x: x.get()))
    assert_same_runs(found, wanted)


def test_plans_and_pointers_take_keys() -> None:
    xs = [np.random.default_rng(rank).standard_normal(1000).astype(np.float32) for rank in range(2)]
    between = {"node_ids": [0, 1], "algorithm": "one_shot", "op": "avg"}

    def calls(comm: qccl.Communicator) -> None:
        x, out, part = xs[comm.rank], np.empty(1000, np.float32), np.empty(500, np.float32)
        for name, y, how in (("reduce_scatter", part, {}), ("hierarchical_allreduce", out, between)):
            method = comm.quantized_reduce_scatter if name == "reduce_scatter" else comm.hierarchical_allreduce
            wanted = [method(x, y, codec=BOTH, key=name, lr=lr, **how).tobytes() for lr in (0.5, 0.25)]
            plan = comm.plan(name, 1000, codec=BOTH, key=f"plan of {name}", **how)
            assert [plan(x, y, lr=lr).tobytes() for lr in (0.5, 0.25)] == wanted
        other, pointers = 1 - comm.rank, (x.ctypes.data, out.ctypes.data)
        for lr in (0.5, 0.25):
            qccl.hierarchical_allreduce(
                *pointers, 1000, "float32", "avg", comm, codec=BOTH, key="p", lr=lr, node_ids=[0, 1]
            )
        assert out.tobytes() == wanted[1]
        model, replica, model2, replica2 = (np.zeros(1000, np.float32) for _ in range(4))
        for _ in range(2):
            comm.peer_exchange(x, send_to=[other], replicas={other: replica}, applied=model, codec=BOTH, key="q")
            addresses = {"replicas": {other: replica2.ctypes.data}, "applied": model2.ctypes.data}
            how = {"send_to": [other], "codec": BOTH, "key": "r", "async_op": True}
            qccl.peer_exchange(x.ctypes.data, 1000, "float32", comm, **how, **addresses).wait()
        with pytest.raises(qccl.InvalidBufferError, match=rf"replicas\[{other}\] is a null pointer"):
            qccl.peer_exchange(x.ctypes.data, 1000, "float32", comm, send_to=[other], replicas={other: 0})
        assert model.tobytes() == model2.tobytes() and replica.tobytes() == replica2.tobytes()

    qccl.run_ranks(2, calls)


@on_ranks(2)
def test_a_key_belongs_to_one_call(comm: qccl.Communicator) -> None:
    x, other = np.ones(4096, np.float32), 1 - comm.rank
    replicas, given = {other: np.zeros(4096, np.float32)}, {"codec": "minmax2+ef", "key": "a"}
    levels = {"node_ids": [0, 1], "algorithm": "two_round"}

    def refused(method: Callable, *arguments: Any, match: str, **how: Any) -> None:
        with pytest.raises(ArgumentError, match=match):
            method(*arguments, **given, **how)

    comm.quantized_reduce_scatter(x.copy(), **given)
    refused(comm.quantized_reduce_scatter, x.copy(), counts=[4000, 96], match=r"parts=None.*parts=\(4000, 96\)")
    refused(comm.quantized_allreduce, x.copy(), match="belongs to reduce_scatter.*this is allreduce")
    comm.reset("a")
    comm.hierarchical_allreduce(x.copy(), **levels, **given)
    refused(comm.hierarchical_allreduce, x.copy(), node_ids=[0, 1], match="algorithm=two_round.*algorithm=one_shot")
    comm.reset("a")
    comm.peer_exchange(x, send_to=[other], replicas=replicas, **given)
    refused(comm.peer_exchange, x, send_to=[], replicas={}, match=r"to \[[01]\].*to \[\], applied=False")
    comm.barrier()


def test_what_these_calls_refuse() -> None:
    def calls(comm: qccl.Communicator) -> None:
        x = np.ones(100, np.float32)
        with pytest.raises(ArgumentError, match="needs a name for the array: pass key="):
            comm.quantized_reduce_scatter(x, codec="onebit+ef")
        for method in (comm.quantized_reduce_scatter, comm.hierarchical_allreduce):
            with pytest.raises(ArgumentError, match=r"with op max does not; use onebit, or a collective with state"):
                method(x, codec="onebit+ef", key="a", op="max")
        for method in (comm.quantized_broadcast, comm.quantized_reduce):
            with pytest.raises(ArgumentError, match=r"onebit\+ef keeps its residual.*does not; use onebit"):
                method(x, codec="onebit+ef")

    for ranks in (1, 2):
        qccl.run_ranks(ranks, calls)


# -- the purpose: nothing is lost --------------------------------------------------------------------------------------

STEPS = 60


def undelivered(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """After STEPS calls with one input: what the sum of all results lacks, and what all residuals hold."""
    inputs = replace(case, data=("normal",)).inputs()[0]

    def calls(comm: qccl.Communicator) -> tuple[np.ndarray, np.ndarray]:
        received, sent = 0.0, np.zeros(case.count)
        for _ in range(STEPS):
            received = received + to_float(call(case, comm, inputs[comm.rank])[0], case.dtype).astype(np.float64)
        values = kept_by(comm)["a"]["values"]
        return received, values["residual"].astype(np.float64) if "residual" in values else sent

    found = qccl.run_ranks(case.ranks, calls)
    results, held = [y for y, _ in found], [e for _, e in found]
    if case.name == "peer_exchange":
        return np.stack([STEPS * x - y for x, y in zip(inputs, results, strict=True)]), np.stack(held)
    whole = np.concatenate(results) if case.name == "reduce_scatter" else results[0]
    return STEPS * sum(x.astype(np.float64) for x in inputs) - whole, sum(held)


#: one codec for both rounds, or one for each
CODECS = ("minmax2:bucket=64", "topk:k=0.1,block=128")
PAIRS = ("topk:k=8,block=128,values=exp4/k=32", "trellis2:bucket=256/trellis4:bucket=384", "none/minmax2:bucket=64")
PAIRS += ("topk:k=5,block=64/none",)
CASES = [case for codec in CODECS for case in with_state(f"{codec}+ef")]
CASES += [case for codec in PAIRS for case in with_state(f"{codec}+ef")[:-1] if case.algorithm == "two_round"]
CASES += with_state("minmax2:bucket=64+ef", dtype="float16")[:1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_lack_exactly_what_the_residuals_hold(case: Case) -> None:
    """So the running mean becomes exact: what is missing does not grow with the number of calls."""
    lack, held = undelivered(case)
    assert np.abs(lack - held).max() < STEPS * 5 * 40 * 2.0**-24
    assert 0.1 < np.abs(held).max() < 60
