"""The loopback transport: rendezvous, order, sizes, groups, and failure."""

from __future__ import annotations

import ctypes

import numpy as np
import patience
import pytest
from thread_ranks import on_ranks
from threads import address, outcomes

from qccl.base.errors import ArgumentError, CollectiveTimeout, PeerLost
from qccl.transports.loopback import LoopbackGroup


def memory_of(x):
    return address(x), x.nbytes


def test_a_send_completes_only_when_it_was_received():
    group = LoopbackGroup(2)
    a, b = group.transport(0), group.transport(1)
    x, y = np.arange(10.0), np.zeros(10)
    a.send(1, 3, *memory_of(x), "sent")
    assert list(a.poll(idle=1)) == []
    b.receive(0, 3, *memory_of(y), "received")
    assert list(a.poll(idle=0)) == ["sent"]
    assert list(b.poll(idle=0)) == ["received"]
    np.testing.assert_array_equal(x, y)


def test_messages_keep_their_order_per_peer_and_tag():
    group = LoopbackGroup(2)
    a, b = group.transport(0), group.transport(1)
    data = [np.full(4, i, np.uint8) for i in range(4)]
    for i, x in enumerate(data):
        a.send(1, 7 + (i == 3), *memory_of(x), i)
    out = [np.zeros(4, np.uint8) for _ in data]
    for i in (3, 0, 1, 2):
        b.receive(0, 7 + (i == 3), *memory_of(out[i]), i)
    assert [int(each[0]) for each in out] == [0, 1, 2, 3]


def test_an_idle_poll_wakes_when_something_arrives_and_gives_up_soon():
    group = LoopbackGroup(2)
    a = group.transport(0)
    limit = patience.Limit(10)
    assert list(a.poll(idle=5)) == []
    assert limit.left()


def test_abort_withdraws_what_was_posted_but_delivers_last_words():
    group = LoopbackGroup(2)
    a, b = group.transport(0), group.transport(1)
    large, small, inbox = np.ones(10_000, np.uint8), np.full(16, 5, np.uint8), np.zeros(16, np.uint8)
    a.send(1, 0, *memory_of(small), "small")
    a.send(1, 1, *memory_of(large), "large")
    a.receive(1, 2, *memory_of(inbox), "in")
    a.abort("because")
    small[:] = 0  # the memory is the caller's again
    y = np.zeros(16, np.uint8)
    b.receive(0, 0, *memory_of(y), "words")
    b.send(0, 2, *memory_of(np.ones(16, np.uint8)), "lost")
    assert list(b.poll(idle=1)) == ["words"]
    assert (y == 5).all() and not inbox.any()
    with pytest.raises(PeerLost, match="rank 0 gave up: because"):
        b.poll(idle=1)


def test_allgather_and_split():
    def run(t):
        everyone = t.allgather(bytes([t.rank]) * t.rank, 5)
        part = t.split(t.rank % 2, -t.rank, 5)
        alone = t.split(None if t.rank else 0, 0, 5)
        return everyone, (part.rank, part.size, part.allgather(bytes([t.rank]), 5)), alone and alone.size

    results = outcomes(5, run)
    assert all(r[0] == [b"", b"\1", b"\2\2", b"\3" * 3, b"\4" * 4] for r in results)
    assert [r[1][:2] for r in results] == [(2, 3), (1, 2), (1, 3), (0, 2), (0, 3)]
    assert results[0][1][2] == [b"\4", b"\2", b"\0"]
    assert [r[2] for r in results] == [1, None, None, None, None]


def test_a_collective_has_a_deadline():
    error, _ = outcomes(2, lambda t: t.allgather(b"", 0.2) if t.rank == 0 else None)
    assert isinstance(error, CollectiveTimeout) and "[1]" in str(error)


def test_a_collective_ends_when_a_rank_gives_up():
    """It raises CollectiveTimeout at its deadline."""
    error, _ = outcomes(2, lambda t: t.allgather(b"", 20) if t.rank == 0 else t.abort("no more"))
    assert isinstance(error, PeerLost)


def test_refusals():
    with pytest.raises(ArgumentError, match="at least 1 rank, not 0"):
        LoopbackGroup(0)
    with pytest.raises(ArgumentError, match="rank 2 is not one of the 2 ranks"):
        LoopbackGroup(2).transport(2)


def test_empty_messages():
    group = LoopbackGroup(2)
    a, b = group.transport(0), group.transport(1)
    memory = ctypes.create_string_buffer(1)
    b.receive(0, 1, ctypes.addressof(memory), 0, "in")
    a.send(1, 1, ctypes.addressof(memory), 0, "out")
    assert (list(b.poll(idle=0)), list(a.poll(idle=0))) == (["in"], ["out"])


@on_ranks(2)
def test_a_rank_that_gave_up_is_named_once(comm):
    """Also by the transport, if it reports the end before the control message has arrived."""
    if comm.rank == 0:
        comm.abort("no more")
        return
    comm.transport.progress_hook = lambda: None
    with pytest.raises(PeerLost) as caught:
        comm.transport.allgather(b"", 20)
    assert (str(caught.value), caught.value.rank, caught.value.reason) == ("rank 0 gave up: no more", 0, "no more")
