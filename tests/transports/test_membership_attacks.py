"""Strangers at the sockets by which ranks agree on their next group: whatever they send, the ranks agree in time."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import patience
import pytest
from membership_groups import Group, give_secret, one_group, silent
from strangers import (
    PAYLOADS,
    UNKNOWN,
    connected,
    frame,
    has_ended,
    hello,
    knockers,
    member,
    message,
    mutated,
    real,
    strangers,
    stream,
)

from qccl.errors import PeerLost
from qccl.transports import callers, channel, messages
from qccl.transports import strangers as dropped
from qccl.transports.messages import Decision, Member
from qccl.transports.regroup import MembershipSocket
from qccl.transports.strangers import NotARank

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "secret"])
def has_secret(request, monkeypatch) -> bool:
    """Groups with a secret, which the strangers do not know, and those without one."""
    give_secret(monkeypatch, bytes(range(32)) if request.param else None)
    return bool(request.param)


def place(rank: MembershipSocket) -> tuple[str, int]:
    return "127.0.0.1", rank._port


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_stranger_changes_nothing(name):
    """It calls every rank before they agree without rank 0, and stays."""
    with Group(3) as group, ExitStack() as stack:
        group.ranks[0].close()
        for rank in group.ranks[1:]:
            stack.enter_context(connected(place(rank), PAYLOADS[name](random.Random(0))))
        found = group.agree(1, 2)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]
        assert one_group(found).epoch == 1


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_stranger_does_not_join(name):
    """A process joins meanwhile, and the stranger does not."""
    with Group(2) as group, ExitStack() as stack, closing(MembershipSocket("127.0.0.1")) as new:
        for rank in group.ranks:
            stack.enter_context(connected(place(rank), PAYLOADS[name](random.Random(0))))
        found = group.run(group.grow(0), group.work(1), lambda: new.knock(place(group.ranks[0]), b"new", 30.0))
        assert [each.id for each in one_group(found).members] == [rank.id for rank in (*group.ranks, new)]
        assert found.count(found[0]) == 3


def test_many_strangers_at_once():
    with Group(4) as group, strangers(*map(place, group.ranks)):
        for epoch, left in enumerate(([0, 1, 2, 3], [1, 2, 3], [1, 3]), start=1):
            for rank in set(range(4)) - set(left):
                group.ranks[rank].close()
            decision = one_group(group.agree(*left))
            assert decision.epoch == epoch and group.numbers(decision) == left


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"", message(**hello(random.Random(0), kind="probe")) * 100),  # small frames
        (channel._HEAD.pack(channel._MAGIC, channel.MOST_NBYTES, b""), b"a"),  # a frame that comes byte by byte
        (b"", b"qccl/mem" + b"\xff\xff\xff\x03" + bytes(1 << 16)),  # a frame of an older version without end
    ],
    ids=["many", "slow", "endless"],
)
def test_a_stranger_that_never_ends(head, part, monkeypatch):
    monkeypatch.setattr(callers, "HELLO_SECONDS", 0.5)
    with Group(3) as group:
        over = threading.Event()
        threads = [
            threading.Thread(target=stream, args=(place(rank), part, over, head)) for rank in group.ranks[1:] * 2
        ]
        for thread in threads:
            thread.start()
        try:
            group.ranks[0].close()
            time.sleep(0.2)
            found = group.agree(1, 2)
            assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]
        finally:
            over.set()
            for thread in threads:
                thread.join(10)


LIMITED = """
import os, resource, sys, time
LIMIT = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
from membership_groups import Group, give_secret, one_group
with Group(3) as group:
    group.ranks[0].close()
    print(*(rank._port for rank in group.ranks[1:]), flush=True)
    sys.stdin.readline()
    for _ in range(100):
        time.sleep(0.01)
        [rank.waiting() for rank in group.ranks[1:]]
    decision = one_group(group.agree(1, 2))
    print(group.numbers(decision), len(os.listdir("/proc/self/fd")) < 0.8 * LIMIT, flush=True)
"""


@contextmanager
def limited(limit):
    """A process of three ranks, of which one has left, with at most ``limit`` descriptors, and the others' ports."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIMITED, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"},
    )
    with process:
        try:
            yield process, [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


def test_silent_connections_take_no_descriptor_that_ranks_need():
    """600 of them, where a process may have 256 descriptors."""
    with limited(256) as (process, ports), ExitStack() as stack:
        for number in range(600):
            connection = socket.create_connection(("127.0.0.1", ports[number % 2]), timeout=60)
            stack.callback(connection.close)
        out, _ = process.communicate("\n", timeout=60)
        assert out == "[1, 2] True\n"


@pytest.mark.parametrize("limit", [64, 100])
def test_processes_that_want_to_join_take_no_descriptor_that_ranks_need(limit):
    """250 of them at each rank, which call again when they are dropped."""
    with limited(limit) as (process, ports), knockers(*(("127.0.0.1", port) for port in ports), count=500):
        out, _ = process.communicate("\n", timeout=60)
        assert out == "[1, 2] True\n"


def test_a_silent_caller_is_dropped_soon_and_a_rank_is_not(monkeypatch):
    monkeypatch.setattr(callers, "HELLO_SECONDS", 0.2)
    with Group(2) as group, connected(place(group.ranks[0])) as quiet, closing(MembershipSocket("127.0.0.1")) as new:
        knocking = threading.Thread(
            target=lambda: suppress(Exception).__enter__() or new.knock(place(group.ranks[0]), b"new", 60.0)
        )
        knocking.start()
        limit = patience.Limit(60)
        while limit.left() and not group.ranks[0].waiting():
            time.sleep(0.01)
        for _ in range(50):  # longer than that
            time.sleep(0.01)
            assert group.ranks[0].waiting() == 1
        quiet.settimeout(60)
        with suppress(ConnectionError):
            while quiet.recv(1000):
                pass  # the greeting, and the end
        found = group.run(group.work(0), group.work(1))
        assert group.numbers(one_group(found)) == [0, 1]
        group.run(group.grow(0), group.work(1))
        knocking.join(60)


def test_callers_beyond_the_room_go_the_oldest_first(monkeypatch):
    monkeypatch.setattr(callers, "seats", lambda: 4)
    with Group(2) as group, ExitStack() as stack:
        old = [stack.enter_context(connected(place(group.ranks[0]))) for _ in range(20)]
        found = group.agree(0, 1)
        assert group.numbers(one_group(found)) == [0, 1]
        group.ranks[0].waiting()
        for connection in old[:16]:
            connection.settimeout(60)
            with suppress(ConnectionError):
                while connection.recv(1000):
                    pass


def test_a_decision_behind_many_strangers_is_read_before_anything_is_decided():
    """It waits at the socket of a rank that was stopped; meanwhile the others end, and it could make a group alone."""
    with Group(3) as group, ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(place(group.ranks[2])))
        with silent(2):
            assert group.numbers(one_group(group.agree(0, 1))) == [0, 1]
        for _ in range(100):
            stack.enter_context(connected(place(group.ranks[2])))
        for rank in (0, 1):
            group.ranks[rank].close()
        (late,) = group.agree(2, timeout=0.5)
        assert isinstance(late, PeerLost) and "without this one" in str(late), late


# -- decisions of strangers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_decision_that_nobody_asked_for(is_left_out, has_secret):
    """Even one that names the process: only those that leave it out are sent to it, sealed with the secret."""
    with Group(2) as group:
        me = group.ranks[0]
        others = (member(random.Random(0)),)
        own = me.member(b"worker")
        decision = Decision(1, others, 0, (own,)) if is_left_out else Decision(1, (own, *others), 0)
        with connected(place(me), message(kind="decided", to=me.id, decided=decision)):
            found = group.agree(0, 1, timeout=1.0 if is_left_out and not has_secret else 60.0)
        if is_left_out and not has_secret:  # its author knows the id, which only ranks do
            assert isinstance(found[0], PeerLost)
        else:
            assert group.numbers(one_group(found)) == [0, 1] and found[0] == found[1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_old_decision(epoch):
    """The ranks are in group 1; a decision on this group, or on the one before, is sent to one of them again."""
    with Group(3) as group:
        known = one_group(group.agree(0, 1, 2))
        old = Decision(epoch, known.members[:1], 0, known.members)
        with connected(place(group.ranks[0]), message(kind="decided", to=group.ranks[0].id, decided=old)):
            found = group.agree(0, 1, 2)
        assert one_group(found).epoch == 2 and found.count(found[0]) == 3


def test_a_real_message_is_of_no_use_to_another_caller():
    """It repeats the nonce of the connection that it was sent over."""
    with Group(2) as group, closing(MembershipSocket("127.0.0.1")) as gone:
        said = message(kind="knock", nonce=UNKNOWN, member=gone.member(b"gone"))
        with connected(place(group.ranks[0]), said):
            time.sleep(0.1)
            assert group.ranks[0].waiting() == 0


@pytest.mark.parametrize(
    ("greets", "answer"),
    [(False, b""), (False, b"HTTP/1.1 400 Bad Request\r\n\r\n"), (True, frame(b"[" * 9999)), (True, frame(b"{}"))],
    ids=["silent", "another protocol", "nested", "no fields"],
)
def test_a_stranger_at_the_port_of_a_rank_that_has_ended(greets, answer):
    """The others wait for it as for a rank that is silent, and go on."""
    with Group(3) as group:
        port = group.ranks[0]._port
        group.ranks[0].close()
        over = threading.Event()
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(0.1)

            def serve():
                while not over.is_set():
                    with suppress(OSError):
                        connection, _ = server.accept()
                        with connection:
                            connection.sendall(message(kind="challenge", nonce=UNKNOWN) * greets + answer)
                            over.wait(0.2)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                with silent(0):
                    found = group.agree(1, 2)
            finally:
                over.set()
                thread.join(10)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]


# -- the only place that reads messages ------------------------------------------------------------------------------

VALUES = [None, True, -1, 2**70, 0.5, "", "x", "\x1b[2J", [], [[]], {}, {"kind": "join"}, float("nan"), UNKNOWN]


def genuine(chosen: random.Random) -> list[dict[str, object]]:
    """A message of each kind that has fields."""
    some = member(chosen)
    decision = Decision(3, (some,), 5, (member(chosen),))
    return [
        {"kind": "challenge", "nonce": UNKNOWN},
        {"kind": "knock", "nonce": UNKNOWN, "member": some},
        hello(chosen, newcomers=[some], accepted=[[1, 2], decision]),
        {"kind": "wait", "seconds": 3.5},
        {"kind": "accept", "ballot": [3, 1], "value": decision},
        {"kind": "decided", "to": UNKNOWN, "decided": decision},
    ]


def test_genuine_messages_are_read():
    for each in genuine(random.Random(0)):
        found = messages.parse(messages.encode(each))
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(each))


def changed(found: object, chosen: random.Random) -> object:
    """JSON with one value that is another one, is missing, or comes twice."""
    if isinstance(found, dict) and found and chosen.random() < 0.9:
        key = chosen.choice(list(found))
        if chosen.random() < 0.1:
            return {name: value for name, value in found.items() if name != key}
        return found | {key: changed(found[key], chosen)}
    if isinstance(found, list) and found and chosen.random() < 0.9:
        place = chosen.randrange(len(found))
        if chosen.random() < 0.2:
            return found + found[place:]
        return [*found[:place], changed(found[place], chosen), *found[place + 1 :]]
    return chosen.choice(VALUES)


def test_changed_messages_are_refused_or_are_messages():
    """Never another exception; and nothing that differs in a member, whose seal has all of it."""
    chosen = random.Random(0)
    refused = 0
    for _ in range(3000):
        before = json.loads(json.dumps(chosen.choice(genuine(chosen))))
        try:
            found = messages.parse(json.dumps(changed(before, chosen)).encode())
        except NotARank:
            refused += 1
        else:
            assert found["kind"] in messages._FIELDS
            for each in [found.get("member"), *found.get("newcomers", ())]:
                assert each is None or each.seal == Member.make(*each[:4], bytes.fromhex(each.worker)).seal
    assert refused > 1000


def test_damaged_frames_end_the_connection():
    """Mutated frames, given in parts."""
    for seed in range(300):
        chosen = random.Random(seed)
        ours, theirs = socket.socketpair()
        with ours, theirs, closing(channel.Channel(ours)) as heard:
            theirs.sendall(mutated(real(chosen), chosen))
            theirs.close()
            with suppress(NotARank):
                heard.hear()
                assert heard.has_ended
            assert heard.has_ended
            assert all(each["kind"] in messages._FIELDS for each in heard.inbox)


@pytest.mark.parametrize(
    "found",
    [
        [UNKNOWN, "127.0.0.1", 1, 2 * UNKNOWN, "zz", UNKNOWN],
        [UNKNOWN, "127.0.0.1", 1, 2 * UNKNOWN, "00" * 10_000, UNKNOWN],
        [UNKNOWN, "127.0.0.1", 1, 2 * UNKNOWN, "00", UNKNOWN],  # another seal
        [UNKNOWN, "127.0.0.1", 1, "x", "00", UNKNOWN],
        [UNKNOWN, "a b\x1b", 1, 2 * UNKNOWN, "00", UNKNOWN],
        [UNKNOWN, "127.0.0.1", True, 2 * UNKNOWN, "00", UNKNOWN],
        [UNKNOWN, "127.0.0.1", 65536, 2 * UNKNOWN, "00", UNKNOWN],
        [UNKNOWN, "127.0.0.1", 1, 2 * UNKNOWN, "00"],
        [],
        {},
    ],
)
def test_a_process_that_is_none(found):
    with pytest.raises(NotARank):
        Member.of(found)


def test_a_cause_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(dropped, "_reported", set())
    with Group(2) as group:
        for _ in range(5):
            with connected(place(group.ranks[0]), b"GET / HTTP/1.1\r\n\r\n" * 10) as caller:
                limit = patience.Limit(60)
                while not has_ended(caller):
                    assert limit.left()
                    group.ranks[0].waiting()
    assert [record.message for record in caplog.records] == [
        "dropped a connection that is not of a rank: it speaks another protocol (further ones are not reported)"
    ]
