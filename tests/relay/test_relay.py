"""The relay: who is joined to whom, what is forwarded, and what attackers achieve."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import socket
import struct
import threading
from contextlib import ExitStack, suppress

import pytest
from relays import KEY, NAME, Client, joined, running, wait_for

from qccl.relay import pair, server
from qccl.relay.jobs import Job
from qccl.relay.server import Limits
from qccl.transports.relay_protocol import ENDED, FULL, GREETING_NBYTES, JOINED, NO_KEY, NOT_ENDED, Hello, Role

OTHER = hashlib.sha256(b"another").digest()


@pytest.fixture(autouse=True)
def patient_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process may take long to say who it is."""
    monkeypatch.setattr(server, "HELLO_SECONDS", 60.0)


def exchange(one: Client, other: Client, nbytes: int = 1 << 20) -> None:
    """Both send at the same time, and get each other's bytes."""
    sent = [os.urandom(nbytes), os.urandom(nbytes)]
    threads = [threading.Thread(target=each.say, args=(data,)) for each, data in zip((one, other), sent, strict=True)]
    for thread in threads:
        thread.start()
    found = [b"", b""]
    reader = threading.Thread(target=lambda: found.__setitem__(0, one.hear(nbytes)))
    reader.start()
    found[1] = other.hear(nbytes)
    for thread in (*threads, reader):
        thread.join(60)
    assert found == sent[::-1]


# -- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sole", [False, True])
def test_two_connections_with_one_name_are_joined(is_sole):
    with running() as relay, joined(relay.place, is_sole=is_sole) as (caller, listener):
        exchange(caller, listener)
        assert relay.totals()[:2] == (1, 0)
        wait_for(lambda: relay.totals().nbytes == 2 << 20, "all bytes are counted")


def test_the_end_of_one_side_comes_after_its_bytes():
    with running() as relay, joined(relay.place) as (caller, listener):
        data = os.urandom(300_000)
        caller.say(data)
        caller.socket.shutdown(socket.SHUT_WR)
        assert listener.hear(len(data) + 1) == data  # and then the end
        listener.say(b"answer")
        listener.socket.shutdown(socket.SHUT_WR)
        assert caller.hear(7) == b"answer"
        wait_for(lambda: relay.totals().pairs == 0, "the pair ends")


def test_a_broken_connection_ends_the_other_one():
    with running() as relay, joined(relay.place) as (caller, listener):
        caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.socket.close()  # resets it
        assert listener.hear() == b""
        wait_for(lambda: relay.totals()[:2] == (0, 0), "nothing is left")


def test_the_same_role_or_another_name_is_not_joined():
    with running() as relay, ExitStack() as stack:
        for role, name in (
            (Role.CALLER, NAME),
            (Role.CALLER, NAME),
            (Role.LISTENER, OTHER),
            (Role.SOLE_LISTENER, NAME),
        ):
            stack.enter_context(Client(relay.place, role, name))
        wait_for(lambda: relay.totals().waiting == 4, "all wait")
        assert relay.totals().pairs == 0


def test_a_caller_is_joined_to_the_listener_that_came_last():
    with (
        running() as relay,
        Client(relay.place, Role.LISTENER) as first,
    ):
        wait_for(lambda: relay.totals().waiting == 1, "the first waits")
        with Client(relay.place, Role.LISTENER) as second:
            wait_for(lambda: relay.totals().waiting == 2, "the second waits")
            with Client(relay.place, Role.CALLER) as caller:
                assert caller.hear() == second.hear() == JOINED
                exchange(caller, second, 1000)
        with Client(relay.place, Role.CALLER) as caller:
            assert caller.hear() == first.hear() == JOINED


def test_a_sole_connection_ends_its_predecessor():
    with running() as relay, joined(relay.place, is_sole=True) as (caller, listener), ExitStack() as stack:
        waits = stack.enter_context(Client(relay.place, Role.SOLE_CALLER))
        assert caller.hear() == listener.hear() == b""
        again = stack.enter_context(Client(relay.place, Role.SOLE_CALLER))
        assert waits.hear() == b""
        listens = stack.enter_context(Client(relay.place, Role.SOLE_LISTENER))
        assert again.hear() == listens.hear() == JOINED
        exchange(again, listens, 1000)


def test_one_that_has_gone_is_not_joined():
    with running() as relay:
        Client(relay.place, Role.LISTENER).socket.close()
        wait_for(lambda: relay.totals()[1:3] == (0, 0), "it is forgotten")
        with joined(relay.place) as (caller, listener):
            exchange(caller, listener, 1000)


def asked(place, name=NAME) -> bytes:
    with Client(place, Role.ASKER, name) as client:
        return client.hear()


def test_the_end_of_a_process_is_known_when_all_its_connections_were_closed():
    with running() as relay:
        first, second = Client(relay.place, Role.LISTENER), Client(relay.place, Role.LISTENER)
        wait_for(lambda: relay.totals().waiting == 2, "both wait")
        first.socket.close()
        wait_for(lambda: relay.totals().waiting == 1, "one has gone")
        assert asked(relay.place) == NOT_ENDED
        second.socket.close()
        wait_for(lambda: asked(relay.place) == ENDED, "the process has ended")
        assert asked(relay.place, OTHER) == NOT_ENDED
        with Client(relay.place, Role.LISTENER):
            wait_for(lambda: asked(relay.place) == NOT_ENDED, "it is there again")


def test_a_broken_connection_is_not_the_end_of_a_process():
    with running() as relay, Client(relay.place, Role.LISTENER) as client:
        wait_for(lambda: relay.totals().waiting == 1, "it waits")
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()  # by a reset
        wait_for(lambda: relay.totals().waiting == 0, "it has gone")
        assert asked(relay.place) == NOT_ENDED


def test_so_many_ended_processes_are_remembered(monkeypatch):
    monkeypatch.setattr(server, "MOST_ENDED", 1)
    with running() as relay:
        for name in (NAME, OTHER):
            with Client(relay.place, Role.LISTENER, name):
                wait_for(lambda: relay.totals().waiting == 1, "it waits")
            wait_for(lambda: asked(relay.place, name) == ENDED, "it has ended")  # noqa: B023
        assert asked(relay.place) == NOT_ENDED


def test_each_pair_has_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, "qccl.relay")
    with running() as relay:
        with joined(relay.place) as (caller, listener):
            caller.say(b"three")
            assert listener.hear(5) == b"three"
            port = caller.socket.getsockname()[1]
        wait_for(lambda: relay.totals().pairs == 0, "the pair ends")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert f"127.0.0.1:{port} and 127.0.0.1:" in lines[0] and "5 bytes there and 0 back" in lines[0]


# -- attacks -----------------------------------------------------------------------------------------------------------

STRANGERS = {
    "noise": random.Random(0).randbytes(10_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n" * 10,
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\n\r\n" + bytes(100),
    "SOCKS": b"\x05\x01\x00" + bytes(100),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "zeros": bytes(81),
    "an unknown role": b"qccl/rl1" + b"x" + bytes(72),
    "another version": b"qccl/rl0" + b"c" + bytes(72),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_dropped(name):
    with running() as relay, joined(relay.place) as (caller, listener), Client(relay.place) as stranger:
        assert len(stranger.hear(GREETING_NBYTES)) == GREETING_NBYTES
        with suppress(OSError):
            stranger.say(STRANGERS[name])
        assert stranger.hear() in (b"", NO_KEY)
        exchange(caller, listener, 100_000)
        assert relay.totals().refused == 1


def test_silent_and_half_open_callers_have_some_seconds(monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.2)
    with running() as relay, Client(relay.place) as silent, Client(relay.place) as half:
        half.say(b"qccl/rl1c")
        assert silent.hear(GREETING_NBYTES + 1)[GREETING_NBYTES:] == b""
        assert half.hear(GREETING_NBYTES + 1)[GREETING_NBYTES:] == b""
        wait_for(lambda: relay.totals().unknown == 0, "both are forgotten")


def test_two_thousand_silent_connections():
    """From one host: they take the places of each other, and the ranks go on and meet."""
    with running() as relay, joined(relay.place) as (caller, listener), ExitStack() as stack:
        for _ in range(2000):
            with suppress(OSError):
                stack.enter_context(Client(relay.place))
        exchange(caller, listener, 100_000)
        with joined(relay.place, OTHER) as (another, one):
            exchange(another, one, 100_000)
        assert relay.totals().unknown <= server.MOST_UNKNOWN


def test_the_host_with_most_callers_loses_one(monkeypatch):
    """So a flood does not drop a rank that calls from elsewhere."""
    monkeypatch.setattr(server, "MOST_UNKNOWN", 10)
    with running(place=("", 0)) as relay, ExitStack() as stack:
        port = relay.place[1]
        rank = stack.enter_context(Client(("127.0.0.2", port)))
        wait_for(lambda: relay.totals().unknown == 1, "the rank's connection is there")
        for _ in range(50):
            flood = socket.socket()
            flood.bind(("127.0.0.3", 0))
            flood.connect(("127.0.0.2", port))
            stack.enter_context(flood)
        rank.say(Hello.make(Role.CALLER, NAME, KEY, rank.hear(GREETING_NBYTES)).packed())
        wait_for(lambda: relay.totals().waiting == 1, "the rank is heard")


def test_who_has_no_key_is_refused():
    with running() as relay, joined(relay.place) as (caller, listener):
        with Client(relay.place, Role.CALLER, key=OTHER) as stranger:
            assert stranger.hear(2) == NO_KEY
        with Client(relay.place) as stranger:
            hello = Hello.make(Role.CALLER, NAME, KEY, stranger.hear(GREETING_NBYTES))
            stranger.say(hello._replace(proof=bytes(32)).packed())
            assert stranger.hear(2) == NO_KEY
        exchange(caller, listener, 1000)


def test_what_was_said_once_cannot_be_said_again():
    """Nor under another name or role."""
    with running() as relay, Client(relay.place) as honest:
        hello = Hello.make(Role.LISTENER, NAME, KEY, honest.hear(GREETING_NBYTES))
        honest.say(hello.packed())
        wait_for(lambda: relay.totals().waiting == 1, "the rank waits")
        with Client(relay.place) as repeats:
            repeats.hear(GREETING_NBYTES)
            repeats.say(hello.packed())
            assert repeats.hear(2) == NO_KEY
        for change in ({"name": OTHER}, {"role": Role.CALLER}):
            with Client(relay.place) as changes:
                own = Hello.make(Role.LISTENER, NAME, KEY, changes.hear(GREETING_NBYTES))
                changes.say(own._replace(**change).packed())
                assert changes.hear(2) == NO_KEY


def test_a_rank_of_another_job_is_not_joined_though_it_knows_the_name():
    with (
        running(KEY, OTHER) as relay,
        Client(relay.place, Role.LISTENER) as rank,
        Client(relay.place, Role.CALLER, key=OTHER),
    ):
        wait_for(lambda: relay.totals().waiting == 2, "both wait")
        with Client(relay.place, Role.CALLER) as caller:
            assert caller.hear() == rank.hear() == JOINED
            exchange(caller, rank, 1000)


def test_a_caller_that_waits_must_not_speak():
    with running() as relay, Client(relay.place, Role.CALLER) as early:
        early.say(b"x" * 1000)
        assert early.hear() == b""
        wait_for(lambda: relay.totals()[1:3] == (0, 0), "it is forgotten")


def test_a_job_has_so_many_connections():
    limits = Limits(connections=6, of_a_job=4)
    with running(KEY, OTHER, limits=limits) as relay, ExitStack() as stack:
        for i in range(4):
            stack.enter_context(Client(relay.place, Role.LISTENER, bytes([i]) * 32))
        wait_for(lambda: relay.totals().waiting == 4, "four wait")
        with Client(relay.place, Role.LISTENER) as fifth:
            assert fifth.hear(2) == FULL
        with joined(relay.place, key=OTHER) as (caller, listener):  # the other job is not hindered
            exchange(caller, listener, 1000)
            with Client(relay.place, Role.LISTENER, key=OTHER) as seventh:
                assert seventh.hear(2) == FULL
        wait_for(lambda: relay.totals().pairs == 0, "the pair ends")
        with joined(relay.place, key=OTHER) as (caller, listener):
            exchange(caller, listener, 1000)


def test_a_name_has_so_many_that_wait(monkeypatch):
    monkeypatch.setattr(server, "MOST_OF_A_NAME", 2)
    with running() as relay, ExitStack() as stack:
        clients = []
        for i in range(3):
            clients.append(stack.enter_context(Client(relay.place, Role.CALLER)))
            wait_for(lambda i=i: relay.totals().waiting == min(i + 1, 2), "it waits")
        assert clients[0].hear(2) == FULL


def test_a_slow_reader_stops_its_sender_and_nobody_else():
    with running() as relay, joined(relay.place) as (caller, _):
        caller.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                caller.say(bytes(1 << 20))
        (stopped,) = relay._pairs
        assert sum(len(side.rest) for side in stopped.sides) <= pair._PART_NBYTES
        assert not any(side.is_dead() for side in stopped.sides)
        with joined(relay.place, OTHER) as (another, one):
            exchange(another, one)


def test_a_machine_that_confirms_nothing_is_gone(monkeypatch, caplog):
    """A pair whose other machine was switched off. The counter is TCP's; here it is made up."""
    caplog.set_level(logging.INFO, "qccl.relay")
    monkeypatch.setattr(server, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(pair, "_MOST_RETRANSMITS", 0)
    with running() as relay, joined(relay.place) as (caller, listener):
        assert caller.hear() == listener.hear() == b""
        assert relay.totals().pairs == 0
    assert caplog.records[0].message.endswith("is gone")


def test_a_job_that_has_used_up_its_rate_waits():
    job = Job(KEY)
    assert job.may_send(None) and job.may_send(1000)
    job.spend(10_000_000)
    assert not job.may_send(1000)
    assert job.may_send(None)


def test_a_rate_changes_no_bytes():
    with running(limits=Limits(rate=20e6)) as relay, joined(relay.place) as (caller, listener):
        exchange(caller, listener, 2 << 20)


def test_an_idle_pair_ends():
    with running(limits=Limits(idle_seconds=0.1)) as relay, joined(relay.place) as (caller, listener):
        assert caller.hear() == listener.hear() == b""
        assert relay.totals().pairs == 0


def test_without_descriptors_it_goes_on(monkeypatch):
    """It accepts nobody for a moment, and forwards meanwhile."""
    fails = [OSError(24, "too many open files")] * 3

    class Listener(socket.socket):
        def accept(self):
            if fails:
                raise fails.pop()
            return super().accept()

    monkeypatch.setattr("relays.listen", lambda *place: Listener(fileno=socket.create_server(place).detach()))
    monkeypatch.setattr(server, "_TICK_SECONDS", 0.05)
    with running() as relay, joined(relay.place) as (caller, listener):
        assert not fails
        exchange(caller, listener, 1000)
