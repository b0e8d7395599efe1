"""Strangers at the sockets of ranks that meet, that agree on their next group, or that take a process in.

With and without a secret: whatever strangers send, and however many they are, the ranks go on as without them.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import meeting_ranks
import patience
import pytest
from meeting_ranks import JOB, hello
from membership_groups import Group, give_secret, one_group
from strangers import PAYLOADS, UNKNOWN, connected, has_ended, message, strangers, stream
from strangers import hello as hello_of_a_group
from tls_streams import client_hello

from qccl.base.deadline import Deadline
from qccl.meeting import callers, channel
from qccl.meeting.channel import frame
from qccl.meeting.meeting_messages import MeetingKind, MeetingMessage, seal
from qccl.meeting.regroup import MembershipSocket
from qccl.meeting.secret import derive

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

Place = tuple[str, int]
SECRET = bytes(range(32))
KEY, OTHER = derive(bytes(32), "meeting"), derive(b"other", "meeting")


class Meeting(meeting_ranks.Meeting):
    """Rank 0 waits for two others."""

    def __init__(self, secret: bytes | None, port: int) -> None:
        super().__init__(port, None if secret is None else KEY)
        self.places = [("127.0.0.1", port)]

    def look(self) -> None:
        """A rank that waits looks all the time."""

    def close(self) -> None:
        self.__exit__()


class Losing:
    """Ranks that lose one of them after the other, from rank 0 on."""

    def __init__(self, secret: bytes | None, port: int) -> None:
        self._group, self._lost = Group(4), 0
        self.places = [rank.place for rank in self._group.ranks]

    def look(self) -> None:
        for rank in self._group.ranks[self._lost :]:
            rank.waiting()

    def go_on(self) -> None:
        """Those that are left agree."""
        self._group.ranks[self._lost].close()
        self._lost += 1
        left = [*range(self._lost, 4)]
        found = self._group.agree(*left)
        assert self._group.numbers(one_group(found)) == left and found == found[:1] * len(left)
        assert found[0].epoch == self._lost

    def close(self) -> None:
        self._group.__exit__()


class Joining:
    """Two ranks that take a process in."""

    def __init__(self, secret: bytes | None, port: int) -> None:
        self._group = Group(2)
        self.places = [rank.place for rank in self._group.ranks]

    def go_on(self) -> None:
        """They take in this process alone."""
        group = self._group
        with closing(MembershipSocket("127.0.0.1")) as new:
            found = group.run(group.grow(0), group.work(1), lambda: new.knock(self.places[0], b"new", Deadline(30.0)))
            assert [each.id for each in one_group(found).members] == [rank.id for rank in (*group.ranks, new)]
            assert found == found[:1] * 3

    def close(self) -> None:
        self._group.__exit__()


#: what strangers send, beside PAYLOADS, to ranks that meet without a token, and to all that have a secret
TO_RANK_0: dict[str, Callable[[random.Random], bytes]] = {
    "a rank that says no more": lambda _: hello(1),
    "a rank with a wrong proof": lambda _: hello(1) + frame(MeetingMessage(MeetingKind.PROOF, bytes(24)), seal(JOB)),
    "half a hello": lambda _: hello(1)[:50],
    "half a note": lambda _: hello(1, note=b"a" * 100)[:-1],
    "a long note": lambda _: hello(1, note=b"a" * 100_000),
    "more than a hello": lambda _: hello(1) + b"more",
    "rank 0": lambda _: hello(0),
    "no rank": lambda _: hello(77),
    "another job": lambda _: hello(1, job="another"),
    "another size": lambda _: hello(1, size=5),
    "acknowledgement": lambda _: hello(1) + frame(MeetingMessage(MeetingKind.TAKEN), seal(JOB)),
}
TLS: dict[str, Callable[[random.Random], bytes]] = {
    "TLS, another key": lambda _: client_hello(OTHER),
    "TLS, this key, and no more": lambda _: client_hello(KEY),
    "TLS, half a message": lambda _: client_hello(KEY)[:60],
    "TLS, a damaged message": lambda _: client_hello(KEY)[:-5] + bytes(5),
    "TLS, an alert": lambda _: b"\x15\x03\x03\x00\x02\x02\x28",
    "TLS, a long record": lambda _: b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "TLS, many records": lambda _: client_hello(KEY) * 100,
    "a rank without a token": lambda _: hello(1, note=b""),
}
SCENES = {
    "meeting": (Meeting, None, TO_RANK_0),
    "meeting with a token": (Meeting, SECRET, TLS),
    "group": (Losing, None, {}),
    "group with a secret": (Losing, SECRET, TLS),
    "joining": (Joining, None, {}),
    "joining with a secret": (Joining, SECRET, TLS),
}
#: those whose ranks can go on several times
LASTING = [name for name in SCENES if not name.startswith("joining")]


@pytest.fixture
def scene(request: pytest.FixtureRequest, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kind, secret, _ = SCENES[request.param]
    give_secret(monkeypatch, secret)
    with closing(kind(secret, port)) as made:
        yield made


@pytest.mark.parametrize(
    ("scene", "payload"),
    [(name, payload) for name, (_, _, more) in SCENES.items() for payload in (*more, *PAYLOADS)],
    indirect=["scene"],
)
def test_a_stranger_changes_nothing(scene, payload):
    """It calls every rank before they go on, and stays."""
    make = (TO_RANK_0 | TLS | PAYLOADS)[payload]
    with ExitStack() as stack:
        for place in scene.places:
            stack.enter_context(connected(place, make(random.Random(0))))
        scene.go_on()


@pytest.mark.parametrize("scene", LASTING, indirect=True)
def test_many_strangers_at_once(scene):
    with strangers(*scene.places, count=4):
        for _ in range(3):
            scene.go_on()


@pytest.mark.parametrize("scene", LASTING, indirect=True)
def test_callers_beyond_the_room_go_the_oldest_first(scene, monkeypatch):
    monkeypatch.setattr(callers, "seats", lambda: 4)
    monkeypatch.setattr(callers, "HELLO_SECONDS", 1000.0)
    with ExitStack() as stack:
        old = [stack.enter_context(connected(scene.places[-1])) for _ in range(50)]
        scene.go_on()
        patience.wait_until(lambda: all(map(has_ended, old[:40])), scene.look)


#: how strangers go on and on: the begin of a connection, what follows it again and again, and the seconds between
ENDLESS: dict[str, tuple[bytes, bytes, float]] = {
    "small frames": (b"", message(**hello_of_a_group(random.Random(0), kind="probe")) * 100, 0),
    "a frame byte by byte": (channel._HEAD.pack(channel._MAGIC, channel.MOST_NBYTES, b""), b"a", 0),
    "a frame of an older version": (b"", b"qccl/mem" + b"\xff\xff\xff\x03" + bytes(1 << 16), 0),
    "a slow frame": (b"", channel._HEAD.pack(channel._MAGIC, channel.MOST_NBYTES, b"") + bytes(1000), 0.05),
    "a slow handshake": (b"", client_hello(KEY), 0.05),
    "a slow hello": (b"", hello(1), 0.05),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("scene", LASTING, indirect=True)
def test_strangers_that_never_end_delay_nobody(scene, kind, monkeypatch):
    if isinstance(scene, Losing):  # where ranks meet, a busy machine may hold a rank up for longer
        monkeypatch.setattr(callers, "HELLO_SECONDS", 0.5)
    head, part, pause = ENDLESS[kind]
    over = threading.Event()
    with ThreadPoolExecutor(2 * len(scene.places)) as pool:
        for place in scene.places * 2:
            pool.submit(stream, place, part, over, head, pause)
        try:
            time.sleep(0.2)
            scene.go_on()
        finally:
            over.set()


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
@pytest.mark.parametrize("scene", ["meeting with a token", "group with a secret"], indirect=True)
def test_ten_thousand_connections(scene):
    """Silent ones, random bytes, other protocols, and handshakes with another key."""
    payloads = [b"", random.Random(0).randbytes(300), client_hello(OTHER), client_hello(KEY), b"\x16"]
    payloads += [b"GET / HTTP/1.1\r\n\r\n", message(kind="look"), message(kind="knock", nonce=UNKNOWN)]
    with ThreadPoolExecutor(len(scene.places)) as pool:
        floods = [pool.submit(flood, place, 10_000 // len(scene.places), *payloads) for place in scene.places]
        time.sleep(0.3)
        scene.go_on()
        while not all(each.done() for each in floods):
            scene.look()
            time.sleep(0.05)
    scene.go_on()
