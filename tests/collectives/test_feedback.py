"""All-reduce with error feedback and momentum: exact results and state; saving, loading and losing state."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
from cases import NUMPY, hard_data
from laws import assert_same_bits, stored
from oracle_feedback import Group

import qccl
from qccl.engine.control import CONTROL_TAG
from qccl.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost
from qccl.transports.loopback import LoopbackGroup, LoopbackTransport

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


def kept_by(comm: qccl.Communicator) -> dict:
    return comm.state_dict()["keys"]


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


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"key": None}, r"minmax2\+ef keeps its residual from call to call.*key='layer1.weight'"),
        ({"key": 3}, "key must be a string that names the array, not 3"),
        ({"key": b"a"}, "key must be a string"),
        ({"op": "max"}, r"allreduce with op max does not; use minmax2, or a collective with state"),
        ({"op": 3}, "op min does not"),
        ({"lr": 0}, "lr must be a positive number"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"lr": "0.1"}, "lr must be"),
        ({"lr": True}, "lr must be"),
        ({"codec": "minmax3+ef"}, r"key='a' belongs to allreduce\(count=100.*minmax2\+ef.*and this is.*minmax3\+ef"),
        ({"codec": "minmax2+ef+nesterov"}, r"forget the state with reset\('a'\)"),
        ({"op": "avg"}, "op=sum.*and this is.*op=avg"),
        ({"algorithm": "two_round"}, "algorithm=one_shot.*and this is.*algorithm=two_round"),
        ({"x": np.zeros(99, np.float32)}, "count=100.*and this is.*count=99.*use another key for each array"),
        ({"x": np.zeros(100, np.float16)}, "dtype=float32.*and this is.*dtype=float16"),
        ({"x": np.zeros((10, 10), np.float32).T}, "and this is.*order=axes"),
        ({"lr": 0.5}, "earlier calls with key='a' were made without lr, and this one is not"),
    ],
    ids=str,
)
def test_what_a_call_may_not_be(arguments, reason):
    def calls(comm: qccl.Communicator) -> None:
        given = {"codec": "minmax2+ef", "key": "a", "algorithm": "one_shot"}
        comm.quantized_allreduce(np.ones(100, np.float32), **given)
        before = kept_by(comm)
        given |= arguments
        x = given.pop("x", np.ones(100, np.float32))
        with pytest.raises(ArgumentError, match=reason):
            comm.quantized_allreduce(x, **given)
        after = kept_by(comm)["a"]["values"]["residual"]
        assert after.tobytes() == before["a"]["values"]["residual"].tobytes()
        comm.quantized_allreduce(np.ones(100, np.float32), codec="minmax2+ef", key="a", algorithm="one_shot")

    qccl.run_ranks(2, calls)


def test_keys_and_learning_rates_of_plain_codecs_do_nothing():
    def call(comm: qccl.Communicator) -> None:
        for key in ("a", None):
            assert comm.quantized_allreduce(np.ones(3, np.float32), key=key, lr=0.5, codec="none")[0] == 2
        assert kept_by(comm) == {}

    qccl.run_ranks(2, call)


@pytest.mark.parametrize("changed", [{"key": "b"}, {"lr": 0.5}, {"codec": "minmax2+nesterov"}], ids=str)
def test_ranks_must_agree_on_what_the_state_follows_from(changed):
    def call(comm: qccl.Communicator) -> None:
        given = {"codec": "minmax2+ef", "key": "a", "lr": 0.25} | (changed if comm.rank else {})
        comm.quantized_allreduce(np.ones(100, np.float32), **given)

    with pytest.raises(MismatchError, match="do not agree"):
        qccl.run_ranks(2, call)


def test_a_learning_rate_is_the_number_however_it_is_held():
    def call(comm: qccl.Communicator) -> None:
        for lr in ((1, 1.0), (np.float64(0.1), 0.1)):
            comm.quantized_allreduce(np.ones(100, np.float32), codec="minmax2+ef", key="a", lr=lr[comm.rank])

    qccl.run_ranks(2, call)


def test_other_collectives_refuse_state():
    def call(comm: qccl.Communicator) -> None:
        x = np.ones(100, np.float32)
        for method in (comm.quantized_broadcast, comm.quantized_reduce):
            with pytest.raises(ArgumentError, match=r"onebit\+ef keeps its residual.*does not; use onebit"):
                method(x, codec="onebit+ef")

    for ranks in (1, 2):
        qccl.run_ranks(ranks, call)


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


def test_a_call_that_is_refused_changes_nothing():
    def call(comm: qccl.Communicator) -> None:
        x = np.ones(100, np.float32)
        with pytest.raises(ArgumentError, match="stream"):
            comm.quantized_allreduce(x, codec="minmax2+ef", key="a", lr=0.5, stream=5)
        assert kept_by(comm) == {}
        comm.quantized_allreduce(x, codec="minmax2+ef", key="a")

    qccl.run_ranks(2, call)


def test_a_call_that_fails_changes_nothing():
    codec = "minmax2:bucket=64+ef"

    def call(comm: qccl.Communicator) -> None:
        comm.quantized_allreduce(np.arange(300, dtype=np.float32), codec=codec, key="a")
        before = kept_by(comm)
        if comm.rank == 0:
            with pytest.raises((CollectiveTimeout, PeerLost)):
                comm.quantized_allreduce(np.ones(300, np.float32), codec=codec, key="a", timeout=0.2)
        else:
            with pytest.raises(PeerLost):  # rank 0 gave up
                comm.barrier()
        after = kept_by(comm)
        assert after["a"]["values"]["residual"].tobytes() == before["a"]["values"]["residual"].tobytes()
        assert after["a"]["values"]["residual"].any()

    with pytest.raises((CollectiveTimeout, PeerLost, MismatchError)):
        qccl.run_ranks(2, call)


class HoldsHeaders(LoopbackTransport):
    """A transport whose ``held`` peers seem not to get this rank's headers."""

    held: tuple[int, ...] = ()
    tokens: tuple[object, ...] = ()

    def send(self, peer, tag, address, nbytes, token):
        if peer in self.held and tag == CONTROL_TAG:
            self.tokens = (token,)
        super().send(peer, tag, address, nbytes, token)

    def poll(self, *, idle):
        return [token for token in super().poll(idle=idle) if token not in self.tokens]


def test_a_call_that_fails_when_only_a_header_is_left_to_send_changes_nothing(monkeypatch):
    """In a peer exchange a rank sends ranks that are no neighbours a header alone."""
    monkeypatch.setattr(LoopbackGroup, "transport", lambda group, rank: HoldsHeaders(group, rank))

    def run(comm):
        z, others = np.ones(100, np.float32), {1: {0: np.zeros(100, np.float32)}}
        options = {"send_to": [1] if comm.rank == 0 else [], "replicas": others.get(comm.rank, {})}
        options |= {"codec": "minmax2+ef", "key": "a"}
        comm.peer_exchange(z, **options)
        before = kept_by(comm)
        comm.barrier()
        if comm.rank:
            with contextlib.suppress(PeerLost):
                comm.peer_exchange(3 * z, **options)
            return
        comm.transport.held = (2,)
        with pytest.raises(CollectiveTimeout, match="every rank has made this call"):
            comm.peer_exchange(np.linspace(0, 1, 100, dtype=np.float32), timeout=0.3, **options)
        assert np.array_equal(kept_by(comm)["a"]["values"]["residual"], before["a"]["values"]["residual"])

    qccl.run_ranks(3, run, timeout=20)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda s: [s], "the keys' state is a dict by key, not list"),
        (lambda s: s | {"a": {}}, "the state of key='a' is not one that state_dict.. returns"),
        (lambda s: s | {"a": 3}, "is not one that state_dict"),
        (lambda s: s | {"a": s["a"] | {"rank": 1 - s["a"]["rank"]}}, "belongs to rank . of 2, and this is rank . of 2"),
        (lambda s: s | {"a": s["a"] | {"size": 3}}, "of 3, and this is"),
        (lambda s: s | {"a": s["a"] | {"rank": np.ones(2)}}, "belongs to rank None"),
        (lambda s: s | {"a": s["a"] | {"call": 3}}, "is not one that state_dict"),
        (lambda s: s | {"a": s["a"] | {"lr": "no"}}, "is not one that state_dict"),
        (lambda s: s | {7: s["a"]}, "is not one that state_dict"),
        (lambda s: s | {"a": s["a"] | {"values": {7: np.zeros(100, np.float32)}}}, "is not one that state_dict"),
        *(
            (lambda s, wrong=wrong: s | {"a": s["a"] | {"values": {"residual": wrong}}}, "is not one that state_dict")
            for wrong in (
                "x",
                ["1.5"] * 100,
                np.zeros(100, np.complex64),
                np.zeros(100, bool),
                np.full(100, np.nan, np.float32),
                np.full(100, -np.inf),
                np.full(100, 1e300),
                np.full(100, 0.1),
                np.zeros((2, 50), np.float32),
            )
        ),
    ],
)
def test_wrong_states_are_not_loaded(spoil, reason):
    def call(comm: qccl.Communicator) -> None:
        comm.quantized_allreduce(np.arange(100, dtype=np.float32), codec="minmax2+ef", key="a")
        saved = comm.state_dict()
        before = saved["keys"]["a"]["values"]["residual"]
        with pytest.raises(ArgumentError, match=reason):
            comm.load_state_dict(saved | {"calls": 7, "keys": spoil(saved["keys"])})
        for wrong in ([saved], saved["keys"], *(saved | {"calls": n} for n in (-1, None, 1 << 63, 1 << 64))):
            with pytest.raises(ArgumentError, match="state"):
                comm.load_state_dict(wrong)
        assert comm.calls == saved["calls"] == 1
        assert kept_by(comm)["a"]["values"]["residual"].tobytes() == before.tobytes()
        comm.load_state_dict(saved | {"keys": {"a": saved["keys"]["a"] | {"values": {"residual": before[:50]}}}})
        with pytest.raises(ArgumentError, match=r"numbers of elements .*50.* needs .*100.*reset\('a'\)"):
            comm.quantized_allreduce(np.ones(100, np.float32), codec="minmax2+ef", key="a")

    qccl.run_ranks(2, call)
