"""The protocol of membership.py without sockets: ranks exchange messages in many orders, and some are lost.

In every order the ranks that decide have one group for each epoch, and no rank waits for ever. A step gives one rank
one message, or the end of one connection. Orders are tried at random, in small worlds nearly all that there are.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest

from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.meeting import messages
from qccl.meeting.membership import Agreement, Membership, Own
from qccl.meeting.messages import Decision, Member, Message

NONCE = "0" * 32
TIMEOUT = 0.5
#: all agreements end before, or a rank waits for ever
MOST_SECONDS = 120.0


class Line:
    """A connection. Each side has a queue of what the other side has sent; None: it has closed the connection."""

    def __init__(self, caller: Process, rank: int, called: Process) -> None:
        self.sides = {caller: deque([messages.Challenge(NONCE)]), called: deque()}
        self.keys = {caller: rank, called: self}
        self.is_kept = False
        caller.lines[rank] = self
        called.lines[self] = self
        self.other = {caller: called, called: caller}

    def end(self, process: Process) -> None:
        process.lines.pop(self.keys[process], None)
        self.sides[process].clear()
        self.sides[self.other[process]].append(None)


class Process:
    """A rank, or a process that waits to join."""

    def __init__(self, number: int) -> None:
        self.me = Membership(f"{number:032x}", "127.0.0.1", 1 + number)
        self.number = number
        self.agreement: Agreement | None = None
        self.lines: dict[Any, Line] = {}  # by the names that the agreement knows them by
        self.waiting: list[Process] = []
        self.error: Exception | None = None
        self.is_ended = self.is_stopped = False
        self.left_out: list[Decision] = []  # sent to its socket


class World:
    """``size`` ranks of one group that agree on the next, under a scheduler."""

    def __init__(self, size: int, chosen: Random) -> None:
        self.chosen, self.now = chosen, 0.0
        self.processes = [Process(number) for number in range(size)]
        members = [process.me.member(b"first") for process in self.processes]
        for process in self.processes:
            process.me.begin(members)
        self.found: dict[int, set[Decision]] = {}
        self.said: list[Message] = []

    def join(self, rank: int) -> Process:
        """A process that waits at a rank."""
        new = Process(len(self.processes))
        self.processes.append(new)
        self.processes[rank].waiting.append(new)
        return new

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            process = self.processes[rank]
            own = Own(process.me.member(b"%d" % rank), rank, [each.me.member(b"new") for each in process.waiting])
            process.agreement = Agreement(process.me, own, TIMEOUT, self.now)
            self.act(process)

    def end(self, process: Process) -> None:
        process.is_ended = True
        process.agreement = None
        for line in list(process.lines.values()):
            line.end(process)

    def by(self, member: Member) -> Process:
        return next(each for each in self.processes if each.me.id == member.id)

    def living(self) -> list[int]:
        return [each.number for each in self.processes if not each.is_ended]

    # -- what agreements want ----------------------------------------------------------------------------------------

    def act(self, process: Process) -> None:
        agreement = process.agreement
        while agreement is not None and agreement.actions:
            do, channel, message = agreement.actions.pop(0)
            line = process.lines.get(channel) if do != "inform" else None
            if message is not None:
                sent = messages.Decided(NONCE, message.decided) if do == "inform" else message
                message = messages.parse(sent.packed())
                self.said.append(message)
            if do == "call":
                called = self.by(process.me.members[channel])
                if called.is_ended:
                    agreement.refused(channel, self.now)
                else:
                    Line(process, channel, called)
            elif do == "inform":
                for member in channel:
                    self.by(member).left_out.append(message.decided)
                agreement.informed([])
            elif do == "keep":
                assert line is not None
                line.is_kept = True
            elif line is None:
                assert do == "close" or channel not in process.lines
            else:
                if message is not None:
                    line.sides[line.other[process]].append(message)
                if do == "close":
                    line.end(process)
        if agreement is not None and agreement.decision is not None:
            self.decided(process, agreement.decision)

    def decided(self, process: Process, decision: Decision) -> None:
        """It leaves the agreement; as the driver does, it keeps the callers that it has not heard."""
        process.agreement = None
        for line in [each for key, each in process.lines.items() if isinstance(key, int) or each.is_kept]:
            line.end(process)
        self.found.setdefault(decision.epoch, set()).add(decision)
        self.adopt(process, decision)
        for new in process.waiting:
            if new.me.id in {member.id for member in decision.members}:
                self.adopt(new, decision)
        process.waiting.clear()

    def adopt(self, process: Process, decision: Decision) -> None:
        process.me.adopt(decision)
        try:
            assert decision.members[process.me.rank].id == process.me.id
        except PeerLost as error:
            process.error = error

    # -- what comes --------------------------------------------------------------------------------------------------

    def steps(self) -> list[tuple[Process, Any]]:
        """The queues of which one may give the next message."""
        found: list[tuple[Process, Any]] = []
        for process in self.processes:
            agreement = process.agreement
            if agreement is None or process.is_stopped:
                continue
            for key, line in process.lines.items():
                is_ready = isinstance(key, int) or line.is_kept or agreement.gathers
                called_lives = line.is_kept or not isinstance(key, int) or not line.other[process].is_stopped
                if line.sides[process] and is_ready and called_lives:
                    found.append((process, key))
        return found

    def step(self, process: Process, key: Any) -> None:
        agreement = process.agreement
        assert agreement is not None
        line = process.lines[key]
        message = line.sides[process].popleft()
        if message is None:
            line.end(process)
            agreement.lost(key, self.now)
        else:
            agreement.heard(key, message, self.now)
        self.act(process)
        self.passed(process)

    def passed(self, process: Process) -> None:
        while process.agreement is not None and process.agreement.gathers and process.left_out:
            process.agreement.heard(object(), messages.Decided("", process.left_out.pop(0)), self.now)
            self.act(process)
        if process.agreement is not None:
            try:
                process.agreement.passed(self.now)
            except CollectiveTimeout as error:
                process.error, process.agreement = error, None
                for line in [each for key, each in process.lines.items() if isinstance(key, int) or each.is_kept]:
                    line.end(process)
            self.act(process)

    def under_way(self) -> list[Process]:
        return [each for each in self.processes if each.agreement is not None and not each.is_stopped]

    def run(self, *victims: int) -> None:
        """Until every rank has decided, or failed. The ``victims`` may end before any step."""
        for process in self.under_way():
            self.passed(process)
        while self.under_way():
            steps = self.steps()
            ends = [process for process in map(self.processes.__getitem__, victims) if not process.is_ended]
            if steps or ends:
                number = self.chosen.pick(len(steps) + len(ends))
                if number < len(steps):
                    self.step(*steps[number])
                else:
                    self.end(ends[number - len(steps)])
                continue
            self.now += 0.25
            assert self.now < MOST_SECONDS, "a rank waits for ever"
            for process in self.under_way():
                self.passed(process)

    def run_to_the_end(self, *victims: int) -> None:
        """Ranks whose group has a rank that has ended agree again."""
        self.run(*victims)
        for _ in self.processes:
            again = [
                each.number
                for each in self.processes
                if not (each.is_ended or each.is_stopped or each.error or each.me.epoch < 0)
                and any(self.by(member).is_ended for member in each.me.members)
            ]
            if not again:
                break
            self.begin(*again)
            self.run()

    def check(self) -> list[int]:
        """Each epoch has one group. Returns the numbers of the processes in the last one."""
        assert all(len(groups) == 1 for groups in self.found.values()), self.found
        if not self.found:
            return []
        (last,) = self.found[max(self.found)]
        return [self.by(member).number for member in last.members]


class Random(random.Random):
    def pick(self, count: int) -> int:
        return self.randrange(count)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ranks_end_at_any_time(size):
    """One or several: also those that coordinate, or that have decided and told nobody."""
    for seed in range(800):
        chosen = Random(seed)
        world = World(size, chosen)
        world.begin(*range(size))
        world.run_to_the_end(*chosen.sample(range(size), chosen.randrange(1, size)))
        assert world.check() == world.living(), seed


def test_what_a_rank_has_accepted_is_proposed_again():
    """All four have accepted a list when rank 0 ends, and rank 1 alone is told. It ends, too."""
    world = World(4, Random(0))
    world.begin(0, 1, 2, 3)
    first = world.processes[0]
    while first.agreement is not None:
        steps = world.steps()
        if steps:
            world.step(*steps[0])
    (decision,) = world.found[1]
    for key, line in list(world.processes[1].lines.items()):
        while world.processes[1].agreement is not None and line.sides[world.processes[1]]:
            world.step(world.processes[1], key)
    assert world.processes[1].me.latest == decision
    for process in world.processes[2:]:
        for line in process.lines.values():
            line.sides[process] = deque([None])  # the announcement is lost
    for number in (0, 1):
        world.end(world.processes[number])
    world.run()
    assert [world.processes[number].me.latest for number in (2, 3)] == [decision] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_of_an_agreement_without_losses(size):
    """Two round trips after a rank's connection: it joins and is asked to accept; it has accepted, and is told."""
    world = World(size, Random(0))
    world.begin(*range(size))
    world.run()
    assert world.check() == list(range(size))
    found = Counter(map(type, world.said))
    assert not found[messages.Prepare]
    assert [found[kind] for kind in (messages.Join, messages.Accept, messages.Accepted)] == [size - 1] * 3


def test_ranks_that_have_promised_different_ballots_promise_once_more():
    world = World(3, Random(0))
    world.processes[1].me.promised = 4, 1
    world.begin(*range(3))
    world.run()
    assert world.check() == [0, 1, 2]
    ballots = [said.ballot for said in world.said if isinstance(said, messages.Prepare | messages.Accept)]
    assert ballots == [(5, 0)] * 4


def test_a_rank_that_joins_after_the_time_has_nothing_to_wait_for():
    first, second = (
        Agreement(process.me, Own(process.me.member(b""), process.number, []), TIMEOUT, 0.0)
        for process in World(2, Random(0)).processes
    )
    second.heard(0, messages.Challenge(NONCE), 0.0)
    first.heard("a caller", second.actions[-1].message, 3 * TIMEOUT)
    assert first.actions[-1].message == messages.Wait(0.0)


def test_a_late_coordinator_that_begins_again_keeps_its_followers():
    """They wait as long as it has told them, and longer than their own timeout, also when they come again."""
    world = World(2, Random(0))
    agreement = Agreement(world.processes[1].me, Own(world.processes[1].me.member(b""), 0, []), TIMEOUT, 0.0)
    agreement.heard(0, messages.Challenge(NONCE), 0.0)
    agreement.heard(0, messages.Wait(100.0), 0.0)
    agreement.passed(50.0)
    agreement.lost(0, 50.0)
    agreement.passed(51.0)
    assert [action.do for action in agreement.actions] == ["call", "send", "call"]


def test_an_old_ballot_is_refused():
    world = World(2, Random(0))
    agreement = Agreement(world.processes[1].me, Own(world.processes[1].me.member(b""), 0, []), TIMEOUT, 0.0)
    agreement.heard(0, messages.Challenge(NONCE), 0.0)
    agreement.heard(0, messages.Prepare((5, 0)), 0.0)
    value = Decision(1, world.processes[0].me.members, 0)
    agreement.heard(0, messages.Accept((4, 0), value), 0.0)
    assert [action.do for action in agreement.actions] == ["call", "send", "send", "close"]
    assert world.processes[1].me.promised == (5, 0) and world.processes[1].me.accepted is None


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_processes_join_while_a_rank_ends(victim):
    """Those that waited at the rank that ended are not in the group, unless it was decided before."""
    for seed in range(100):
        world = World(4, Random(seed))
        new = [world.join(0), world.join(2)]
        world.begin(0, 1, 2, 3)
        world.run_to_the_end(victim)
        found = world.check()
        assert [each for each in found if each < 4] == [each for each in world.living() if each < 4], seed
        assert found == [*found[:3], *(each for each in (4, 5) if each in found)] or victim in (0, 2)
        assert all(new[n - 4].me.latest in world.found[new[n - 4].me.epoch] for n in found if n >= 4)


@pytest.mark.parametrize(
    ("size", "stopped"),
    [
        *((2, {0}), (2, {1}), (3, {0}), (3, {1}), (4, {0}), (4, {3}), (4, {2})),
        *((4, {1, 2}), (4, {2, 3}), (4, {0, 1}), (4, {0, 3}), (5, {1, 2, 3}), (5, {0, 1})),
    ],
)
def test_stopped_ranks_make_no_second_group(size, stopped):
    """More than half of the ranks make a group without them, or half of them with rank 0.

    They go on when the others have decided, and then these end: they are told, or were in the group.
    """
    for seed in range(50):
        world = World(size, Random(seed))
        silent = [world.processes[rank] for rank in stopped]
        for process in silent:
            process.is_stopped = True
        world.begin(*range(size))
        world.run()
        decided = len(world.found)
        assert decided == (2 * (size - len(stopped)) + (0 not in stopped) > size)
        for process in world.processes:
            if process.number not in stopped:
                assert decided or isinstance(process.error, CollectiveTimeout)
                world.end(process)
        for process in silent:
            process.is_stopped = False
        world.run_to_the_end()
        found = world.check()
        if decided:
            assert not stopped & {*found} and all(isinstance(process.error, PeerLost) for process in silent)
        else:
            assert not any(isinstance(process.error, PeerLost) for process in silent)
            assert len(stopped) > 1 or found == [*stopped]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_end_stop_and_come_late(size):
    """Whatever happens, no two groups."""
    for seed in range(200):
        chosen = Random(seed)
        world = World(size, chosen)
        fates = [chosen.choice(["comes", "comes", "ends", "stops", "late"]) for _ in range(size)]
        for process, fate in zip(world.processes, fates, strict=True):
            process.is_stopped = fate == "stops"
            if fate == "ends":
                world.end(process)
        world.begin(*(rank for rank, fate in enumerate(fates) if fate in ("comes", "stops")))
        world.run(chosen.randrange(size))
        for process in world.processes:
            process.is_stopped = False
        late = [r for r, fate in enumerate(fates) if fate == "late" and not world.processes[r].is_ended]
        world.begin(*late)
        world.run_to_the_end()
        world.check()


def inject(world: World, chosen: Random) -> None:
    """A message that was sent before, on any connection; or one of a stranger, on a new one.

    callers.py drops messages of ranks that are repeated on new connections, because of their nonces.
    """
    process = chosen.choice(world.under_way())
    stranger = Member.make(chosen.randbytes(16).hex(), "127.0.0.1", 9, "0" * 64, b"none")
    forged = messages.Decided(process.me.id, Decision(1, (stranger,), 0))
    said = chosen.choice(
        [
            *world.said,
            forged,
            unexpected := messages.Promised(),
            *(
                kind(NONCE, process.me.id, e, stranger, 0, (), (9, 9), None)
                for kind in (messages.Join, messages.Probe)
                for e in (0, 9)
            ),
        ]
    )
    agreement = process.agreement
    assert agreement is not None
    if chosen.random() < 0.5 and process.lines:
        line = chosen.choice(list(process.lines.values()))
        is_first = line.keys[process] is line and not line.is_kept
        if not is_first and not isinstance(said, messages.Decided):  # a rank never tells another group
            line.sides[process].append(said)
    elif agreement.gathers and (said in (forged, unexpected) or getattr(said, "member", None) == stranger):
        agreement.heard(object(), said, world.now)
        world.act(process)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_repeated_and_forged_messages(size):
    """They may cost a connection, and never make a second group, or a rank wait for ever."""
    for seed in range(100):
        chosen = Random(seed)
        world = World(size, chosen)
        world.begin(*range(size))
        pick, left = chosen.pick, itertools.count(-20)

        def disturbed(count: int, world: World = world, chosen: Random = chosen, left=left, pick=pick) -> int:
            if next(left) < 0 and chosen.random() < 0.5 and world.under_way():
                inject(world, chosen)
            return pick(count)

        chosen.pick = disturbed
        world.run_to_the_end()
        world.check()
        assert all(each.me.epoch <= 1 or each.error for each in world.processes)
