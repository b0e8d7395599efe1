"""Rank 0 of a meeting and those who call it: proofs, strangers in the place of a rank, and tokens."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
from meeting_ranks import JOB, Meeting, challenge, gather, hello, prove
from strangers import connected
from taps import Tap
from tls_streams import shake_hands

from qccl import CollectiveTimeout, EngineError, MismatchError
from qccl.communicator import launch
from qccl.meeting import channel, meeting_host, meetings
from qccl.meeting import strangers as dropped
from qccl.meeting.channel import frame
from qccl.meeting.meeting_host import MeetingHost
from qccl.meeting.meeting_messages import Hello, MeetingKind, MeetingMessage, join, seal
from qccl.meeting.network import Network
from qccl.meeting.secret import derive
from qccl.meeting.secure_socket import SecureSocket
from qccl.transports import choice, connect, ucx

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

NOTES = [*Meeting.NOTES]
KEY, OTHER = derive(bytes(32), "meeting"), derive(b"other", "meeting")


# -- two processes that say to be the same rank ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_one_that_has_proved_itself_and_is_silent_does_not_keep_the_place(order, port, monkeypatch):
    """As a process that knows the job and hangs, or that a stranger has taken over."""
    monkeypatch.setattr(meeting_host, "_PROOF_SECONDS", 1.0)
    monkeypatch.setattr(meeting_host, "_FRESH_SECONDS", 0.1)
    with Meeting(port) as met, connected(("127.0.0.1", port), hello(1)) as silent:
        prove(silent)
        time.sleep(0.2)
        met.go_on(*order)


def test_one_that_has_proved_itself_and_leaves_leaves_nothing(port, patient_host):
    """Its note is not that of the rank."""
    with Meeting(port) as met:
        with connected(("127.0.0.1", port), hello(1)) as gone:
            prove(gone)
            gone.shutdown(socket.SHUT_WR)
            assert gone.recv(1) == b""  # rank 0 has noticed; a system under load may tell it late
        found = [met.first, met.start(2)]
        time.sleep(0.2)  # rank 0 would have three notes
        found.append(met.start(1))
        assert [each.result(60) for each in found] == [NOTES] * 3


def test_a_proof_is_of_no_use_to_another_caller(port, patient_host):
    """It is sent a second time, after the hello to which it belonged."""
    with Meeting(port) as met:
        with connected(("127.0.0.1", port), hello(1)) as gone:
            proof = frame(MeetingMessage(MeetingKind.PROOF, challenge(gone)), seal(JOB))
        with connected(("127.0.0.1", port), hello(1)) as again:
            challenge(again)
            again.sendall(proof)
            with suppress(ConnectionError):
                while again.recv(1000):
                    pass  # it is dropped
            met.go_on()


def test_one_that_does_not_know_the_job(port, patient_host):
    """It repeats the hello of a rank, as anyone who has read it, and does not know the name."""
    with Meeting(port) as met, connected(("127.0.0.1", port), hello(1)) as stranger:
        prove(stranger, "a guess")
        met.go_on()


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


def sealed(kind: MeetingKind, content: bytes = b"") -> bytes:
    """A message of a program that knows the job."""
    return frame(MeetingMessage(kind, content), seal(JOB))


def proved(said: bytes) -> bytes:
    """What a program says that knows the job."""
    return sealed(MeetingKind.PROVE, bytes(16) + Hello.of(said[channel._HEAD.size + 1 :]).process)


@pytest.mark.parametrize(
    "answer",
    [
        lambda said: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        lambda said: bytes(512),
        lambda said: sealed(MeetingKind.HELLO),
        lambda said: channel._HEAD.pack(channel._MAGIC, 2**32 - 1, bytes(16)),
        lambda said: sealed(MeetingKind.NOTES, join(NOTES).content),  # without a proof
        lambda said: sealed(MeetingKind.PROVE, bytes(24)),
        lambda said: sealed(MeetingKind.PROVE),
        lambda said: proved(said) + sealed(MeetingKind.NOTES, b"x"),
        lambda said: proved(said) + sealed(MeetingKind.NOTES, struct.pack("<3I", 2**32 - 1, 0, 0)),
    ],
    ids=["http", "zeros", "hello", "length", "unproved", "wrong proof", "no proof", "short", "lengths"],
)
def test_what_answers_is_not_rank_0(answer):
    error = answered(answer)
    assert isinstance(error, EngineError) and "is not rank 0 of this job" in str(error), error
    assert "QCCL_PORT" in str(error)


@pytest.mark.parametrize("kind", [MeetingKind.PROVE, MeetingKind.NOTES, MeetingKind.REFUSED])
def test_what_answers_is_rank_0_of_another_job(kind):
    error = answered(lambda said: frame(MeetingMessage(kind, bytes(24)), seal("another")))
    assert isinstance(error, MismatchError) and "is not rank 0 of this job" in str(error), error
    assert "another job" in str(error) and "QCCL_PORT" in str(error)


# -- other versions of qccl --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "TLS"])
def test_a_caller_of_another_version(key, port, end_deadlines):
    with Meeting(port, key) as met:
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        with closing(SecureSocket(plain, key, is_server=False) if key else plain) as caller:
            caller.settimeout(60)
            caller.sendall(hello(1).replace(channel._MAGIC, b"qccl/me2"))
            assert b"another version of qccl" in caller.recv(1000)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match="another version of qccl; install the same one on all ranks"):
            met.first.result(60)


@pytest.mark.parametrize("magic", [b"qccl/me2", b"qccl/rdv"])
def test_rank_0_of_another_version(magic):
    error = answered(lambda said: magic + bytes(100))
    assert isinstance(error, MismatchError) and "another version of qccl; install the same one" in str(error), error


def test_a_text_from_the_network_is_shown_without_control_characters():
    error = answered(lambda said: sealed(MeetingKind.REFUSED, b"\x1b[2J\x07no\xff\x9b"))
    assert isinstance(error, MismatchError) and "\\x1b[2J\\x07no" in str(error), error
    assert str(error).isprintable()
    assert dropped.printable("a\nb\u202e" + "c" * 2000, 10) == "a\\nb\\u202ecccccc..."


# -- notes -------------------------------------------------------------------------------------------------------------


def met(note: bytes) -> meetings.Meeting:
    """A meeting in which rank 1 brings this note."""
    return meetings.Meeting("the test", 0, 2, lambda own, timeout: [own, note])


@pytest.mark.parametrize(
    "note",
    [b"", b"\n", b"\xff\xfe", b"[" * 60_000, b"{}", b'["a"]', b'"thirteen char"', b"[%s]" % b",".join([b'""'] * 13)],
)
def test_a_note_of_another_form_is_a_mismatch(note):
    """In the choice of a transport."""
    meeting = met(note)
    with pytest.raises(MismatchError, match="rank 1 brought a note"):
        connect.connect(meeting, 5.0)


def test_reasons_of_other_ranks_are_shown_without_control_characters():
    note = choice.Offer("network", ucx="no UCX", gloo="no gloo", wan="no wan").note()
    meeting = met(note.replace(b"no UCX", rb"no \u001b[31mUCX"))
    with pytest.raises(EngineError, match=r"rank 1: no .x1b.31mUCX") as raised:
        connect.connect(meeting, 5.0)
    assert str(raised.value).isprintable()
    assert launch._first_reason([b"", b"\x1b]0;title\x07"]) == "rank 1: \\x1b]0;title\\x07"


@pytest.mark.skipif(bool(choice.obstacle("ucx")), reason=choice.obstacle("ucx") or "UCX is there")
@pytest.mark.parametrize(
    "note",
    [b"x", b"100", b"100 ", b"x []", b"100 3", b'100 ["a"]', b"100 " + b"[" * 60_000, b"\xff" * 100, b"1" * 5000],
)
def test_an_address_of_another_form_is_a_mismatch(note):
    """In the notes by which UCX's ranks connect: it ends the process that connects to an address that is none."""
    with pytest.raises(MismatchError, match="rank 1 brought a note"):
        ucx.UcxTransport.meet(lambda own: [own, note], 5.0, Network(is_local=True))


# -- tokens ------------------------------------------------------------------------------------------------------------


def captured(port: int, key: bytes | None) -> tuple[bytes, bytes]:
    """What goes over the network in a meeting."""
    with Meeting(port, key) as met, Tap(("127.0.0.1", port)) as tap:
        met.go_on(port=tap.place[1])
    return tap.said(0), tap.said(1)


@pytest.mark.parametrize("key", [None, KEY], ids=["none", "a token"])
def test_who_reads_a_meeting_with_a_token_reads_no_note(key, port):
    """Without one the notes can be read, so the test finds what it looks for."""
    to, back = captured(port, key)
    assert (NOTES[1] in to and NOTES[0] in back) == (key is None)
    if key is not None:
        assert len(to) > 300 and len(back) > 300
        assert not any(text in each for text in (*NOTES, b"note", b"the job", channel._MAGIC) for each in (to, back))


def test_what_a_rank_has_said_is_of_no_use_to_another_caller(port):
    said, _ = captured(port, KEY)
    with Meeting(port, KEY) as met, connected(("127.0.0.1", port), bytes(said)) as again:
        met.go_on()
        again.settimeout(60)
        answer = b""
        with suppress(OSError):
            while part := again.recv(1 << 16):
                answer += part
        assert len(answer) < 1000  # of the handshake


@pytest.fixture
def refusals(monkeypatch) -> threading.Semaphore:
    """Counts the callers that rank 0 has refused."""
    found, refuse = threading.Semaphore(0), MeetingHost._refuse

    def refused(self: MeetingHost, *arguments: Any) -> None:
        refuse(self, *arguments)
        found.release()

    monkeypatch.setattr(MeetingHost, "_refuse", refused)
    return found


@pytest.mark.parametrize(
    ("keys", "text", "text_of_rank_0"),
    [
        ((KEY, OTHER), "does not have this rank's token", r"ranks \[1, 2\] did not come.* does not have its token"),
        ((KEY, None), "perhaps it has a QCCL_TOKEN, and this rank has none", "a caller that does not have its token"),
        (
            (None, KEY),
            "perhaps rank 0 has no token",
            r"ranks \[1, 2\] did not come.* rank 0 has no token, and a caller ",
        ),
    ],
    ids=["another on rank 1", "none on rank 1", "none on rank 0"],
)
def test_different_tokens(keys, text, text_of_rank_0, port, end_deadlines, refusals):
    with Meeting(port, keys[0]) as met:
        second = met.start(1, keys[1])
        for _ in range(2 if keys[1] is None else 1):  # at the second one the rank has seen the first one's end
            assert refusals.acquire(timeout=60)
        if None not in keys:
            with pytest.raises(EngineError, match=f"{text}.* set the same QCCL_TOKEN on all ranks"):
                second.result(60)
        end_deadlines()
        if None in keys:
            with pytest.raises(CollectiveTimeout, match=text):
                second.result(60)
        with pytest.raises(CollectiveTimeout, match=text_of_rank_0) as raised:
            met.first.result(60)
        assert "set the same QCCL_TOKEN" in str(raised.value)


def test_no_message_is_parsed_without_the_token(port, end_deadlines, refusals, monkeypatch):
    """Its sender knows the job's name, with which messages are sealed."""
    parsed: list[bytes] = []
    monkeypatch.setattr(meeting_host, "parse", parsed.append)
    with Meeting(port, KEY) as met, connected(("127.0.0.1", port), hello(1)):
        assert refusals.acquire(timeout=60)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match="does not have its token"):
            met.first.result(60)
    assert not parsed


def test_a_caller_that_says_nothing_is_no_reason(port, end_deadlines, monkeypatch):
    """As a port scanner: the error of rank 0 does not blame the token. A Meeting's begin calls so."""
    gone, drop = threading.Event(), MeetingHost.drop

    def dropped_caller(self: MeetingHost, *arguments: Any) -> None:
        drop(self, *arguments)
        gone.set()

    monkeypatch.setattr(MeetingHost, "drop", dropped_caller)
    with Meeting(port, KEY) as met:
        assert gone.wait(60)
        end_deadlines()
        with pytest.raises(CollectiveTimeout, match="did not come") as raised:
            met.first.result(60)
    assert "token" not in str(raised.value)


def test_why_rank_0_ended_a_connection_is_said_though_the_deadline_cuts_the_next_try(port, end_deadlines):
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(60)
        found = pool.submit(gather, b"", 1, 2, server.getsockname(), 60.0)
        server.accept()[0].close()
        with server.accept()[0] as second:
            end_deadlines()
            second.sendall(b"q")  # the rank wakes, and waits for the rest of a message
            with pytest.raises(CollectiveTimeout, match="perhaps it has a QCCL_TOKEN, and this rank has none"):
                found.result(60)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None], ids=["silent", "http", "TLS"])
def test_a_program_in_the_place_of_rank_0_learns_nothing(answer):
    """It says something, or has TLS with another key."""
    got, timeout = bytearray(), 2.0 if answer == b"" else 60.0
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                if answer is None:
                    assert not shake_hands(connection, OTHER, is_server=True)
                    return
                with connection:
                    connection.settimeout(60)
                    connection.sendall(answer)
                    while part := connection.recv(1 << 16):
                        got.extend(part)

        server.settimeout(timeout)
        thread = threading.Thread(target=serve)
        thread.start()
        error = pool.submit(gather, NOTES[1], 1, 3, server.getsockname(), timeout, JOB, key=KEY).exception(120)
        thread.join(60)
    assert isinstance(error, CollectiveTimeout if answer == b"" else EngineError), error
    assert NOTES[1] not in got and channel._MAGIC not in got
