"""Messages of ranks that agree on their next group: what is read, and what is refused."""

from __future__ import annotations

import json
import random
import socket
from contextlib import closing, suppress

import pytest
from strangers import UNKNOWN, hello, member, mutated, real

from qccl.transports import channel, messages
from qccl.transports.messages import Decision, Member
from qccl.transports.strangers import NotARank

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
