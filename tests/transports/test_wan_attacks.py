"""Strangers at the sockets of wan's ranks, and a rank that lies. Nothing is encrypted, so that they can speak."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, suppress

import patience
import pytest
from wan_groups import Group, group
from wan_wires import (
    ACK,
    ANNOUNCE,
    BYE,
    DATA,
    HELLO,
    NOWHERE,
    PART,
    Fault,
    Lost,
    Raw,
    Wire,
    frame,
    hello,
    poll_until,
    rank_0,
)

#: a group's nonce that is none of the test's
OTHER = b"f" * 32
#: what strangers say, given the group's nonce; a stranger may know it, because addresses are no secret
STRANGERS = {
    "another group": lambda nonce: hello(OTHER, 1),
    "another version": lambda nonce: hello(nonce, 1, version=2),
    "no such rank": lambda nonce: hello(nonce, 2),
    "a rank beyond all numbers": lambda nonce: hello(nonce, 2**64 - 1),
    "the called rank itself": lambda nonce: hello(nonce, 0),
    "for another rank": lambda nonce: hello(nonce, 1, to=1),
    "no such connection": lambda nonce: hello(nonce, 1, slot=1000),
    "a connection below zero": lambda nonce: hello(nonce, 1, slot=-1),
    "a short nonce": lambda nonce: hello(nonce[:-1], 1),
    "a long nonce": lambda nonce: hello(nonce + b"0", 1),
    "no nonce": lambda nonce: hello(b"", 1),
    "a frame before the hello": lambda nonce: frame(DATA, b"1", total=1),
    "a goodbye before the hello": lambda nonce: frame(BYE),
    "an acknowledgement before the hello": lambda nonce: frame(ACK, index=1),
    "zeros": lambda nonce: bytes(10_000),
    "ones": lambda nonce: b"\xff" * 10_000,
    "HTTP": lambda nonce: b"GET / HTTP/1.1\r\nHost: qccl\r\n\r\n" * 100,
    "TLS": lambda nonce: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "noise": lambda nonce: random.Random(0).randbytes(100_000),
    "too many bytes": lambda nonce: frame(HELLO, nbytes=2**32 - 1) + bytes(100_000),
}


def check_calls(of: Group, seconds: float = 60.0) -> None:
    """All ranks make further calls."""
    of.wait_for_calls(list(of.calls), seconds)


def test_strangers_are_dropped_while_the_ranks_call():
    with group() as ranks, ExitStack() as stack:
        raws = {name: stack.enter_context(Raw(ranks.ports[0])) for name in STRANGERS}
        for name, raw in raws.items():
            raw.say(STRANGERS[name](ranks.nonce))
        limit = patience.Limit(4)  # those who say nothing have five seconds
        while left := [name for name, raw in raws.items() if not raw.ended()]:
            assert limit.left(), left
            time.sleep(0.01)
        check_calls(ranks)


def test_strangers_by_bytes_and_in_silence_have_five_seconds():
    with group() as ranks, Raw(ranks.ports[0]) as silent, Raw(ranks.ports[0]) as slow, Raw(ranks.ports[0]) as talks:
        limit = patience.Limit(30)
        data = hello(OTHER, 1)
        while not (silent.ended() and slow.ended() and talks.ended()):
            assert limit.left()
            slow.say(data[:1])
            talks.say(frame(ACK))
            data = data[1:]
            time.sleep(0.1)
        check_calls(ranks)


def test_strangers_for_whom_there_is_no_seat_are_dropped():
    wire = Wire(most_guests=8, hello_seconds=1000.0)
    wire.connect(0, [wire.native.address(), NOWHERE])
    with ExitStack() as stack:
        stack.callback(wire.close)
        raws = [stack.enter_context(Raw(wire.port)) for _ in range(10)]
        poll_until(lambda: sum([raw.ended() for raw in raws]) == 2, wire)


def test_two_thousand_silent_connections():
    with group() as ranks, ExitStack() as stack:
        for _ in range(2000):
            with suppress(OSError):
                stack.enter_context(Raw(ranks.ports[0]))
        check_calls(ranks)
        assert not any(end.done() for end in ranks.ends)


#: what a rank says after its hello. The other one must drop the connection, or report the loss of the rank
LIES = {
    "an unknown kind": frame(77),
    "kind 0": frame(0),
    "the last kind": frame(2**32 - 1),
    "a second hello": hello(OTHER, 1),
    "more bytes than a frame has": frame(DATA, nbytes=PART + 1),
    "4 GiB": frame(DATA, nbytes=2**32 - 1),
    "a part before its offset": frame(DATA, b"12", total=1),
    "a part behind the end": frame(DATA, b"1", total=1, offset=PART),
    "a part at no part's place": frame(DATA, b"1", total=2, offset=1),
    "a short part": frame(DATA, bytes(100), total=2 * PART),
    "the empty end of a message": frame(DATA, total=PART, offset=PART),
    "an offset beyond all numbers": frame(DATA, bytes(PART), total=2**64 - 1, offset=2**64 - 1),
    "a total beyond all numbers": frame(DATA, bytes(PART), total=2**64 - 1),
    "a total that overflows": frame(DATA, bytes(PART), total=2**64 - PART),
    "a message of two sizes": frame(DATA, bytes(PART), total=2 * PART, index=9)
    + frame(DATA, bytes(PART), total=3 * PART, index=9),
    "a message far ahead": frame(DATA, b"1", total=1, index=2**64 - 1),
    "an announcement far ahead": frame(ANNOUNCE, index=2**40),
    "an acknowledgement of nothing": frame(ACK, index=1),
    "an acknowledgement of all": frame(ACK, index=2**64 - 1),
    "too many messages": b"".join(frame(DATA, tag=tag, index=1) for tag in range(400_000)),
}


def outcome(wire: Wire, raw: Raw, seconds: float = 30.0) -> str:
    """How it ended: "lost", or "dropped". Raises AssertionError after ``seconds``."""
    limit = patience.Limit(seconds)
    while limit.left():
        try:
            wire.nap()
        except Lost as error:
            assert error.args[1] == 1
            return "lost"
        if raw.ended():
            return "dropped"
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("name", LIES)
def test_a_rank_that_lies(name):
    with rank_0() as (wire, (raw,)):
        token = wire.receive(1, 5, exact=False)
        raw.socket.setblocking(False)
        rest = LIES[name]
        found = ""
        while rest and not found:
            with suppress(BlockingIOError):
                rest = rest[raw.socket.send(rest) :]
            with suppress(Lost):
                wire.poll()
                continue
            found = "lost"
        found = found or outcome(wire, raw)
        assert found == ("dropped" if name == "a second hello" else "lost")
        assert wire.data(token) == bytes(5)


def test_a_message_that_does_not_fit():
    for total in (0, 4, 6, PART + 5, 2**30):
        with rank_0() as (wire, (raw,)):
            wire.receive(1, 5)
            raw.say(frame(DATA, bytes(min(total, PART)), total=total))
            with pytest.raises(Fault) as raised:
                poll_until(lambda: False, wire)
            assert raised.value.args == (0, 1, "", total, 5)


def test_parts_that_come_twice_count_once():
    data = os.urandom(3 * PART + 7)
    parts = [
        frame(DATA, data[at : at + PART], index=index, total=len(data), offset=at)
        for at in range(0, len(data), PART)
        for index in (0, 1)
    ]
    chosen = random.Random(3)
    with rank_0() as (wire, (raw,)):
        early = wire.receive(1, len(data), exact=False)
        said = parts * 3
        chosen.shuffle(said)
        raw.say(*said)
        while early not in wire.done:
            wire.nap()
        for _ in range(100):
            wire.poll()
        late = wire.receive(1, len(data), exact=False)
        while late not in wire.done:
            wire.nap()
        assert wire.data(early) == wire.data(late) == data
        raw.say(*said, frame(DATA, b"next", index=2, total=4))
        following = wire.receive(1, 4, exact=False)
        while following not in wire.done:
            wire.nap()
        assert wire.data(early) == wire.data(late) == data


def test_a_false_rank_ends_the_group_at_most():
    """It has taken a rank's place on some connections. No rank gets a wrong value, and none waits."""
    for name in ("an unknown kind", "an acknowledgement of all", "a message far ahead"):
        with pytest.raises(Exception, match="rank 1"), group(timeout=30.0) as ranks:
            check_calls(ranks)
            with Raw(ranks.ports[0]) as raw:
                raw.say(hello(ranks.nonce, 1), LIES[name])
                patience.wait_until(lambda: all(end.done() for end in ranks.ends))


def test_a_false_rank_that_takes_connections_away():
    """And says nothing on them: the rank makes them again, so the calls go on."""
    with group() as ranks:
        for slot in (0, 1, 1, 0):
            with Raw(ranks.ports[0]) as raw:
                raw.say(hello(ranks.nonce, 1, slot=slot))
                time.sleep(0.05)
                assert not any(end.done() for end in ranks.ends)
            check_calls(ranks)
