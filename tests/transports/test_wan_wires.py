"""Wires between sites, one at a time: what each does when connections break, and when the other side says anything."""

from __future__ import annotations

import functools
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import patience
import pytest
from wan_wires import (
    ACK,
    ANNOUNCE,
    BYE,
    DATA,
    HEAD,
    HELLO,
    NOWHERE,
    PART,
    POSTED,
    PROBE,
    Lost,
    Raw,
    Wire,
    connected,
    frame,
    hello,
    poll_until,
    rank_0,
)


@contextmanager
def rank_1(away_seconds: float = 60.0, connections: int = 1) -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and the listening socket of a rank 0 that the test plays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        wire = Wire(connections, away_seconds)
        place = b"\n127.0.0.1 %d" % server.getsockname()[1]
        wire.connect(1, [NOWHERE + place, wire.native.address()])
        yield wire, server
        wire.close()


def frames(raw: Raw, seen: bytearray) -> list[tuple[int, ...]]:
    """The heads of what has come on a connection since the last call; ``seen`` keeps the rest."""
    while select.select([raw.socket], [], [], 0)[0] and (data := raw.socket.recv(1 << 20)):
        seen += data
    heads, at = [], 0
    while len(seen) - at >= HEAD.size:
        head = HEAD.unpack_from(seen, at)
        if len(seen) - at < HEAD.size + head[0]:
            break
        at += HEAD.size + head[0]
        heads.append(head)
    del seen[:at]
    return heads


@pytest.mark.parametrize("nbytes", [0, 1, PART, PART + 1, 3_000_000])
@pytest.mark.parametrize("is_early", [False, True])
def test_messages_come_before_and_after_their_receives(nbytes, is_early):
    a, b = connected(2, 2)
    data = os.urandom(nbytes)
    sent = b.send(0, data) if is_early else -1
    if is_early:
        poll_until(lambda: sent in b.done, a, b)
    token = a.receive(1, nbytes, exact=False)
    if not is_early:
        b.send(0, data)
    poll_until(lambda: token in a.done, a, b)
    assert a.data(token) == data


def test_what_came_before_the_end_of_a_connection_counts():
    """Although the rank never comes again, for example because it was killed."""
    with rank_0() as (wire, (raw,)):
        token = wire.receive(1, 5, exact=False)
        raw.say(frame(DATA, b"bytes", total=5))
        raw.socket.close()
        poll_until(lambda: token in wire.done, wire)
        assert wire.data(token) == b"bytes"


def test_what_came_before_a_write_failed_counts():
    """A rank has given up, said why, and closed its connections; this one sends it something before it looks."""
    with rank_0() as (wire, (raw,)):
        wire.send(1, b"shows that the connection is up")
        poll_until(lambda: select.select([raw.socket], [], [], 0)[0] != [], wire)
        token = wire.receive(1, 5, exact=False)
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        wire.poll()  # so that the wire's own thread does not look for a moment
        raw.say(frame(DATA, b"bytes", total=5), frame(BYE))
        raw.socket.close()
        wire.send(1, b"more")
        poll_until(lambda: token in wire.done, wire, seconds=10.0)
        assert wire.data(token) == b"bytes"
        wire.receive(1, 5)
        with pytest.raises(Lost, match="it has closed its connections"):
            poll_until(lambda: False, wire, seconds=10.0)


def test_a_rank_gets_no_more_than_its_credit():
    """Messages that it does not receive yet: at most 32 MiB, and what is on the way when it says how many wait."""
    with rank_0(slots=2) as (wire, (short, long)):
        for _ in range(100):
            wire.send(1, bytes(2 << 20))
        early, count, seen = 0, 0, bytearray()
        end, limit = time.monotonic() + 3, patience.Limit(60)
        while (time.monotonic() < end or early <= 8 << 20) and limit.left() and early < 100 << 20:
            time.sleep(0.001)  # the next message is early, too, and each counts as 256 bytes
            short.say(frame(DATA, b"", tag=1, index=count, total=0))  # the last word on this connection was long ago
            wire.poll()
            heads = frames(long, seen)
            count += 1
            early += sum(head[0] for head in heads if head[1] == DATA)
            got = sum(head[1] not in (ACK, HELLO, PROBE) for head in heads)
            if got:
                acknowledged = getattr(long, "acknowledged", 0) + got
                long.acknowledged = acknowledged
                long.say(frame(ACK, index=acknowledged, total=early, offset=count))
        assert 8 << 20 < early < 34 << 20


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_frames_that_have_come_are_forgotten():
    """Also while an earlier one, on a slow connection, has not."""
    with rank_0(connections=2, slots=3) as (wire, (_, slow, quick)):
        poll_until(lambda: True, wire)
        before = resident()
        nbytes, came, seen, acknowledged = 0, 0, bytearray(), 0
        kept, seen_slow = 0, bytearray()
        limit = patience.Limit(60)
        sent = 0
        while came < 150 << 20 and limit.left():
            if sent * (1 << 20) < came + kept + (4 << 20):
                wire.send(1, bytes(1 << 20))
                sent += 1
                for token in wire.done:
                    wire.forget(token)
            wire.poll()
            kept += sum(head[0] for head in frames(slow, seen_slow) if head[1] == DATA)
            heads = [head for head in frames(quick, seen) if head[1] == DATA]
            came += sum(head[0] for head in heads)
            acknowledged += len(heads)
            if heads:
                quick.say(frame(ACK, index=acknowledged, offset=acknowledged))
            nbytes = max(nbytes, resident() - before)
        assert came >= 150 << 20
        assert nbytes < 80 << 20


def test_a_rank_that_asks_again_gets_one_answer():
    with rank_0() as (wire, (raw,)):
        wire.receive(1, 1 << 20)
        raw.say(frame(ANNOUNCE) * 5000)
        seen, count = bytearray(), 0
        end, limit = time.monotonic() + 0.5, patience.Limit(60)
        while time.monotonic() < end or (not count and limit.left()):
            wire.poll()
            count += sum(head[1] == POSTED for head in frames(raw, seen))
        assert count == 1


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, bytes(range(32))])
def test_a_rank_that_is_busy_is_not_lost(secret):
    """Its buffers are full, but its machine answers: longer than TCP's timeout, and than a rank may be away."""
    a, b = connected(2, 2, away_seconds=1.0, secret=secret)
    token = a.receive(1, 5)
    b.send(0, b"hello")
    poll_until(lambda: token in a.done, a, b)
    b.receive(0, 1)
    data = os.urandom(2 << 20)
    for _ in range(20):
        b.send(0, data, tag=1)
    for _ in range(2000):
        b.send(0, data[:10_000], tag=2)
    end = time.monotonic() + 7
    while time.monotonic() < end:
        b.nap()
    tokens = [a.receive(1, len(data), tag=1, exact=False) for _ in range(20)]
    poll_until(lambda: a.done >= set(tokens), a, b)
    assert all(a.data(token) == data for token in tokens)


def test_time_without_a_poll_is_not_the_other_ranks():
    with rank_1(away_seconds=0.5) as (wire, server):
        wire.receive(0, 1)
        server.close()
        time.sleep(1)
        wire.poll()
        with pytest.raises(Lost):
            poll_until(lambda: False, wire)


def test_a_rank_that_ends_every_connection_is_lost():
    with rank_1(away_seconds=1.0) as (wire, server):
        wire.receive(0, 1)
        server.setblocking(False)
        limit = patience.Limit(60)
        with pytest.raises(Lost):
            while limit.left():
                if select.select([server], [], [], 0)[0]:
                    server.accept()[0].close()
                wire.nap()


def test_without_descriptors_a_rank_naps_until_there_are_some():
    with rank_0(slots=0) as (wire, _), socket.socket() as caller:
        token = wire.receive(1, 1)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            caller.connect(("127.0.0.1", wire.port))
            caller.sendall(hello(wire.nonce, 1) + frame(DATA, b"x", total=1))
            begin, naps = time.monotonic(), 0
            while time.monotonic() < begin + 0.3:
                wire.nap()
                naps += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert token not in wire.done
        assert naps < 600
        poll_until(lambda: token in wire.done, wire)


@pytest.mark.parametrize("count", [0, 400])
def test_callers_that_say_nothing_hold_nobody_up(count):
    with ExitStack() as stack:
        wire, _ = stack.enter_context(rank_0(slots=0))
        raw = stack.enter_context(Raw(wire.port))
        raw.say(hello(wire.nonce, 1), frame(DATA, b"x", total=1))
        for _ in range(count):
            stack.enter_context(Raw(wire.port))
        token = wire.receive(1, 1)
        poll_until(lambda: token in wire.done, wire, seconds=4)  # before the silent ones are dropped
        assert not raw.ended()


def test_two_ranks_have_the_connections_that_both_want():
    a, b = Wire(1), Wire(5)
    addresses = [a.native.address(), b.native.address()]
    a.connect(0, addresses)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = str(server.getsockname()[1]).encode()
        b.connect(1, [addresses[0].rpartition(b" ")[0] + b" " + port, addresses[1]])
        accepted = 0
        end, limit = time.monotonic() + 0.5, patience.Limit(60)
        with ExitStack() as stack:
            while time.monotonic() < end or (accepted < 2 and limit.left()):
                b.poll()
                if select.select([server], [], [], 0)[0]:
                    stack.enter_context(server.accept()[0])
                    accepted += 1
        assert accepted == 2
    a.close()
    b.close()


def test_nothing_is_taken_from_a_rank_that_was_lost():
    with rank_0(slots=2) as (wire, (first, second)):
        token = wire.receive(1, 5, exact=False)
        first.say(frame(77))
        with pytest.raises(Lost, match="a kind that no rank sends"):
            poll_until(lambda: False, wire)
        second.say(frame(DATA, b"bytes", total=5))
        with pytest.raises(Lost):
            poll_until(lambda: False, wire)
        assert wire.data(token) == bytes(5)
        assert token not in wire.done


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


def test_each_child_can_close_its_parents_connections():
    """Also of a process that forks while another thread moves data."""
    others = sockets()
    a, b = connected(2, 2)
    ends = threading.Event()

    def exchange() -> None:
        while not ends.is_set():
            tokens = {a.receive(1, 1 << 18)}
            b.send(0, bytes(1 << 18))
            poll_until(functools.partial(tokens.__le__, a.done), a, b)

    with ThreadPoolExecutor(1) as pool:
        exchanges = pool.submit(exchange)
        try:
            for _ in range(20):
                child = os.fork()
                if not child:
                    for wire in (a, b):
                        wire.native.close(0)
                    os._exit(len(sockets() - others))
                assert os.waitpid(child, 0)[1] == 0
        finally:
            ends.set()
            exchanges.result()
            a.close()
            b.close()


def test_threads_poll_while_others_close():
    """Two at once, with messages under way: each returns when the wire is closed, and nothing is closed twice."""
    for _ in range(20):
        a, b = connected(2, 2)
        tokens = [a.receive(1, 1 << 20) for _ in range(8)]
        for _ in range(8):
            b.send(0, bytes(1 << 20))
        with ThreadPoolExecutor(4) as pool:
            polls = [pool.submit(poll_for, wire, 0.05) for wire in (a, b)]
            time.sleep(0.01)
            closes = [pool.submit(a.native.close, 0.02) for _ in range(2)]
            for future in (*polls, *closes):
                with suppress(Lost):
                    future.result(60)
        b.close()
        with open("/dev/null", encoding="ascii") as file:  # a descriptor that was the wire's
            a.close()
            assert file.read() == ""
        assert all(token not in a.done or a.data(token) == bytes(1 << 20) for token in tokens)


def poll_for(wire: Wire, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wire.nap()
