"""Strangers at the port at which ranks meet, and what they cannot do: be a rank, keep a place, or end the job."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import meeting_ranks
import pytest
from meeting_ranks import challenge, gather, prove, reach
from strangers import PAYLOADS, connected, mutated, strangers

from qccl import ArgumentError, EngineError, MismatchError, launch, meetings
from qccl.launchers import Launcher
from qccl.transports import callers, choice, meeting_host, meeting_messages, rendezvous, sockets, ucx
from qccl.transports import strangers as dropped
from qccl.transports.meeting_messages import HELLO_NBYTES, Kind, message
from qccl.transports.messages import Member

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

JOB = "the job"
NOTES = [b"zero", b"one", b"two"]


def hello(rank: int, **how: Any) -> bytes:
    return meeting_ranks.hello(rank, **{"job": JOB} | how)


HEAD = HELLO_NBYTES
#: what strangers send to rank 0, beside what they send to any socket
TO_RANK_0: dict[str, bytes] = {
    "a rank that says no more": hello(1),
    "a rank with a wrong proof": hello(1) + bytes(32),
    "half a hello": hello(1)[:50],
    "half a note": hello(1, note=b"a" * 100)[:-1],
    "a long note": hello(1, note=b"a" * 100_000),
    "more than a hello": hello(1) + b"more",
    "rank 0": hello(0),
    "no rank": hello(77),
    "another job": hello(1, job="another"),
    "another size": hello(1, size=5),
    "acknowledgement": hello(1) + b"\x06",
}


@contextmanager
def meeting(port: int, timeout: float = 60.0, job: str = JOB):
    """Starts a rank: rank -> its future."""
    with ThreadPoolExecutor(8) as pool:

        def start(rank: int, note: bytes | None = None):
            return pool.submit(gather, note or NOTES[rank], rank, 3, ("127.0.0.1", port), timeout, job)

        yield start


@pytest.mark.parametrize("name", [*TO_RANK_0, *PAYLOADS])
def test_a_stranger_changes_nothing(name, port):
    """It comes before the ranks, and stays."""
    payload = TO_RANK_0[name] if name in TO_RANK_0 else PAYLOADS[name](random.Random(0))
    with meeting(port) as start, ExitStack() as stack:
        found = [start(0)]
        reach(port).close()
        stack.enter_context(connected(("127.0.0.1", port), payload))
        found += [start(rank) for rank in (1, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3


def test_many_strangers_at_once(port):
    with strangers(("127.0.0.1", port), count=4), meeting(port) as start:
        for _ in range(3):
            assert [each.result(60) for each in [start(rank) for rank in range(3)]] == [NOTES] * 3


def test_damaged_hellos(port):
    with meeting(port) as start, ExitStack() as stack:
        found = [start(0)]
        reach(port).close()
        for seed in range(100):
            chosen = random.Random(seed)
            stack.enter_context(connected(("127.0.0.1", port), mutated(hello(1), chosen)))
        found += [start(rank) for rank in (1, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3


def test_callers_beyond_the_room_go_the_oldest_first(port, monkeypatch):
    monkeypatch.setattr(callers, "seats", lambda: 4)
    monkeypatch.setattr(callers, "HELLO_SECONDS", 30.0)
    with meeting(port) as start, ExitStack() as stack:
        found = [start(0)]
        reach(port).close()
        for _ in range(50):
            stack.enter_context(connected(("127.0.0.1", port)))
        found += [start(rank) for rank in (1, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3


# -- two processes that say to be the same rank ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_one_that_has_proved_itself_and_is_silent_does_not_keep_the_place(order, port, monkeypatch):
    """As a process that knows the job and hangs, or that a stranger has taken over."""
    monkeypatch.setattr(meeting_host, "_PROOF_SECONDS", 1.0)
    monkeypatch.setattr(meeting_host, "_FRESH_SECONDS", 0.1)
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        with connected(("127.0.0.1", port), hello(1)) as silent:
            prove(silent, hello(1), JOB)
            time.sleep(0.2)
            found += [start(rank) for rank in order]
            assert all(each.result(60) == NOTES for each in found)


def test_one_that_has_proved_itself_and_leaves_leaves_nothing(port, patient_host):
    """Its note is not that of the rank."""
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        with connected(("127.0.0.1", port), hello(1)) as gone:
            prove(gone, hello(1), JOB)
            gone.shutdown(socket.SHUT_WR)
            assert gone.recv(1) == b""  # rank 0 has noticed; a system under load may tell it late
        found.append(start(2))
        time.sleep(0.2)
        found.append(start(1))
        assert [each.result(60) for each in found] == [NOTES] * 3


def test_a_proof_is_of_no_use_to_another_caller(port, patient_host):
    """It is sent a second time, after the hello to which it belonged."""
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        with connected(("127.0.0.1", port), hello(1)) as gone:
            nonce, _ = challenge(gone)
            proof = meeting_messages.proof(JOB.encode(), b"rank", nonce, hello(1))
        with connected(("127.0.0.1", port), hello(1)) as again:
            challenge(again)
            again.settimeout(60)
            again.sendall(proof)
            with suppress(ConnectionError):
                while again.recv(1000):
                    pass  # it is dropped
            found += [start(rank) for rank in (1, 2)]
            assert [each.result(60) for each in found] == [NOTES] * 3


def test_one_that_does_not_know_the_job(port, patient_host):
    """It has the right digest, as anyone who has read it, and not the name."""
    with meeting(port) as start:
        found = [start(0)]
        reach(port).close()
        with connected(("127.0.0.1", port), hello(1)) as stranger:
            prove(stranger, hello(1), "a guess")
            found += [start(rank) for rank in (1, 2)]
            assert [each.result(60) for each in found] == [NOTES] * 3


# -- strangers in the place of rank 0 ----------------------------------------------------------------------------------


def answered(answer: Callable[[bytes], bytes], job: str = JOB) -> BaseException | None:
    """What rank 1 raises where rank 0 is a program that says ``answer(hello)``."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:

        def serve():
            with suppress(OSError), server.accept()[0] as connection:
                connection.sendall(answer(connection.recv(1 << 16)))
                over.wait(60)

        server.settimeout(60)
        pool.submit(serve)
        try:
            return pool.submit(gather, b"one", 1, 3, server.getsockname(), 60.0, job).exception(120)
        finally:
            over.set()


def proved(said: bytes) -> bytes:
    """What a program says that knows the job."""
    nonce = bytes(16)
    return message(Kind.PROVE, nonce + meeting_messages.proof(JOB.encode(), b"rank 0", nonce, said))


@pytest.mark.parametrize(
    "answer",
    [
        lambda said: b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
        lambda said: meeting_messages._HEAD.pack(
            meeting_messages._MAGIC, meeting_messages._VERSION, 2**32 - 1, 0, bytes(32)
        ),
        lambda said: meeting_messages._HEAD.pack(
            meeting_messages._MAGIC, meeting_messages._VERSION, 0, 2**32 - 1, bytes(32)
        ),
        lambda said: message(Kind.NOTES, meeting_messages.join(NOTES)),  # without a proof
        lambda said: message(Kind.PROVE, bytes(48)),
        lambda said: message(Kind.PROVE, b""),
        lambda said: proved(said) + message(Kind.NOTES, b"x"),
        lambda said: proved(said) + message(Kind.NOTES, struct.pack("<3I", 2**32 - 1, 0, 0)),
    ],
    ids=["http", "verdict", "length", "unproved", "wrong proof", "no proof", "short", "lengths"],
)
def test_what_answers_is_not_rank_0(answer):
    error = answered(answer)
    assert isinstance(error, EngineError) and "is not rank 0 of this job" in str(error), error


def test_a_text_from_the_network_is_shown_without_control_characters():
    error = answered(lambda said: message(Kind.REFUSED, b"\x1b[2J\x07no\xff\x9b"))
    assert isinstance(error, MismatchError) and "\\x1b[2J\\x07no" in str(error), error
    assert str(error).isprintable()
    assert dropped.printable("a\nb\u202e" + "c" * 2000, 10) == "a\\nb\\u202ecccccc..."


# -- notes -------------------------------------------------------------------------------------------------------------


def met(note: bytes) -> meetings.Meeting:
    """A meeting in which rank 1 brings this note."""
    return meetings.Meeting("the test", 0, 2, lambda own, timeout: [own, note])


@pytest.mark.parametrize("note", [b"", b"\n", b"\xff\xfe", b"\n" * 9, b"a\nb"])
def test_a_note_of_another_form_is_a_mismatch(note):
    """In the choice of a transport."""
    meeting = met(note)
    with pytest.raises(MismatchError, match="rank 1 brought a note"):
        meetings.connect(meeting, 5.0)


def test_reasons_of_other_ranks_are_shown_without_control_characters():
    note = choice.Offer("network", "", "", "", "", "", "", "no UCX", "no gloo", "no wan").note()
    meeting = met(note.replace(b"no UCX", b"no \x1b[31mUCX"))
    with pytest.raises(EngineError, match=r"rank 1: no .x1b.31mUCX") as raised:
        meetings.connect(meeting, 5.0)
    assert str(raised.value).isprintable()
    kind, text = launch._verdict([b"?", b"?\x1b]0;title\x07"])
    assert kind == launch._NO and text == "rank 1: \\x1b]0;title\\x07"


@pytest.mark.skipif(bool(meetings.obstacle("ucx")), reason=meetings.obstacle("ucx") or "UCX is there")
@pytest.mark.parametrize(
    "note",
    [b"x", b"100", b"100 ", b"x []", b"100 3", b'100 ["a"]', b"100 " + b"[" * 60_000, b"\xff" * 100, b"1" * 5000],
)
def test_an_address_of_another_form_is_a_mismatch(note):
    """In the notes by which UCX's ranks connect: it ends the process that connects to an address that is none."""
    with pytest.raises(MismatchError, match="rank 1 brought a note"):
        ucx.UcxTransport(lambda own: [own, note], 5.0, is_local=True)


# -- ports and addresses -----------------------------------------------------------------------------------------------


def to_itself() -> socket.socket:
    """What connect() returns now and then where nobody listens: the system gave the caller the port that it calls."""
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    return itself


def test_a_socket_that_called_itself(monkeypatch):
    with to_itself() as itself:
        monkeypatch.setattr(socket, "create_connection", lambda place, timeout: itself)
        with pytest.raises(ConnectionRefusedError, match="called itself"):
            sockets.connect(itself.getsockname(), 5.0)
        assert itself.fileno() == -1


def test_a_rank_that_waits_for_rank_0_does_not_take_itself_for_it(monkeypatch, port):
    real, has_called = socket.create_connection, threading.Event()

    def call(*where, **more):
        if has_called.is_set():
            return real(*where, **more)
        has_called.set()
        return to_itself()

    monkeypatch.setattr(socket, "create_connection", call)
    with meeting(port) as start:
        found = [start(1)]
        assert has_called.wait(60)
        found += [start(rank) for rank in (0, 2)]
        assert [each.result(60) for each in found] == [NOTES] * 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host:80", ("host", 80)),
        ("[fd77::11]:29500", ("fd77::11", 29500)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        *((text, None) for text in ("host", "host:", ":80", "[]:80", "host:0", "host:65536", "host:\u0663", "", None)),
    ],
)
def test_addresses(text, found):
    assert sockets.host_and_port(text) == found
    assert found is None or sockets.place_text(found) == text


@pytest.mark.parametrize("host", ["fd77::11", "[fd77::11]"])
def test_an_address_of_ipv6_in_the_environment(host):
    assert rendezvous.meeting_place({"MASTER_ADDR": host, "QCCL_PORT": "7"}) == ("fd77::11", 7)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_over_ipv6(port):
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(gather, NOTES[rank], rank, 2, ("::1", port), 60.0) for rank in range(2)]
        assert [each.result(60) for each in found] == [NOTES[:2]] * 2


def test_a_name_of_this_machine_for_its_loopback_interface(monkeypatch, port):
    """As in Debian's /etc/hosts: other machines find another address for it."""
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **kw: getaddrinfo("127.0.1.1" if host == "debian" else host, *more, **kw),
    )
    with sockets.listen("debian", port) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")
    with sockets.listen("debian", port, is_local=True) as server:
        assert server.getsockname()[:2] == ("127.0.1.1", port)
    for host in ("localhost", "127.0.0.1"):
        with sockets.listen(host, port) as server:
            assert server.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("is_local", [False, True])
def test_a_name_with_addresses_of_both_families(is_local, port, monkeypatch):
    """Other machines may have one of them only. Where all ranks are here, they try all addresses."""
    getaddrinfo = socket.getaddrinfo

    def both(host, *more, **kw):
        if host != "both":
            return getaddrinfo(host, *more, **kw)
        return [*getaddrinfo("::1", *more, **kw), *getaddrinfo("127.0.0.1", *more, **kw)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr(sockets, "is_loopback", lambda host: False)  # they stand for addresses of the network
    with sockets.listen("both", port, is_local=is_local):
        sockets.connect(("both", port), 5.0).close()
        if is_local:
            with pytest.raises(ConnectionRefusedError):
                sockets.connect(("127.0.0.1", port), 5.0)
        else:
            sockets.connect(("127.0.0.1", port), 5.0).close()
            sockets.connect(("::1", port), 5.0).close()


NO_NAMES = ["a..b", ".a", "a" * 64, "a" * 64 + ".b", "a\0b", "[[]]]", "[a", "a]b"]


@pytest.mark.parametrize("host", NO_NAMES)
def test_what_is_no_name_of_a_host(host, port):
    assert sockets.host_and_port(f"{host}:80") is None
    with pytest.raises(ArgumentError, match="MASTER_ADDR"):
        rendezvous.meeting_place({"MASTER_ADDR": host, "MASTER_PORT": "80"})
    with pytest.raises(ArgumentError, match="address="):
        launch._given(0, 2, f"{host}:80")
    with pytest.raises(ArgumentError, match="address="):
        launch.join(f"{host}:80", 1.0)
    with pytest.raises(dropped.NotARank):
        Member.of(list(Member.make("0" * 32, host, 1, "0" * 64, b"")))
    for call in (lambda: sockets.connect((host, port), 1.0), lambda: sockets.listen(host, port)):
        with pytest.raises(socket.gaierror):
            call()


@pytest.mark.parametrize("host", ["a", "a.b.", "a" * 63, "127.0.0.1", "fd77::11", "fe80::1%eth0", "node_1.x-y"])
def test_what_is_a_name_of_a_host(host):
    assert sockets.host_and_port(sockets.place_text((host, 80))) == (host, 80)
    assert Member.of(list(Member.make("0" * 32, host, 1, "0" * 64, b""))).host == host


def test_ranks_of_one_machine_meet_on_its_loopback_interface(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, b"", 0, 2, ("127.0.0.1", port), 60.0)
        reach(port).close()
        listening = [
            line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"
        ]
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
        gather(b"", 1, 2, ("127.0.0.1", port), 60.0)
        first.result(60)


# -- the job's name ----------------------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
}
SRUN = Launcher("srun", 0, 2, 0, 0)


def name_and_place(launcher: Launcher, environ: dict[str, str]) -> tuple[str, tuple[str, int]]:
    job = meetings._job(launcher, environ)
    return job, meetings._place(launcher, environ, job, is_local=meetings._is_local(launcher, environ))


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "8"},
        {"SLURM_STEP_NODELIST": "n2"},  # the other group of a heterogeneous job
        {"SLURM_HET_GROUP_ID": "1"},
        {"SLURM_PACK_GROUP_ID": "1"},
    ],
)
def test_steps_of_slurm_have_names_and_ports_of_their_own(other):
    (name, (host, port)), (other_name, (_, other_port)) = (name_and_place(SRUN, each) for each in (STEP, STEP | other))
    assert name != other_name and port != other_port and host == "127.0.0.1"


def test_ranks_of_one_step_have_one_name():
    per_rank = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)} for rank in range(2)]
    assert len({name_and_place(SRUN, STEP | each) for each in per_rank}) == 1
    # set by hand in a step that has all ranks, and in one step for each rank
    by_hand = Launcher("torchrun", 0, 2, 0, 0)
    assert "SLURM_STEP_ID=0" in meetings._job(by_hand, STEP)
    alone = [STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": str(step)} for step in range(2)]
    assert {meetings._job(by_hand, each) for each in alone} == {"SLURM_JOB_ID=7"}


def test_a_node_whose_name_is_not_known():
    """The ranks of one node need no name; the others learn at once what is missing."""
    assert name_and_place(SRUN, STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid"})[1][0] == "127.0.0.1"
    with pytest.raises(EngineError, match=r"'no-such-host.invalid', cannot be found .* set MASTER_ADDR"):
        name_and_place(SRUN, STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_STEP_NUM_NODES": "2"})


def test_two_mpiexecs_have_names_of_their_own(monkeypatch):
    """MPICH's gives its ranks no name. They are told apart by the process above them."""
    local = Launcher("MPICH", 0, 2, 0, 2)
    assert meetings._mpiexec().split()[0].isdecimal()
    tree = {
        50: ("sh", 40, "5"),
        40: ("hydra_pmi_proxy", 30, "4"),
        30: ("mpiexec", 1, "3"),
        60: ("hydra_pmi_proxy", 1, "9"),
    }
    monkeypatch.setattr(meetings, "_process", tree.__getitem__)
    names = []
    for parent in (50, 40, 60):  # a rank that a shell started, its sibling, and one of another job
        monkeypatch.setattr(meetings.os, "getppid", lambda parent=parent: parent)
        names.append(name_and_place(local, {}))
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT .or QCCL_PORT. are not set"),
        ({"MASTER_ADDR": "a"}, "MASTER_PORT .or QCCL_PORT. is not set"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_what_is_missing_is_named(environ, missing):
    with pytest.raises(ValueError, match=f"cannot find each other: {missing}"):
        rendezvous.meeting_place(environ)
