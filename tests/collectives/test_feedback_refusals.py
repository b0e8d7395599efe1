"""Calls with state that are refused or fail, and states that are not loaded: nothing changes."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from collective_cases import kept_by
from thread_ranks import on_ranks
from threads import hear

import qccl
from qccl.base.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost
from qccl.engine.control import CONTROL_TAG
from qccl.transports.loopback import LoopbackGroup, LoopbackTransport


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"key": None}, r"minmax2\+ef keeps its residual from call to call.*key='layer1.weight'"),
        ({"key": 3}, "key must be a string that names the array, not 3"),
        ({"op": "max"}, r"allreduce with op max does not; use minmax2, or a collective with state"),
        ({"op": 3}, "op min does not"),
        ({"lr": 2.0**-121}, "lr must be the present learning rate, 0 or a positive number"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
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
@on_ranks(2)
def test_what_a_call_may_not_be(comm: qccl.Communicator, arguments, reason):
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


@pytest.mark.parametrize("changed", [{"key": "b"}, {"lr": 0.5}, {"codec": "minmax2+nesterov"}], ids=str)
def test_ranks_must_agree_on_what_the_state_follows_from(changed):
    def call(comm: qccl.Communicator) -> None:
        given = {"codec": "minmax2+ef", "key": "a", "lr": 0.25} | (changed if comm.rank else {})
        comm.quantized_allreduce(np.ones(100, np.float32), **given)

    with pytest.raises(MismatchError, match="do not agree"):
        qccl.run_ranks(2, call)


@on_ranks(2)
def test_a_call_that_is_refused_changes_nothing(comm: qccl.Communicator):
    x = np.ones(100, np.float32)
    with pytest.raises(ArgumentError, match="stream"):
        comm.quantized_allreduce(x, codec="minmax2+ef", key="a", lr=0.5, stream=5)
    assert kept_by(comm) == {}
    comm.quantized_allreduce(x, codec="minmax2+ef", key="a")


@on_ranks(2)
def test_a_call_that_fails_changes_nothing(comm: qccl.Communicator, missed: threading.Event):
    codec = "minmax2:bucket=64+ef"
    comm.quantized_allreduce(np.arange(300, dtype=np.float32), codec=codec, key="a")
    before = kept_by(comm)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout):
            comm.quantized_allreduce(np.ones(300, np.float32), codec=codec, key="a", timeout=0.2)
        missed.set()
    else:
        assert missed.wait(60)
        with pytest.raises(PeerLost):  # rank 0 gave up
            comm.quantized_allreduce(np.ones(300, np.float32), codec=codec, key="a")
    after = kept_by(comm)
    assert after["a"]["values"]["residual"].tobytes() == before["a"]["values"]["residual"].tobytes()
    assert after["a"]["values"]["residual"].any()


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
        hear(comm._session.engine, 2)  # else it might miss a rank
        comm.transport.held = (2,)
        with pytest.raises(CollectiveTimeout, match="every rank has made this call"):
            comm.peer_exchange(np.linspace(0, 1, 100, dtype=np.float32), timeout=0.3, **options)
        assert np.array_equal(kept_by(comm)["a"]["values"]["residual"], before["a"]["values"]["residual"])

    qccl.run_ranks(3, run, timeout=20)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda s: [s], "the state must be a dict by key, not list"),
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
@on_ranks(2)
def test_wrong_states_are_not_loaded(comm: qccl.Communicator, spoil, reason):
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
