"""Messages of ranks that agree on their next group: what is read, and what is refused."""

from __future__ import annotations

import json
import random

from strangers import UNKNOWN, member

from qccl.meeting import messages
from qccl.meeting.messages import Decision, Member
from qccl.meeting.strangers import NotARank

VALUES = [None, True, -1, 2**70, 0.5, "", "x", "\x1b[2J", [], [[]], {}, {"kind": "join"}, float("nan"), UNKNOWN]


def genuine(chosen: random.Random) -> list[messages.Message]:
    """A message of each kind that has fields."""
    some = member(chosen)
    decision = Decision(3, (some,), 5, (member(chosen),))
    hello = messages.Join(UNKNOWN, UNKNOWN, 0, member(chosen), 0, (some,), (0, 0), ((1, 2), decision))
    return [
        messages.Challenge(UNKNOWN),
        messages.Knock(UNKNOWN, some),
        hello,
        messages.Wait(3.5),
        messages.Accept((3, 1), decision),
        messages.Decided(UNKNOWN, decision),
    ]


def test_genuine_messages_are_read():
    for each in genuine(random.Random(0)):
        assert messages.parse(each.packed()) == each


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
        before = json.loads(chosen.choice(genuine(chosen)).packed())
        try:
            found = messages.parse(json.dumps(changed(before, chosen)).encode())
        except NotARank:
            refused += 1
        else:
            for each in [getattr(found, "member", None), *getattr(found, "newcomers", ())]:
                assert each is None or each == Member.make(each.id, *each.place, each.machine, each.worker)
    assert refused > 1000
