"""Strangers at the sockets by which ranks agree on their next group: whatever they send, the ranks agree in time."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import patience
import pytest
from clocks import Clock
from membership_groups import Group, give_secret, one_group, silent
from strangers import UNKNOWN, connected, frame, has_ended, knockers, member, message
from taps import Tap
from tls_streams import SECRET, shake_hands

from qccl.base import deadline
from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.meeting import callers, channel
from qccl.meeting import strangers as dropped
from qccl.meeting.messages import Decided, Decision, Member, Promised
from qccl.meeting.regroup import MembershipSocket

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "secret"])
def has_secret(request, monkeypatch) -> bool:
    """Groups with a secret, which the strangers do not know, and those without one."""
    give_secret(monkeypatch, SECRET if request.param else None)
    return bool(request.param)


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


@pytest.mark.processes
@pytest.mark.parametrize("limit", [64, 100])
def test_processes_that_want_to_join_take_no_descriptor_that_ranks_need(limit):
    """250 of them at each of two ranks, which may open so many descriptors; they call again when they are dropped."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIMITED, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}:{ROOT / 'tests/meeting'}"},
    )
    with process:
        try:
            ports = [int(port) for port in process.stdout.readline().split()]
            with knockers(*(("127.0.0.1", port) for port in ports), count=500):
                out, _ = process.communicate("\n", timeout=60)
        finally:
            process.kill()
    assert out == "[1, 2] True\n"


def test_a_silent_caller_is_dropped_soon_and_a_rank_is_not(monkeypatch):
    monkeypatch.setattr(callers, "HELLO_SECONDS", 0.2)
    with Group(2) as group, connected(group.ranks[0].place) as quiet, closing(MembershipSocket("127.0.0.1")) as new:
        knocking = threading.Thread(
            target=lambda: suppress(Exception).__enter__() or new.knock(group.ranks[0].place, b"new", Deadline(60.0))
        )
        knocking.start()
        patience.wait_until(group.ranks[0].waiting)
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


def test_strangers_take_a_bounded_number_of_bytes(monkeypatch):
    """Each of 20 has sent a part of a message; together they may have a tenth of it, also while they are read."""
    part = channel._HEAD.pack(channel._MAGIC, channel.MOST_NBYTES, b"") + bytes(10_000)
    monkeypatch.setattr(callers, "_MOST_NBYTES", 2 * len(part))
    kept: list[int] = []
    with Group(1) as group, ExitStack() as stack:
        unknown, hear = group.ranks[0]._callers._unknown, callers.Callers._hear

        def heard(self: callers.Callers, caller: callers.Caller) -> None:
            hear(self, caller)
            kept.append(sum(each.nbytes for each in unknown))

        monkeypatch.setattr(callers.Callers, "_hear", heard)
        strangers = [stack.enter_context(connected(group.ranks[0].place, part)) for _ in range(20)]

        def are_dropped() -> bool:
            group.ranks[0].hear()
            return sum(map(has_ended, strangers)) >= 18

        patience.wait_until(are_dropped)
    assert len(part) <= max(kept) <= 2 * len(part)


def test_a_decision_behind_many_strangers_is_read_before_anything_is_decided():
    """It waits at the socket of a rank that was stopped; meanwhile the others end, and it could make a group alone."""
    with Group(3) as group, ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(group.ranks[2].place))
        with silent(2):
            assert group.numbers(one_group(group.agree(0, 1))) == [0, 1]
        for _ in range(100):
            stack.enter_context(connected(group.ranks[2].place))
        for rank in (0, 1):
            group.ranks[rank].close()
        (late,) = group.agree(2)
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
        with connected(me.place, message(kind="decided", to=me.id, decided=decision)):
            found = group.agree(0, 1, timeout=1.0 if is_left_out and not has_secret else 60.0)
        if is_left_out and not has_secret:  # its author knows the id, which only ranks do
            assert isinstance(found[0], PeerLost)
        else:
            assert group.numbers(one_group(found)) == [0, 1] and found[0] == found[1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_old_decision(epoch, has_secret):
    """The ranks are in group 1; a decision on this group, or on the one before, is sent to one of them again."""
    with Group(3) as group:
        known = one_group(group.agree(0, 1, 2))
        old = Decision(epoch, known.members[:1], 0, known.members)
        seal = channel.Keys.of(SECRET if has_secret else None).seal
        with connected(group.ranks[0].place, channel.frame(Decided(group.ranks[0].id, old), seal)):
            found = group.agree(0, 1, 2)
        assert one_group(found).epoch == 2 and found.count(found[0]) == 3


@pytest.mark.parametrize(
    ("greets", "answer"),
    [
        (False, b""),
        (False, b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        (True, frame(b"[" * 9999)),
        (True, frame(b"{}")),
        (False, None),
    ],
    ids=["silent", "another protocol", "nested", "no fields", "another secret"],
)
def test_a_stranger_at_the_port_of_a_rank_that_has_ended(greets, answer, has_secret):
    """The others wait for it as for a rank that is silent, and go on."""
    with Group(3) as group, ThreadPoolExecutor(1) as pool:
        port = group.ranks[0].place[1]
        group.ranks[0].close()
        over = threading.Event()

        def serve(server: socket.socket) -> None:
            while not over.is_set():
                with suppress(OSError):
                    connection, _ = server.accept()
                    if answer is None and has_secret:
                        assert not shake_hands(connection, bytes(32), is_server=True)
                        continue
                    with connection:
                        connection.sendall(message(kind="challenge", nonce=UNKNOWN) * greets + (answer or b""))
                        over.wait(0.2)

        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(0.05)
            serving = pool.submit(serve, server)
            try:
                with silent(0):
                    found = group.agree(1, 2)
            finally:
                over.set()
            serving.result(120)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]


def test_a_cause_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(dropped, "_reported", set())
    with Group(2) as group:
        for _ in range(5):
            with connected(group.ranks[0].place, b"GET / HTTP/1.1\r\n\r\n" * 10) as caller:
                patience.wait_until(lambda: has_ended(caller), group.ranks[0].waiting)
    assert [record.message for record in caplog.records] == [
        "dropped a connection that is not of a rank: it speaks another protocol (further ones are not reported)"
    ]


# -- groups with a secret ------------------------------------------------------------------------------------------

with_secret = pytest.mark.parametrize("has_secret", [True], indirect=True, ids=["secret"])


@with_secret
@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["none", "another"])
def test_nobody_joins_without_the_secret(secret, monkeypatch, caplog):
    """With another one it is dropped at once, and told in the log; without one it is like all who say nothing."""
    clock, limit, looks = Clock(), patience.Limit(60), 0
    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(dropped, "_reported", set())
    with Group(2) as group, closing(MembershipSocket("127.0.0.1", secret=secret)) as new, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new.knock, group.ranks[0].place, b"new", Deadline(60.0 if secret else 2.0))
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


@with_secret
def test_what_ranks_say_to_each_other_cannot_be_read():
    """A rank calls another one through a program that keeps all bytes."""
    with Group(2) as group, Tap(group.ranks[0].place) as tap:
        first = group.ranks[0].member(b"first")
        group.ranks[1].latest = Decision(
            0, (Member.make(first.id, *tap.place, first.machine, b"first"), group.ranks[1].member(b"first")), 0
        )
        found = group.agree(0, 1)
        assert all(isinstance(each, Decision) for each in found), found
    for said in (tap.said(0), tap.said(1)):
        assert said[:1] == callers.HANDSHAKE
        assert not any(text in said for text in (b"nonce", b"kind", group.ranks[0].id.encode(), channel._MAGIC))


@with_secret
def test_a_decision_for_a_stopped_rank_is_sealed():
    """It is read without an answer, by the process that it is for; changed, or without the secret, it is not."""
    with Group(3) as group:
        me, other = group.ranks[2], group.ranks[0]
        left_out = Decision(1, (other.member(b"first"),), 0, (me.member(b"first"),))
        content = Decided(me.id, left_out)
        seal = channel.Keys.of(SECRET).seal
        forged = [
            channel.frame(content),
            channel.frame(content, os.urandom(32)),
            channel.frame(content, seal).replace(b'"calls"', b'"Calls"').replace(b"[1,", b"[2,", 1),
            channel.frame(Decided(other.id, left_out), seal),
            channel.frame(Promised(), seal),
        ]
        with ExitStack() as stack:
            for each in forged:
                stack.enter_context(connected(me.place, each))
            time.sleep(0.1)
            me.waiting()
            assert [each.inbox for each in me._callers] == []
            stack.enter_context(connected(me.place, channel.frame(content, seal)))
            patience.wait_until(lambda: [*me._callers], me.waiting)
            assert [each.inbox[0].decided for each in me._callers] == [left_out]
