"""Ranks that cannot reach each other, and a relay: wires, the meeting, membership. No test needs root."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import patience
import pytest
from clocks import Clock
from relays import KEY, TOKEN, hidden, hide, running, token_relay_key, use, wait_for
from wan_groups import group
from wan_wires import Lost, Wire

import qccl
from qccl import ArgumentError, CollectiveTimeout, EngineError
from qccl.transports import relayed, rendezvous
from qccl.transports.relayed import Relay, RelayListener, Ways, relay_of
from qccl.transports.rendezvous import Rendezvous
from qccl.transports.secret import Secret, derive, token_key
from qccl.transports.sockets import listen

SECRET = Secret(bytes(range(32)))


# -- wires -------------------------------------------------------------------------------------------------------------


def wires(place, size=2, *, is_reachable=False, connections=1, key=KEY, away_seconds=60.0):
    """Wires of one group that know the relay."""
    relay = (place[0], str(place[1]), key, derive(SECRET, "relay wan"))
    found = [
        Wire(connections, away_seconds, is_reachable=is_reachable, secret=SECRET, relay=relay) for _ in range(size)
    ]
    addresses = [each.native.address() for each in found]
    for rank, each in enumerate(found):
        each.connect(rank, addresses)
    return found


def exchange(found, nbytes=200_000, turns=3, seconds=60.0):
    """Each wire sends to each other one, and gets the right bytes."""
    limit = patience.Limit(seconds)
    for turn in range(turns):
        sent = {(a, b): os.urandom(nbytes) for a in range(len(found)) for b in range(len(found)) if a != b}
        tokens = {(a, b): found[b].receive(a, nbytes, turn) for a, b in sent}
        for (a, b), data in sent.items():
            found[a].send(b, data, turn)
        while not all(token in found[b].done for (_, b), token in tokens.items()):
            assert limit.left()
            for each in found:
                each.nap()
        for (a, b), token in tokens.items():
            assert found[b].data(token) == sent[a, b]


@pytest.mark.parametrize("size", [2, 3])
def test_wires_that_cannot_reach_each_other_go_by_the_relay(size):
    with running() as relay:
        found = wires(relay.place, size, connections=3)
        exchange(found)
        assert [each.native.relayed() for each in found] == [[b for b in range(size) if b != a] for a in range(size)]
        for each in found:
            each.close()
        wait_for(lambda: relay.totals()[:2] == (0, 0), "the relay has nothing left")


def test_direct_connections_are_preferred():
    with running() as relay:
        found = wires(relay.place, is_reachable=True, connections=3)
        exchange(found)
        assert [each.native.relayed() for each in found] == [[], []]
        assert relay.totals().joined == 0
        for each in found:
            each.close()


def test_the_relay_cannot_be_used_without_its_key_and_the_error_says_so():
    with running() as relay:
        found = wires(relay.place, key=bytes(32), away_seconds=4.0)
        found[0].receive(1, 10)
        with pytest.raises(Lost, match="away for too long, also by the relay: the relay does not know this job"):
            while True:
                for each in found:
                    each.nap()
        assert relay.totals().joined == 0


def test_the_error_says_that_the_other_one_did_not_come_to_the_relay():
    with running() as relay:
        place = relay.place
        first, second = wires(place, away_seconds=4.0)
        second.close()
        first.receive(1, 10)
        with pytest.raises(Lost, match="away for too long, and did not come to the relay"):
            while True:
                first.nap()
    first, _ = wires(place, away_seconds=4.0)
    first.receive(1, 10)
    with pytest.raises(Lost, match="away for too long, and the relay cannot be reached"):
        while True:
            first.nap()


def test_a_relay_that_is_started_again():
    with running() as relay:
        place = relay.place
        found = wires(place, connections=2)
        exchange(found, turns=1)
    for each in found:
        each.nap()
    with running(place=place) as relay:
        exchange(found)
        assert relay.totals().joined >= 1
        for each in found:
            each.close()


def test_calls_go_on_when_the_relay_is_started_again(monkeypatch):
    """In the middle of them, three times; every bit is checked."""
    hide(monkeypatch)
    with running(token_relay_key()) as relay:
        place = relay.place
        use(monkeypatch, place)
        stack = group(2, SECRET)
        ranks = stack.__enter__()
    try:
        for _ in range(3):
            before = list(ranks.calls)
            with running(token_relay_key(), place=place) as relay:
                wait_for_calls(ranks, before)
                assert relay.totals().joined > 0
    finally:
        with running(token_relay_key(), place=place):
            stack.__exit__(None, None, None)


def wait_for_calls(ranks, before):
    limit = patience.Limit(60)
    while not all(now > then + 2 for now, then in zip(ranks.calls, before, strict=True)):
        assert limit.left(), "the ranks do not go on"
        assert not any(end.done() for end in ranks.ends), [end.exception() for end in ranks.ends]
        time.sleep(0.01)


# -- sockets -----------------------------------------------------------------------------------------------------------


def of(place, key=KEY):
    return Relay(place, Secret(key), "the relay")


def test_ways_by_the_relay(monkeypatch):
    with running() as relay:
        ways = Ways(of(relay.place), SECRET, "test")
        with hidden("127.0.0.1") as server:
            place = server.getsockname()[:2]
            with (
                ways.listener(server.dup(), place) as listener,
                ThreadPoolExecutor(1) as pool,
                monkeypatch.context() as patch,
            ):
                patch.setattr(relayed, "_RELAY_SECONDS", 60.0)
                assert isinstance(listener, RelayListener)
                for _ in range(6):  # more than wait at once
                    call = pool.submit(ways.connect, place, 5.0)
                    accepted = accept(listener)
                    with call.result(60) as caller, accepted:
                        assert ways.needs_relay(place)
                        caller.sendall(b"hello")
                        accepted.settimeout(60)
                        assert accepted.recv(5) == b"hello"
                assert not ways.has_ended(place)
            wait_for(lambda: ways.has_ended(place), "the relay knows that the listener has ended")
        with pytest.raises(ConnectionRefusedError) as raised:
            ways.connect(place, 5.0)
        assert "by the relay" in raised.value.__notes__[0]


def accept(listener):
    limit = patience.Limit(60)
    while limit.left():
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            time.sleep(0.005)
        else:
            connection.setblocking(True)
            return connection
    raise AssertionError("nobody came")


def test_ways_that_are_direct_do_not_use_the_relay():
    with running() as relay:
        ways = Ways(of(relay.place), SECRET, "test")
        server = listen("127.0.0.1")
        place = server.getsockname()[:2]
        with ways.listener(server, place) as listener, ways.connect(place, 5.0), accept(listener):
            assert not ways.needs_relay(place)
            assert relay.totals().joined == 0


def test_a_listener_goes_on_without_a_relay_and_comes_back(monkeypatch):
    monkeypatch.setattr(relayed, "_RETRY_SECONDS", 0.05)
    with running() as relay:
        place = relay.place
    server = listen("127.0.0.1")
    with Ways(of(place), SECRET, "test").listener(server, ("host", 1)) as listener:
        with Ways().connect(server.getsockname()[:2], 5.0):
            accept(listener).close()
        with running(place=place) as relay:

            def look():
                with pytest.raises(BlockingIOError):
                    listener.accept()
                return relay.totals().waiting == relayed._WAITING

            wait_for(look, "its connections wait at the relay")


@pytest.mark.parametrize("text", ["here", "host:", "host:x", "host:70000", ":1"])
def test_a_relay_that_is_no_address(text):
    with pytest.raises(ArgumentError, match="is not the address of a relay"):
        relay_of({"QCCL_RELAY": text, "QCCL_TOKEN": TOKEN})


def test_a_relay_needs_a_token_and_a_host_that_exists():
    assert relay_of({"QCCL_TOKEN": TOKEN}) is None
    with pytest.raises(ArgumentError, match="QCCL_RELAY is set, but no token"):
        relay_of({"QCCL_RELAY": "127.0.0.1:1"})
    with pytest.raises(EngineError, match="cannot be found"):
        relay_of({"QCCL_RELAY": "no-such-host.invalid:1", "QCCL_TOKEN": TOKEN})
    found = relay_of({"QCCL_RELAY": "localhost:1", "QCCL_TOKEN": TOKEN})
    assert found is not None and found.place in (("127.0.0.1", 1), ("::1", 1))
    assert "secret" in repr(found)


# -- the meeting -------------------------------------------------------------------------------------------------------


def meet(place, size, timeout=60.0):
    key = derive(token_key(), "meeting")
    with ThreadPoolExecutor(size) as pool:
        met = [Rendezvous(rank, size, place, "job", key=key, relay=relay_of()) for rank in range(size)]
        calls = [pool.submit(each.gather, b"note %d" % rank, timeout) for rank, each in enumerate(met)]
        try:
            return [call.result(120) for call in calls]
        finally:
            for each in met:
                each.close()


@pytest.fixture
def numbers(monkeypatch):
    """Threads are no processes: each meeting of this test has the number 1 on all ranks."""
    monkeypatch.setattr(rendezvous, "_number", lambda *_: 1)


def test_a_meeting_by_the_relay(monkeypatch, numbers):
    hide(monkeypatch)
    with running(token_relay_key()) as relay:
        use(monkeypatch, relay.place)
        notes = [b"note %d" % rank for rank in range(4)]
        assert meet(("127.0.0.1", 1), 4) == [notes] * 4
        assert relay.totals().joined >= 3


def test_a_meeting_at_a_name_that_only_rank_0_knows(monkeypatch, numbers):
    hide(monkeypatch)
    with running(token_relay_key()) as relay:
        use(monkeypatch, relay.place)
        assert meet(("rank-0.invalid", 29500), 2) == [[b"note 0", b"note 1"]] * 2


def test_a_meeting_without_its_relay_says_so(monkeypatch, numbers):
    """The deadline ends after the first try."""
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(clock, "sleep", lambda seconds: setattr(clock, "ahead", 1000.0))
    with running(token_relay_key()) as relay:
        use(monkeypatch, relay.place)
    with pytest.raises(CollectiveTimeout, match=r"by the relay 127.0.0.1:\d+: .*refused"):
        Rendezvous(1, 2, ("127.0.0.1", 1), key=derive(token_key(), "meeting"), relay=relay_of()).gather(b"", 60.0)


# -- membership --------------------------------------------------------------------------------------------------------


def values(comm, count=1000):
    """Every rank's call gives the same sum."""
    x = np.full(count, comm.rank + 1, np.float32)
    comm.quantized_allreduce(x, codec="none")
    return float(x[0])


@pytest.mark.slow
def test_groups_grow_and_shrink_by_the_relay(monkeypatch):
    """Three ranks that nobody can call; one leaves, one joins."""
    hide(monkeypatch)
    with running(token_relay_key()) as relay:
        use(monkeypatch, relay.place)
        addresses, left = [], threading.Event()

        def stays(comm):
            assert values(comm) == 6.0
            if comm.rank == 0:
                addresses.append(comm.address)
            left.wait(60)
            smaller = comm.shrink(timeout=5)  # nobody sees from outside that the third one has ended
            assert (smaller.size, values(smaller)) == (2, 3.0)
            larger = smaller.grow(3, timeout=60)
            assert (larger.size, values(larger)) == (3, 6.0)
            larger.close()
            return True

        def leaves(comm):
            assert values(comm) == 6.0
            comm.close()
            left.set()
            return True

        def joins():
            left.wait(60)
            larger = qccl.join(addresses[0], timeout=60)
            assert (larger.size, values(larger)) == (3, 6.0)
            larger.close()
            return True

        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(rank_of_group, rank, 3, [stays, stays, leaves][rank]) for rank in range(3)]
            made.append(pool.submit(joins))
            assert all(each.result(120) for each in made)


#: of the group that the threads make
BARRIER, NOTES = threading.Barrier(3), [b""] * 3


def rank_of_group(rank, size, fn):
    from qccl.transports.wan import WanTransport

    def gather(note):
        NOTES[rank] = note
        BARRIER.wait(60)
        found = list(NOTES)
        BARRIER.wait(60)
        return found

    transport = WanTransport(gather, 60.0, is_local=True, secret=SECRET)
    return fn(qccl.Communicator.from_transport(transport, timeout=60))
