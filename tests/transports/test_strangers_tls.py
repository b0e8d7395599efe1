"""Strangers at the sockets of a job that has a secret: they learn nothing, are no rank, and end nothing."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import patience
import pytest
from clocks import Clock
from meeting_ranks import gather, hello, reach
from membership_groups import Group, give_secret, one_group, silent
from strangers import PAYLOADS, connected, message
from taps import Tap

from qccl import CollectiveTimeout, EngineError, _host
from qccl.transports import channel, meeting_messages, membership_callers, regroup, tls
from qccl.transports import strangers as dropped
from qccl.transports.meeting_host import MeetingHost
from qccl.transports.messages import Decision, encode
from qccl.transports.regroup import MembershipSocket
from qccl.transports.secret import derive
from qccl.transports.secure_socket import SecureSocket
from qccl.transports.watch import Watch

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

Place = tuple[str, int]
JOB, KEY, OTHER = "the job", derive(bytes(32), "meeting"), derive(b"other", "meeting")
NOTES = [b"the note of rank 0", b"the note of rank 1", b"the note of rank 2"]


@pytest.fixture(autouse=True)
def with_a_secret(monkeypatch):
    give_secret(monkeypatch)


@contextmanager
def meeting(port: int, timeout: float = 60.0) -> Iterator[Callable]:
    """Starts a rank: rank -> its future."""
    with ThreadPoolExecutor(4) as pool:

        def start(rank: int, key: bytes | None = KEY, port: int = port):
            return pool.submit(gather, NOTES[rank], rank, 3, ("127.0.0.1", port), timeout, JOB, key=key)

        yield start


def shake_hands(connection: socket.socket, key: bytes = OTHER, *, is_server: bool = False) -> bool:
    """Whether a handshake with this key succeeds."""
    with SecureSocket(connection, key, is_server=is_server) as secured:
        secured.settimeout(60)
        with suppress(OSError):
            if is_server:
                secured.recv(1)
            else:
                secured.sendall(b"x")
        return secured.is_proved


def client_hello(key: bytes) -> bytes:
    """The first message of a handshake."""
    ours, theirs = socket.socketpair()
    with theirs:
        stream = _host.TlsStream(tls.functions(), key, ours.detach(), False)
        assert not stream.handshake()
        found = theirs.recv(1 << 16)
        stream.close()
    assert found[:1] == membership_callers._HANDSHAKE
    return found


# -- the meeting -------------------------------------------------------------------------------------------------------


def captured(port: int, key: bytes | None) -> tuple[bytes, bytes]:
    """What goes over the network in a meeting."""
    with meeting(port) as start, Tap(("127.0.0.1", port)) as tap:
        found = [start(0, key)]
        reach(port).close()
        found += [start(rank, key, tap.place[1]) for rank in (1, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3
    return tap.said(0), tap.said(1)


def test_who_reads_a_meeting_with_a_token_reads_no_note(port):
    said = captured(port, KEY)
    assert len(said[0]) > 300 and len(said[1]) > 300
    for each in said:
        assert not any(text in each for text in (*NOTES, b"note", b"the job", meeting_messages._MAGIC))


def test_without_a_token_the_notes_can_be_read(port):
    """So the test before finds what it looks for."""
    said = captured(port, None)
    assert NOTES[1] in said[0] and NOTES[0] in said[1]


TLS_STRANGERS: dict[str, Callable[[], bytes]] = {
    "TLS, another key": lambda: client_hello(OTHER),
    "TLS, this key, and no more": lambda: client_hello(KEY),
    "TLS, half a message": lambda: client_hello(KEY)[:60],
    "TLS, a damaged message": lambda: client_hello(KEY)[:-5] + bytes(5),
    "TLS, an alert": lambda: b"\x15\x03\x03\x00\x02\x02\x28",
    "TLS, a long record": lambda: b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "TLS, many records": lambda: client_hello(KEY) * 100,
    "a rank without a token": lambda: hello(1, note=b""),
}


@pytest.mark.parametrize("name", [*TLS_STRANGERS, *PAYLOADS])
def test_a_stranger_changes_nothing_in_a_meeting(name, port):
    """It comes before the ranks, and stays."""
    payload = TLS_STRANGERS[name]() if name in TLS_STRANGERS else PAYLOADS[name](random.Random(0))
    with meeting(port) as start, ExitStack() as stack:
        found = [start(0)]
        reach(port).close()
        stack.enter_context(connected(("127.0.0.1", port), payload))
        found += [start(rank) for rank in (1, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3


def test_what_a_rank_has_said_is_of_no_use_to_another_caller(port):
    said, _ = captured(port, KEY)
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        with connected(("127.0.0.1", port), bytes(said)) as again:
            found += [start(rank) for rank in (1, 2)]
            assert [each.result(60) for each in found] == [NOTES] * 3
            again.settimeout(60)
            answer = b""
            with suppress(OSError):
                while part := again.recv(1 << 16):
                    answer += part
            assert len(answer) < 1000  # of the handshake


@pytest.fixture
def has_dropped(monkeypatch) -> threading.Event:
    """Rank 0 has dropped a caller for a cause that it names."""
    found, drop = threading.Event(), MeetingHost.drop

    def dropped(self: MeetingHost, caller, cause: str = "") -> None:
        drop(self, caller, cause)
        if cause:
            found.set()

    monkeypatch.setattr(MeetingHost, "drop", dropped)
    return found


def test_a_rank_with_another_token(port, end_deadlines):
    with meeting(port) as start:
        first = start(0)
        reach(port).close()
        with pytest.raises(
            EngineError, match=r"does not have this rank's token.* set the same QCCL_TOKEN on all ranks"
        ):
            start(1, OTHER).result(60)
        end_deadlines()
        with pytest.raises(
            CollectiveTimeout, match=r"ranks \[1, 2\] did not come.* does not have its token .QCCL_TOKEN."
        ):
            first.result(60)


def test_a_rank_without_a_token(port, end_deadlines, has_dropped):
    with meeting(port) as start:
        first = start(0)
        reach(port).close()
        second = start(1, None)
        assert has_dropped.wait(60)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match="perhaps it has a QCCL_TOKEN, and this rank has none"):
            second.result(60)
        with pytest.raises(CollectiveTimeout, match="rank 0 dropped a caller that does not have its token"):
            first.result(60)


def test_rank_0_without_a_token(port, end_deadlines, has_dropped):
    with meeting(port) as start:
        first = start(0, None)
        reach(port).close()
        second = start(1)
        assert has_dropped.wait(60)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match="perhaps rank 0 has no token: set the same QCCL_TOKEN"):
            second.result(60)
        with pytest.raises(CollectiveTimeout, match="did not come"):
            first.result(60)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None], ids=["silent", "http", "TLS"])
def test_a_program_in_the_place_of_rank_0_learns_nothing(answer):
    """It says something, or has TLS with another key."""
    got, timeout = bytearray(), 2.0 if answer == b"" else 60.0
    with socket.create_server(("127.0.0.1", 0)) as server, meeting(server.getsockname()[1], timeout) as start:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                if answer is None:
                    assert not shake_hands(connection, is_server=True)
                    return
                with connection:
                    connection.settimeout(60)
                    connection.sendall(answer)
                    while part := connection.recv(1 << 16):
                        got.extend(part)

        server.settimeout(timeout)
        thread = threading.Thread(target=serve)
        thread.start()
        error = start(1).exception(120)
        thread.join(60)
    assert isinstance(error, CollectiveTimeout if answer == b"" else EngineError), error
    assert NOTES[1] not in got and meeting_messages._MAGIC not in got


def flood(place: Place, count: int, *payloads: bytes, stays: int = 100) -> None:
    """So many connections, of which the last ones stay; each sends one of the payloads in turn."""
    kept: list[socket.socket] = []
    for number in range(count):
        with suppress(OSError):
            connection = socket.create_connection(place, timeout=2)
            kept.append(connection)
            connection.setblocking(False)
            connection.sendall(payloads[number % len(payloads)])
        if len(kept) > stays:
            kept.pop(0).close()
    for connection in kept:
        connection.close()


@pytest.mark.slow
def test_ten_thousand_connections_to_a_meeting(port):
    """Silent ones, random bytes, and handshakes with another key, while the ranks meet."""
    payloads = b"", random.Random(0).randbytes(300), client_hello(OTHER), client_hello(KEY), b"GET / HTTP/1.1\r\n\r\n"
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        thread = threading.Thread(target=flood, args=(("127.0.0.1", port), 10_000, *payloads))
        thread.start()
        time.sleep(0.5)
        found.append(start(2))
        while thread.is_alive() and thread.join(0.1) is None:
            pass
        found.append(start(1))
        assert [each.result(60) for each in found] == [NOTES] * 3


def drip(place: Place, content: bytes, over: threading.Event) -> None:
    """Send it byte by byte."""
    while not over.wait(0.01):
        with suppress(OSError), socket.create_connection(place, timeout=2) as connection:
            for byte in content:
                if over.wait(0.05):
                    return
                connection.sendall(bytes([byte]))


def test_slow_callers_delay_nobody(port):
    over = threading.Event()
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        threads = [
            threading.Thread(target=drip, args=(("127.0.0.1", port), client_hello(KEY), over)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            found += [start(rank) for rank in (1, 2)]
            assert [each.result(60) for each in found] == [NOTES] * 3
        finally:
            over.set()
            for thread in threads:
                thread.join(10)


# -- the next group ----------------------------------------------------------------------------------------------------


def at(rank: MembershipSocket) -> Place:
    return rank.place


@pytest.mark.parametrize("name", TLS_STRANGERS)
def test_a_stranger_changes_nothing_in_a_group(name):
    """test_membership_attacks.py has the others."""
    with Group(3) as group, ExitStack() as stack:
        group.ranks[0].close()
        for rank in group.ranks[1:]:
            stack.enter_context(connected(at(rank), TLS_STRANGERS[name]()))
        found = group.agree(1, 2)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["none", "another"])
def test_nobody_joins_without_the_secret(secret, monkeypatch, caplog):
    """With another one it is dropped at once, and told in the log; without one it is like all who say nothing."""
    clock, limit, looks = Clock(), patience.Limit(60), 0
    monkeypatch.setattr(regroup, "time", clock)
    monkeypatch.setattr(dropped, "_reported", set())
    with Group(2) as group, closing(MembershipSocket("127.0.0.1", secret)) as new, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new.knock, at(group.ranks[0]), b"new", 60.0 if secret else 2.0)
        while looks < 40 or (secret and not caplog.records):
            assert group.ranks[0].waiting() == 0 and limit.left()
            looks += 1
            time.sleep(0.02)
        clock.ahead = 1000.0
        decision = one_group(group.agree(0, 1))
        assert group.numbers(decision) == [0, 1]
        with pytest.raises(CollectiveTimeout, match="no group took this process in at"):
            joining.result(60)
    if secret:
        assert "it does not have the secret, or speaks another protocol" in caplog.text


def test_one_with_the_secret_joins():
    with Group(2) as group, closing(MembershipSocket("127.0.0.1")) as new:
        found = group.run(group.grow(0), group.work(1), lambda: new.knock(at(group.ranks[0]), b"new", 30.0))
        assert len(one_group(found).members) == 3


def test_a_program_in_the_place_of_a_rank_that_has_ended():
    """Of another job: the others wait for it as for a rank that is silent, and go on."""
    with Group(3) as group, ThreadPoolExecutor(1) as pool:
        port = group.ranks[0].place[1]
        group.ranks[0].close()
        over = threading.Event()
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(0.05)

            def serve() -> None:
                while not over.is_set():
                    with suppress(TimeoutError):
                        assert not shake_hands(server.accept()[0], is_server=True)

            serving = pool.submit(serve)
            try:
                with silent(0):
                    found = group.agree(1, 2)
            finally:
                over.set()
            serving.result(120)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]


def test_what_ranks_say_to_each_other_cannot_be_read():
    """A rank calls another one through a program that keeps all bytes."""
    with Group(2) as group, Tap(at(group.ranks[0])) as tap:
        group.ranks[1].latest = Decision(
            0, (group.ranks[0].member(b"first")._replace(port=tap.place[1]), group.ranks[1].member(b"first")), 0
        )
        found = group.agree(0, 1)
        assert all(isinstance(each, Decision) for each in found), found
    for said in (tap.said(0), tap.said(1)):
        assert said[:1] == membership_callers._HANDSHAKE
        assert not any(text in said for text in (b"nonce", b"kind", group.ranks[0].id.encode(), channel._MAGIC))


def test_a_decision_for_a_stopped_rank_is_sealed():
    """It is read without an answer, by the process that it is for; changed, or without the secret, it is not."""
    with Group(3) as group:
        me, other = group.ranks[2], group.ranks[0]
        left_out = Decision(1, (other.member(b"first"),), 0, (me.member(b"first"),))
        content = encode({"kind": "decided", "to": me.id, "decided": left_out})
        seal = channel.Keys.of(bytes(range(32))).seal
        forged = [
            channel.frame(content),
            channel.frame(content, os.urandom(32)),
            channel.frame(content, seal).replace(b'"calls"', b'"Calls"').replace(b"[1,", b"[2,", 1),
            channel.frame(encode({"kind": "decided", "to": other.id, "decided": left_out}), seal),
            channel.frame(encode({"kind": "promised"}), seal),
        ]
        with ExitStack() as stack:
            for each in forged:
                stack.enter_context(connected(at(me), each))
            time.sleep(0.1)
            me.waiting()
            assert [each.inbox for each in me._callers] == []
            stack.enter_context(connected(at(me), channel.frame(content, seal)))
            limit = patience.Limit(60)
            while not [*me._callers] and limit.left():
                me.waiting()
            assert [each.inbox[0]["decided"] for each in me._callers] == [left_out]


def test_a_sealed_decision_is_of_no_use_later():
    """It is of an earlier epoch then."""
    with Group(2) as group:
        me = group.ranks[0]
        old = Decision(1, (group.ranks[1].member(b"first"),), 0, (me.member(b"first"),))
        sealed = channel.frame(
            encode({"kind": "decided", "to": me.id, "decided": old}), channel.Keys.of(bytes(range(32))).seal
        )
        assert one_group(group.agree(0, 1)).epoch == 1
        with connected(at(me), sealed):
            assert group.numbers(one_group(group.agree(0, 1))) == [0, 1]


def test_those_who_only_look_are_dropped_in_silence(monkeypatch, caplog):
    """They do no handshake, and are no strangers."""
    monkeypatch.setattr(dropped, "_reported", set())
    made = []
    monkeypatch.setattr(_host, "TlsStream", lambda *arguments: made.append(arguments))
    with Group(2) as group:
        watch = Watch([rank.place for rank in group.ranks], greeting=group.ranks[0].greeting)
        limit = patience.Limit(60)
        while limit.left() and len(watch._reached) < 2:
            assert watch.ended([0, 1]) == []
        for _ in range(20):
            group.ranks[1].hear()
            time.sleep(0.005)
        assert not group.ranks[1]._callers._unknown
        group.ranks[1].close()
        limit = patience.Limit(60)
        while limit.left() and watch.ended([0, 1]) != [1]:
            pass
        assert watch.ended([0, 1]) == [1]
        watch.close()
    assert not made and not caplog.records


@pytest.mark.slow
def test_ten_thousand_connections_to_a_group():
    payloads = b"", random.Random(0).randbytes(300), client_hello(OTHER), message(kind="watch"), b"\x16"
    with Group(3) as group:
        group.ranks[0].close()
        threads = [threading.Thread(target=flood, args=(at(rank), 5_000, *payloads)) for rank in group.ranks[1:]]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        found = group.agree(1, 2)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]
        for thread in threads:
            while thread.is_alive():
                [rank.waiting() for rank in group.ranks[1:]]
                thread.join(0.05)
        assert one_group(group.agree(1, 2)).epoch == 2
