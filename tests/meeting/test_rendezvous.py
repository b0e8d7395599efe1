"""The meeting of ranks that no MPI started: a fixed, checked message over TCP, and what else can be met there."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress

import pytest
from meeting_ranks import challenge, gather, hello, reach
from patience import Limit, factor
from strangers import stream

from qccl import ArgumentError, CollectiveTimeout, EngineError, MismatchError
from qccl.base.deadline import Deadline
from qccl.meeting import callers, channel, meeting_host
from qccl.meeting.channel import Channel, frame
from qccl.meeting.meeting_messages import Hello, MeetingKind, MeetingMessage, parse, seal
from qccl.meeting.rendezvous import PORT_OFFSET, meeting_place
from qccl.meeting.strangers import NotARank

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

MESSAGE = bytes(range(128))


def share(message, rank, *arguments):
    """The note of rank 0."""
    return gather(message if rank == 0 else b"here", rank, *arguments)[0]


def ranks(size, port, *, timeout=60.0, host="127.0.0.1"):
    """What share() returned or raised on each rank."""

    def run(rank):
        try:
            return share(MESSAGE, rank, size, (host, port), timeout)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def after_each_message(monkeypatch, act):
    """Ranks that have received a message in the first gather ``act`` before they go on."""
    receive = Channel.receive

    def received(*arguments):
        found = receive(*arguments)
        act(found)
        return found

    monkeypatch.setattr(Channel, "receive", received)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_every_rank_gets_the_message(size, host, port):
    assert ranks(size, port, host=host) == [MESSAGE] * size


def test_rank_0_waits_as_long_as_the_program_wants(port):
    """epoll() takes no more than 2**31 ms."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(share, MESSAGE, 0, 2, ("127.0.0.1", port), 1e9)
        assert share(None, 1, 2, ("127.0.0.1", port), 60.0) == first.result(60) == MESSAGE


CROWD = """
import resource, sys
hard, port, size, timeout = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
from qccl.meeting.rendezvous import Rendezvous
with Rendezvous(0, size, ("127.0.0.1", port)) as meeting:
    print(len(meeting.gather(b"", timeout)), flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("hard", "is_met"), [(256, True), (32, False)])
def test_rank_0_has_descriptors_for_all_ranks(hard, is_met, port):
    """It raises its soft limit, and says what is missing where it must not."""
    timeout = 60 if is_met else 5
    command = [sys.executable, "-c", CROWD, str(hard), str(port), "41", str(timeout)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with first, ThreadPoolExecutor(40) as pool:
        reach(port).close()
        others = [pool.submit(share, None, rank, 41, ("127.0.0.1", port), timeout) for rank in range(1, 41)]
        out, error = first.communicate(timeout=60)
        assert all(is_met == (each.exception(60) is None) for each in others)
    assert out == ("41\n" if is_met else "")
    assert is_met or ("did not come to rank 0" in error and "EMFILE" in error), error


@pytest.mark.parametrize(("size", "job", "text"), [(3, "mine", "this is rank 1 of 3"), (2, "yours", "another job")])
def test_ranks_that_disagree_are_named_on_rank_0(size, job, text, port, end_deadlines):
    """By the deadline: a caller may also belong to another job."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(share, MESSAGE, 0, 2, ("127.0.0.1", port), 60.0, "mine")
        other = pool.submit(share, None, 1, size, ("127.0.0.1", port), 60.0, job)
        with pytest.raises(MismatchError, match=text):
            other.result(60)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match=text):
            first.result(60)


def test_two_processes_with_the_same_rank(port, end_deadlines):
    with ThreadPoolExecutor(3) as pool:
        both = [pool.submit(share, None, 1, 3, ("127.0.0.1", port), 60.0) for _ in range(2)]
        first = pool.submit(share, MESSAGE, 0, 3, ("127.0.0.1", port), 60.0)
        assert wait(both, 60, FIRST_COMPLETED).done
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match=r"ranks \[2\] did not come .* another process is rank 1, too"):
            first.result(60)
        errors = {type(each.exception(60)): str(each.exception(60)) for each in both}
    assert errors.keys() == {MismatchError, CollectiveTimeout}
    assert "another process is rank 1, too" in errors[MismatchError]
    assert "not every rank came" in errors[CollectiveTimeout]


def test_a_rank_that_does_not_come(port):
    limit = Limit(30)
    with pytest.raises(CollectiveTimeout, match=r"ranks \[1, 2\]"):
        share(MESSAGE, 0, 3, ("127.0.0.1", port), 0.3)
    with pytest.raises(CollectiveTimeout, match=f"127.0.0.1:{port}"):
        share(None, 1, 3, ("127.0.0.1", port), 0.3)
    assert limit.left()


@pytest.mark.parametrize("pause", [1000.0, 1.0], ids=["silent", "slow"])
def test_a_stranger_that_stays_does_not_hold_rank_0_beyond_its_deadline(pause, port, monkeypatch):
    """A hello at a byte each second takes longer than the test waits."""
    monkeypatch.setattr(callers, "HELLO_SECONDS", 1000.0)
    over, place = threading.Event(), ("127.0.0.1", port)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(stream, place, b"q" * 60, over, pause=pause)
        try:
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\]"):
                pool.submit(share, MESSAGE, 0, 2, place, 0.5).result(timeout=30)
        finally:
            over.set()


@pytest.mark.parametrize("interval", [None, 1.0], ids=["silent", "slow"])
def test_a_server_that_never_ends_its_answer_holds_nobody_beyond_the_deadline(interval, end_deadlines, monkeypatch):
    """The rank has a minute to call it, and then half a second."""
    over, receive = threading.Event(), Channel.receive

    def soon(channel, deadline):
        try:
            return receive(channel, Deadline(0.5))
        finally:
            end_deadlines()

    monkeypatch.setattr(Channel, "receive", soon)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def serve():
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    while not over.wait(interval):
                        connection.sendall(b"q")

        with ThreadPoolExecutor(2) as pool:
            pool.submit(serve)
            try:
                with pytest.raises(CollectiveTimeout, match="not every rank came"):
                    pool.submit(share, None, 1, 2, server.getsockname(), 60.0).result(timeout=30)
            finally:
                over.set()


def test_who_does_not_take_the_answer_holds_rank_0_no_longer_than_the_deadline(port, monkeypatch, end_deadlines):
    """Rank 1 of 2 says hello and then nothing: what it is sent, it does not acknowledge."""
    monkeypatch.setattr(meeting_host, "_PATIENCE_SECONDS", 60.0)
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(share, MESSAGE, 0, 2, ("127.0.0.1", port), 60.0)
        with reach(port) as connection:
            connection.sendall(hello(1, 2, b"", ""))
            challenge(connection, "")
            end_deadlines()
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\]"):
                server.result(timeout=30)


def test_a_later_meeting_waits_its_turn():
    """A quick rank that is at the next meeting already does not take part in this one."""
    said = Hello(1, 3, 2, b"stranger", b"")
    assert said.refusal(3, 1) == MeetingMessage(MeetingKind.LATER)
    assert said.refusal(3, 2) is None


def test_something_else_listens_there():
    used = pytest.raises(EngineError, match="another program or a second rank 0 uses")
    with socket.create_server(("127.0.0.1", 0)) as server, used:
        share(MESSAGE, 0, 2, ("127.0.0.1", server.getsockname()[1]), 5.0)


@pytest.mark.parametrize("damaged", [15, channel._HEAD.size, channel._HEAD.size + 40])
def test_a_damaged_message(damaged):
    """In its checksum, its kind or its content."""
    reply = bytearray(frame(MeetingMessage(MeetingKind.REFUSED, MESSAGE), seal("")))
    reply[damaged] ^= 1
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        with pytest.raises(NotARank, match="damaged"):
            Channel(ours, parse, seal("")).receive(Deadline(5.0))


def test_notes_of_any_length(port):
    notes = [b"", b"x" * 300, bytes(range(256)) * 200]
    with ThreadPoolExecutor(3) as pool:
        each = [pool.submit(gather, note, r, 3, ("127.0.0.1", port), 60.0) for r, note in enumerate(notes)]
        assert [found.result(timeout=60) for found in each] == [notes] * 3
    with pytest.raises(ArgumentError, match="65536"):
        gather(b"x" * 65537, 0, 2, ("127.0.0.1", port), 10.0)


def test_a_rank_that_is_slow_to_acknowledge_has_its_answer(port, monkeypatch):
    """It was paused longer than a caller's patience; rank 0 waits for it until its deadline."""
    monkeypatch.setattr(meeting_host, "_PATIENCE_SECONDS", 0.1)
    after_each_message(monkeypatch, lambda found: time.sleep(0.5))
    assert ranks(2, port) == [MESSAGE] * 2


def test_an_address_that_does_not_exist(port):
    with pytest.raises(
        CollectiveTimeout,
        match=r"address of rank 0, 'no-such-host.invalid', cannot be found .* for 0.3 s; see MASTER_A",
    ):
        share(None, 1, 2, ("no-such-host.invalid", port), 0.3)


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_an_address_that_does_not_exist_yet(port, monkeypatch, number):
    """The name service of a cluster knows a machine a while after its processes have started, or does not answer."""
    usual, asked = socket.getaddrinfo, []

    def getaddrinfo(host, *arguments, **more):
        if host == "rank-0.test":
            asked.append(host)
            if len(asked) < 3:
                raise socket.gaierror(number, "not yet")
        return usual("127.0.0.1" if host == "rank-0.test" else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(share, None, 1, 2, ("rank-0.test", port), 60.0)
        while len(asked) < 2:
            time.sleep(0.01)
        assert gather(b"zero", 0, 2, ("127.0.0.1", port), 60.0)[0] == b"zero"
        assert first.result(60)


def test_meeting_place():
    assert meeting_place({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}) == ("node1", 29500 + PORT_OFFSET)
    assert meeting_place({"MASTER_ADDR": "node1", "MASTER_PORT": "65530"}) == ("node1", 65530 - PORT_OFFSET)
    assert meeting_place({"MASTER_ADDR": "node1", "MASTER_PORT": "1", "QCCL_PORT": "700"}) == ("node1", 700)
    for host in ("fd77::11", "[fd77::11]"):
        assert meeting_place({"MASTER_ADDR": host, "QCCL_PORT": "7"}) == ("fd77::11", 7)
    for environ, text in (
        ({}, "cannot find each other: MASTER_ADDR and MASTER_PORT .or QCCL_PORT. are not set.*scontrol"),
        ({"MASTER_ADDR": "node1"}, "cannot find each other: MASTER_PORT .or QCCL_PORT. is not set"),
        ({"MASTER_PORT": "1"}, "cannot find each other: MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"MASTER_ADDR": "node1", "QCCL_PORT": "70000"}, "QCCL_PORT='70000'"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){text}"):
            meeting_place(environ)


def test_ranks_that_come_one_after_the_other_and_prove_slowly_meet(port, monkeypatch):
    """At each instant, one of them is being asked for a proof, or has given it too long ago."""
    monkeypatch.setattr(meeting_host, "_FRESH_SECONDS", 0.2)
    after_each_message(monkeypatch, lambda found: time.sleep(0.15 * (found.kind is MeetingKind.PROVE)))
    with ThreadPoolExecutor(8) as pool:
        found = []
        for rank in range(8):
            found.append(pool.submit(share, MESSAGE, rank, 8, ("127.0.0.1", port), 20.0 * factor()))
            time.sleep(0.06)
        assert [each.result(600) for each in found] == [MESSAGE] * 8


def test_who_did_not_prove_that_it_is_still_there_is_named(port, monkeypatch):
    """All have come, and one of them is stopped then."""
    monkeypatch.setattr(meeting_host, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(meeting_host, "_PROOF_SECONDS", 30.0)
    kinds = []
    after_each_message(
        monkeypatch, lambda found: kinds.append(found.kind) or time.sleep(2.0 * (kinds.count(MeetingKind.PROVE) > 1))
    )
    first, other = ranks(2, port, timeout=1.0)
    assert isinstance(first, CollectiveTimeout) and "ranks [1] did not come" in str(first)
    assert isinstance(other, CollectiveTimeout)


@pytest.mark.processes
def test_a_process_that_met_others_elsewhere_meets_here(port):
    """Each process numbers its meetings at each place: one has met another before, and a third comes to the next."""
    script = """
import sys
from qccl.meeting.rendezvous import Rendezvous
for place, rank in eval(sys.argv[1]):
    with Rendezvous(rank, 2, ("127.0.0.1", place)) as meeting:
        assert meeting.gather(b"", 60.0) == [b"", b""]
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        other = free.getsockname()[1]
    both = [(port, 0), (other, 0)], [(port, 1)], [(other, 1)]
    processes = [subprocess.Popen([sys.executable, "-c", script, repr(each)]) for each in both]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
