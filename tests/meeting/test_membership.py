"""Agreement on the next group: every loss that ranks can meet, on threads over TCP, without UCX."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import patience
import pytest
from membership_groups import Group, give_secret, one_group, silent

from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.meeting import messages, regroup
from qccl.meeting.channel import Channel
from qccl.meeting.messages import Decision, Message, parse
from qccl.meeting.regroup import MembershipSocket
from qccl.meeting.watch import Watch

pytestmark = pytest.mark.starts_first


@pytest.fixture(autouse=True)
def with_a_secret(monkeypatch):
    """As after qccl.init(); test_membership_callers.py also runs without one."""
    give_secret(monkeypatch)


@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {0, 1}, {1, 2, 3}, {0, 1, 2}, set()])
def test_any_rank_may_end(lost):
    with Group(4) as group:
        left = sorted(set(range(4)) - lost)
        for rank in lost:
            group.ranks[rank].close()
        found = group.agree(*left)
        decision = one_group(found)
        assert len([each for each in found if each == decision]) == len(left)
        assert group.numbers(decision) == left
        assert (decision.epoch, decision.calls) == (1, 100 + left[-1])
        assert [each.worker for each in decision.members] == [b"worker %d" % rank for rank in left]
        assert [group.ranks[rank].rank for rank in left] == list(range(len(left)))


@pytest.mark.parametrize(("kind", "number"), [
    ("Challenge", 1), ("Join", 1), ("Wait", 1), ("Accept", 1), ("Accepted", 1), ("Accepted", 2), ("Decided", 1),
])  # fmt: skip
def test_an_exception_of_the_program_after_a_message_was_sent(kind, number, monkeypatch):
    """A signal's handler may raise what looks like the connection's error. No rank then waits for what follows."""
    send, numbers, raised = Channel.send, itertools.count(1), threading.Event()

    def interrupted(channel: Channel, message: Message, *seconds: float) -> None:
        send(channel, message, *seconds)
        if type(message).__name__ == kind and next(numbers) == number:
            raised.set()
            raise ConnectionResetError("from a signal's handler")

    monkeypatch.setattr(Channel, "send", interrupted)
    give_secret(monkeypatch, None)  # with one no challenge is sent
    with Group(3) as group:
        assert group.numbers(one_group(group.agree_and_meet(0, 1, 2))) == [0, 1, 2] and raised.is_set()


def test_an_exception_of_the_program_while_others_are_informed(monkeypatch):
    inform, calls = MembershipSocket.inform, list[int]()

    def interrupted(self: MembershipSocket, *arguments: Any) -> list[Any]:
        calls.append(self.rank)
        if len(calls) == 1:
            raise ConnectionResetError("from a signal's handler")
        return inform(self, *arguments)

    monkeypatch.setattr(MembershipSocket, "inform", interrupted)
    with Group(3) as group:
        assert group.numbers(one_group(group.agree_and_meet(0, 1, 2))) == [0, 1, 2] and len(calls) > 1


def test_a_timeout_may_be_longer_than_a_message_can_say(monkeypatch):
    monkeypatch.setattr(messages, "MOST_SECONDS", 1.0)
    with Group(3) as group:
        group.ranks[1].close()
        found = group.agree(0, 2)
        assert group.numbers(one_group(found)) == [0, 2] and found[0] == found[1]


def test_a_rank_waits_for_a_message_as_long_as_the_program_wants():
    """poll() takes no more than 2**31 ms."""
    ours, theirs = socket.socketpair()
    with Channel(ours, parse) as channel, Channel(theirs, parse) as other, ThreadPoolExecutor(1) as pool:
        found = pool.submit(channel.receive, Deadline(1e9))
        time.sleep(0.1)
        other.send(messages.Tell(), 1e9)
        assert found.result(60) == messages.Tell()


@pytest.mark.parametrize("away", [0, 1, 2])
def test_a_silent_rank_is_out_for_good(away):
    with Group(3) as group:
        left = sorted({0, 1, 2} - {away})
        with silent(away):
            decision = one_group(group.agree(*left))
        assert group.numbers(decision) == left
        (late,) = group.agree(away, timeout=0.5)
        assert isinstance(late, PeerLost) and "without this one" in str(late), late
        # the others agree again, and it stays out
        found = group.run(group.work(away), *(group.work(rank, after=0.2) for rank in left))
        assert isinstance(found[0], PeerLost) and "without this one" in str(found[0]), found
        assert group.numbers(one_group(found[1:])) == left


def replaced(group: Group, new: MembershipSocket) -> None:
    """``new`` joins ranks 0 and 1, which then end."""
    place = "127.0.0.1", group.ranks[0]._port
    found = group.run(group.grow(0), group.work(1), lambda: new.knock(place, b"new", Deadline(30.0)))
    assert found == [one_group(found)] * 3 and len(found[0].members) == 3
    for rank in (0, 1):
        group.ranks[rank].close()


def test_a_stopped_rank_makes_no_group_beside_those_that_replaced_the_others():
    """It continues when all ranks that it knows have ended, and does not know the process that lives."""
    with Group(3) as group, closing(MembershipSocket("127.0.0.1")) as new:
        with silent(2):
            assert group.numbers(one_group(group.agree(0, 1))) == [0, 1]
        replaced(group, new)
        (late,) = group.agree(2)
        assert isinstance(late, PeerLost) and "without this one" in str(late), late
        (alone,) = group.run(lambda: new.agree(b"new", 0, 60.0))
        assert isinstance(alone, Decision) and [member.id for member in alone.members] == [new.id]


def test_a_rank_that_was_out_of_reach_hears_of_the_group_from_a_new_process(monkeypatch):
    """No rank that it knows could reach it. The next group remembers it until it has been reached, or has ended."""
    with Group(3) as group, closing(MembershipSocket("127.0.0.1")) as new:
        with monkeypatch.context() as patch:
            refuse(patch, group.ranks[2], error=TimeoutError)
            with silent(2):
                assert group.numbers(one_group(group.agree(0, 1))) == [0, 1]
            replaced(group, new)
        (alone,) = group.run(lambda: new.agree(b"new", 0, 60.0))
        assert isinstance(alone, Decision) and alone.left_out == ()
        (late,) = group.agree(2)
        assert isinstance(late, PeerLost) and "without this one" in str(late), late


def test_another_process_at_the_port_of_a_rank_that_is_left_out(monkeypatch):
    """It is not told of a group that is none of its own."""
    with Group(3) as group:
        with silent(2):
            group.agree(0, 1)
        port = group.ranks[2]._port
        group.ranks[2].close()
        monkeypatch.setattr(regroup, "listen_at", lambda host, ports: socket.create_server(("", port)))
        with closing(MembershipSocket("127.0.0.1")) as other:
            other.begin([other.member(b"here")])
            found = group.agree(0, 1)
            assert group.numbers(one_group(found)) == [0, 1] and found[0] == found[1]
            (own,) = group.run(lambda: other.agree(b"here", 0, 60.0))
            assert isinstance(own, Decision) and [member.id for member in own.members] == [other.id]


def test_newcomers_get_the_numbers_behind_the_others():
    with (
        Group(2) as group,
        closing(MembershipSocket("127.0.0.1")) as first,
        closing(MembershipSocket("127.0.0.1")) as second,
    ):
        places = [("127.0.0.1", rank._port) for rank in group.ranks]
        found = group.run(
            group.grow(0),
            group.grow(1),
            lambda: first.knock(places[1], b"new", Deadline(30.0)),
            lambda: second.knock(places[0], b"new", Deadline(30.0)),
        )
        decision = one_group(found)
        assert len(decision.members) == 4 and found.count(decision) == 4
        assert (second.rank, first.rank) == (2, 3), "in the order of the ranks that they called"
        # from now on they are members like the others
        group.ranks[0].close()
        found = group.run(group.work(1), lambda: first.agree(b"w", 0, 60.0), lambda: second.agree(b"w", 0, 60.0))
        assert len(one_group(found).members) == 3 and found.count(found[0]) == 3


def test_a_newcomer_that_has_ended_is_not_waited_for():
    with Group(2) as group:
        gone = MembershipSocket("127.0.0.1")
        with pytest.raises(CollectiveTimeout, match=r"all ranks must call comm\.grow\(\)"):
            gone.knock(("127.0.0.1", group.ranks[0]._port), b"new", Deadline(0.2))
        gone.close()
        patience.wait_until(lambda: not group.ranks[0].waiting())  # a system under load may tell its end late


@pytest.mark.parametrize("ended", [0, 2])
def test_another_group_at_the_port_of_a_rank_that_has_ended(ended, monkeypatch):
    """Its answers are not those of the rank, which has ended."""
    with Group(3) as group, closing(MembershipSocket("127.0.0.1")) as away:
        port = group.ranks[ended]._port
        group.ranks[ended].close()
        monkeypatch.setattr(regroup, "listen_at", lambda host, ports: socket.create_server(("", port)))
        with closing(MembershipSocket("127.0.0.1")) as other:
            other.latest = Decision(5, (other.member(b"here"), away.member(b"away")), 3)
            left = sorted({0, 1, 2} - {ended})
            found = group.run(*map(group.work, left), lambda: other.agree(b"here", 0, 1.0))
        assert group.numbers(one_group(found[:2])) == left and found[0] == found[1]


def test_a_coordinator_learns_what_it_has_missed():
    """Rank 2 knows the next group already, and rank 1 does not: it hears of it when rank 2 calls."""
    with Group(3) as group:
        members = tuple(group.ranks[rank].member(b"worker %d" % rank) for rank in (1, 2))
        known = group.ranks[2]._adopt(Decision(1, members, 7))
        group.ranks[0].close()

        def twice() -> Decision:
            assert group.work(1)() == known
            return group.work(1)()

        found = group.run(twice, group.work(2))
        assert found[0] == found[1] and one_group(found).epoch == 2 and group.numbers(found[0]) == [1, 2]


def refuse(
    monkeypatch: pytest.MonkeyPatch, *ranks: MembershipSocket, error: type[OSError] = ConnectionRefusedError
) -> None:
    """A firewall refuses connections to these ranks, which live; with TimeoutError it drops them."""
    ports, call = {rank._port for rank in ranks}, regroup.call

    def refused(place: tuple[str, int], *more: Any, **how: Any) -> Channel:
        if place[1] in ports:
            raise error
        return call(place, *more, **how)

    monkeypatch.setattr(regroup, "call", refused)


def test_a_firewall_that_refuses_leaves_no_living_rank_out(monkeypatch):
    """Ranks 1 and 2 come late, and call rank 0, which cannot call them."""
    with Group(3) as group:
        refuse(monkeypatch, *group.ranks[1:])
        found = group.run(group.work(0), group.work(1, after=0.3), group.work(2, after=0.6))
        assert group.numbers(one_group(found)) == [0, 1, 2] and found.count(found[0]) == 3
        assert group.ranks[0].find_lost(1) is None


def test_ranks_that_are_refused_by_the_first_wait_for_it(monkeypatch):
    """Rank 1 makes no group alone, though rank 0 seems to have ended: rank 0 is half of the group."""
    with Group(2) as group:
        refuse(monkeypatch, group.ranks[0])
        first, second = group.run(group.work(0, 3.0, after=1.0), group.work(1, 1.0))
        assert isinstance(second, CollectiveTimeout) or "without this one" in str(second), second
        assert isinstance(first, Decision) and group.numbers(first) == [0]


@pytest.mark.parametrize("was_reached", [True, False])
def test_a_refusal_from_another_machine_counts_where_the_socket_was_reached(was_reached, monkeypatch):
    with Group(3) as group:
        monkeypatch.setattr(regroup, "machine", lambda: "0" * 64)  # its address is also one of this machine
        for rank in group.ranks[1:]:
            watch = Watch([(member.host, member.port) for member in rank.members])
            if was_reached:
                rank.look(watch)
            watch.close()
        group.ranks[0].hear()
        me = group.ranks[0].members[0]
        group.ranks[0].close()
        with socket.socket() as nobody:
            nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            nobody.bind((me.host, me.port))  # without listen() it refuses, and no other program takes the port
            with silent(0):
                found = group.agree(1, 2)
        assert group.numbers(one_group(found)) == [1, 2] and found[0] == found[1]
        assert (group.ranks[0].id in {member.id for member in found[0].left_out}) == (not was_reached)
