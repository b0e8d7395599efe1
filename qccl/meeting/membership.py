"""The agreement on the next group after ranks were lost or came: the protocol, without sockets, threads or a clock.

Events go in (a message came, a connection was lost, time has passed), and actions come out, which regroup.py executes.

Every process has a listening socket, whose address all ranks of its group know from the start, so any rank may be lost.
An *epoch* is the number of a group: each group has the next one. The ranks agree on the members of the next group by
Paxos. The lowest rank that answers coordinates, and the others call it. By its call a rank promises the ballot that it
takes for the coordinator's next one, and reports what it has accepted before. The coordinator waits for all, asks them
to accept a list of members, and announces the list when all have accepted. If the promises are not all of one ballot
that is new to the coordinator, it first asks all to promise another one. If the coordinator is lost, the others call
the next rank, which must propose what any of them has accepted.

There is never a second group, with one exception below. A list needs the promise and the acceptance of the same ranks,
and these are either

- all ranks except those that have ended. The machine of a process that has ended refuses connections to its socket; a
  process that is stopped, busy or out of reach does not refuse them. A firewall may, so refusals count only where none
  is in the way (watch.py). Or
- more than half of the old group, or half of it with rank 0.

Take two lists for one epoch. If a living rank accepted both, the ballot that came later has proposed the same list.
Otherwise all ranks that accepted the first list have ended.

Processes that joined with the first list did not accept it, and may live. A rank that is not on that list does not know
these processes: it would make a group of its own when all ranks that it knows have ended. So every rank that is left
out and has not ended gets the list before it is announced. If the rank is stopped, the list waits in its socket, and it
reads the list before it decides anything: the ranks that it knows end later. The exception is a rank that is out of
reach. Lists name such ranks, and the next coordinators call them, too. Two groups are possible if such a rank is out of
reach for all coordinators until all ranks that it knows have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from qccl.base.errors import CollectiveTimeout, PeerLost
from qccl.meeting import messages
from qccl.meeting.channel import ANSWER_SECONDS, RETRY_SECONDS
from qccl.meeting.messages import (
    Accept,
    Accepted,
    Ballot,
    Challenge,
    Decided,
    Decision,
    Join,
    Member,
    Message,
    Prepare,
    Probe,
    Promised,
    Stranger,
    Tell,
    Wait,
)
from qccl.meeting.strangers import NotARank
from qccl.meeting.topology import machine

__all__ = ["Action", "Agreement", "Membership", "Own", "expect"]

#: seconds until the next call after a machine did not answer
_FAR_SECONDS = 1.0
#: seconds until a silent coordinator is called again, as an exception may have dropped the call; doubled each time
_UNANSWERED_SECONDS = 2.0
#: seconds that a rank waits longer than its coordinator
_MARGIN_SECONDS = 5.0


class Own(NamedTuple):
    """A rank's offer to the next group: itself with a new worker, its number of calls, and processes waiting at it."""

    member: Member
    calls: int
    newcomers: Sequence[Member]


class Action(NamedTuple):
    """An action for the driver; actions are carried out in their order.

    Attributes:
        do: "call" the rank ``channel``: then lost(), refused() or heard() follow. "send" ``message``. "close" the
            channel, after a last ``message`` if there is one. "keep" the caller ``channel``, which now belongs to the
            agreement. "inform" the processes ``channel`` at their sockets of the decision in ``message``, then call
            informed().
        channel: a rank for the connection to it, another object for a caller.
    """

    do: str
    channel: Any
    message: Message | None = None


class Membership:
    """A process's knowledge of its group, and its promise and acceptance for the next one.

    Attributes:
        latest: the group; its epoch is -1 before there is one.
        promised: the latest ballot: its number and coordinator.
        accepted: a ballot and its list.
    """

    def __init__(self, id: str, host: str, port: int) -> None:
        """``id``: the process's id; ``host`` and ``port``: the address of its socket."""
        self.id, self._host, self._port = id, host, port
        self.latest = Decision(-1, (), 0)
        self.promised = 0, 0
        self.accepted: tuple[Ballot, Decision] | None = None

    @property
    def epoch(self) -> int:
        """Number of the group; -1 before there is one."""
        return self.latest.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The group's members, in the order of their ranks; none before there is a group."""
        return self.latest.members

    @property
    def rank(self) -> int:
        """This process's rank. Raises PeerLost if the group does not have it."""
        for rank, member in enumerate(self.members):
            if member.id == self.id:
                return rank
        raise PeerLost(
            "the other ranks have made a group without this one, because it did not answer in time; it can only join "
            "them again as a new process does (qccl.join())"
        )

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of this process's socket."""
        return self._host, self._port

    def member(self, worker: bytes) -> Member:
        """This process as a member, with the address of its worker."""
        return Member.make(self.id, self._host, self._port, machine(), worker)

    def begin(self, members: Iterable[Member]) -> None:
        """Adopt the first group."""
        self.latest = Decision(0, tuple(members), 0)

    def checked(self, decision: Decision) -> Decision:
        """Return a decision from outside. Raises NotARank unless its group is later than this rank's."""
        own = [member for member in decision.members if member.id == self.id]
        if decision.epoch <= self.epoch or any(member.place != self.place for member in own):
            raise NotARank("a decision that is old, or of another group")
        return decision

    def adopt(self, decision: Decision) -> bool:
        """Adopt a group if it is later than this process's. Returns whether it is."""
        is_later = decision.epoch > self.epoch
        if is_later:
            self.latest, self.promised, self.accepted = decision, (0, 0), None
        return is_later

    def told(self, to: str) -> Decided:
        """The message that tells the process with the id ``to`` of the latest group."""
        return Decided(to, self.latest)


#: phase of a ballot -> the message that the coordinator awaits in it
_ANSWERS: dict[str, type[Message]] = {"promised": Promised, "accepted": Accepted}
_M = TypeVar("_M", bound=Message)


def expect(message: Message, kind: type[_M] | tuple[()]) -> _M:
    """Return ``message`` if it is of this kind, or raise NotARank; (): always raise."""
    if not isinstance(message, kind):
        raise NotARank("a message that no rank sends now")
    return message


class Agreement:
    """One rank's part in one agreement: it follows the lower ranks, one after another, then coordinates.

    The driver calls heard(), lost(), refused(), informed() and passed(), with times in seconds, and after each of them
    executes ``actions``. It calls passed() when it has reported everything that came, and reports messages of callers
    only while ``gathers``. Methods raise CollectiveTimeout if too many ranks are silent.

    Attributes:
        actions: the actions that the driver must execute and remove.
        decision: the next group, or a later one that this rank has missed; None until there is one.
    """

    def __init__(self, me: Membership, own: Own, timeout: float, now: float) -> None:
        """``timeout``: seconds after which silent ranks are left out, if there are enough others."""
        self.actions: list[Action] = []
        self.decision: Decision | None = None
        self._me, self._own, self._timeout = me, own, timeout
        self._rank, self._size = me.rank, len(me.members)
        self._leader = -1  # the coordinating rank; -1 before there is one
        self._ended: set[int] = set()
        self._silent: set[int] = set()
        self._call_at: float | None = None  # when the leader, or the missing ranks, are called again
        self._is_greeted = False  # the leader has answered the call
        self._again_at: float | None = None  # when the leader is called again if it has not answered
        self._patience = _UNANSWERED_SECONDS
        self._joined: dict[int, tuple[Hashable, Join]] = {}  # rank -> its channel and first message
        self._probes: set[int] = set()  # missing ranks that were called
        self._asked: set[Hashable] = set()  # callers that were asked for the decision that this rank has missed
        self._phase = ""  # the phase of the ballot, a key of _ANSWERS
        self._awaited: set[Hashable] = set()  # channels whose answers are awaited
        self._follow_next(now)

    @property
    def gathers(self) -> bool:
        """Whether this rank coordinates, and no ballot is under way."""
        return self._leader == self._rank and not self._phase and self.decision is None

    # -- events ------------------------------------------------------------------------------------------------------

    def heard(self, channel: Hashable, message: Message, now: float) -> None:
        """Event: a message came."""
        if self.decision is not None:
            return
        try:
            if self._leader < self._rank:
                if channel == self._leader:
                    self._obey(message, now)
            elif isinstance(channel, int):
                self._hear_probe(channel, message)
            elif channel not in (each for each, _ in self._joined.values()):
                self._answer(channel, message, now)
            else:
                expect(message, _ANSWERS.get(self._phase, ()))
                self._awaited.discard(channel)
                if not self._awaited:
                    self._go_on()
        except NotARank:
            self._act("close", channel)
            self.lost(channel, now)

    def lost(self, channel: Hashable, now: float, *, reached: bool = True) -> None:
        """Event: a connection has ended, or could not be made to a called rank (not ``reached``)."""
        if self._leader < self._rank:
            if channel == self._leader:
                self._call_at, self._is_greeted = now + RETRY_SECONDS, False
        elif isinstance(channel, int):
            self._probes.discard(channel)
            if not reached:
                self._call_at = now + _FAR_SECONDS
        for rank, (joined, _) in list(self._joined.items()):
            if joined == channel:
                del self._joined[rank]
                if self._phase and self.decision is None:
                    self._begin_again(now)

    def refused(self, rank: int, now: float) -> None:
        """Event: the process of a called rank has ended."""
        self._ended.add(rank)
        self._probes.discard(rank)
        if rank == self._leader:
            self._follow_next(now)

    def informed(self, out_of_reach: Iterable[Member]) -> None:
        """Event: the processes of an "inform" know the decision, have ended, or are out of reach."""
        if self._phase == "prepared":
            self._ask_to_accept(self._next_group(out_of_reach))
        elif self._phase == "announced" and self._me.accepted is not None:
            self.decision = self._me.accepted[1]
            for channel, join in self._joined.values():
                self._act("send", channel, Decided(join.member.id, self.decision))

    def passed(self, now: float) -> None:
        """Event: everything that came before ``now`` was reported. Raises CollectiveTimeout."""
        if self.decision is not None:
            return
        if self._leader < self._rank:
            if now >= self._until:
                self._silent.add(self._leader)
                self._act("close", self._leader)
                self._follow_next(now)
            elif self._call_at is not None and now >= self._call_at:
                self._call_at, self._again_at = None, now + self._patience
                self._act("call", self._leader)
            elif self._again_at is not None and now >= self._again_at:
                self._patience, self._again_at = 2 * self._patience, None
                self._act("close", self._leader)
                self._call_at, self._is_greeted = now, False
        elif self._phase:
            if self._awaited and now > self._answer_by:
                self._begin_again(now)
        else:
            missing = self._missing()
            if self._silent.issuperset(missing) or now > self._until:
                self._propose(missing, now)
            elif self._call_at is None or now >= self._call_at:
                self._call_at = now + RETRY_SECONDS
                for rank in set(missing) - self._probes:
                    self._probes.add(rank)
                    self._act("call", rank)

    def _act(self, do: str, channel: Any, message: Message | None = None) -> None:
        self.actions.append(Action(do, channel, message))

    # -- followers ---------------------------------------------------------------------------------------------------

    def _follow_next(self, now: float) -> None:
        self._leader += 1
        self._until, self._call_at, self._is_greeted = now + self._timeout, None, False
        self._again_at, self._patience = now + _UNANSWERED_SECONDS, _UNANSWERED_SECONDS
        if self._leader < self._rank:
            self._act("call", self._leader)

    def _obey(self, message: Message, now: float) -> None:
        me, leader = self._me, self._leader
        if isinstance(message, Challenge) == self._is_greeted:
            raise NotARank("a message that no rank sends now")
        match message:
            case Challenge():
                self._is_greeted = True
                number, of = me.promised
                if of != leader or not number:
                    me.promised = number + 1, leader
                self._act("send", leader, self._hello(Join, leader, message))
            case Wait():
                self._again_at = None
                self._until = max(self._until, now + message.seconds + _MARGIN_SECONDS)
            case Stranger():
                self._act("close", leader)
                self.refused(leader, now)
            case Tell():
                self._act("send", leader, me.told(me.members[leader].id))
            case Prepare() | Accept():
                if message.ballot < me.promised:
                    raise NotARank("an old ballot")
                if isinstance(message, Accept):
                    me.accepted = message.ballot, me.checked(message.value)
                me.promised = message.ballot
                self._act("send", leader, Accepted() if isinstance(message, Accept) else Promised())
            case _:
                self.decision = me.checked(expect(message, Decided).decided)

    def _hello(self, kind: type[Join], rank: int, challenge: Challenge) -> Join:
        """The first message to a rank: a Join makes this rank follow it, a Probe does not."""
        me, own = self._me, self._own
        about = me.epoch, own.member, own.calls, tuple(own.newcomers)
        return kind(challenge.nonce, me.members[rank].id, *about, me.promised, me.accepted)

    # -- the coordinator: who is there -------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and r not in self._joined and r not in self._ended]

    def _hear_probe(self, rank: int, message: Message) -> None:
        """Handle the answer of a process at a missing rank's socket. Raises NotARank for a useless answer."""
        me = self._me
        match message:
            case Challenge():
                self._act("send", rank, self._hello(Probe, rank, message))
            case Stranger():
                self._ended.add(rank)
            case Tell():
                self._act("send", rank, me.told(me.members[rank].id))
            case _:
                self.decision = me.checked(expect(message, Decided).decided)

    def _answer(self, caller: Hashable, message: Message, now: float) -> None:
        me = self._me
        if isinstance(message, Decided):
            decision = me.checked(message.decided)
            # only this rank's request, or being left out, brings a decision
            if caller in self._asked or any(member.id == me.id for member in decision.left_out):
                self.decision = decision
            return self._act("close", caller)
        hello = expect(message, Join)
        member = hello.member
        rank = next(
            (r for r, each in enumerate(me.members) if (each.id, each.place) == (member.id, member.place)), None
        )
        if hello.epoch < me.epoch or (rank is None and hello.epoch == me.epoch):
            self._act("close", caller, me.told(member.id))
        elif hello.epoch > me.epoch:
            self._asked.add(caller)
            self._act("send", caller, Tell())
        elif not isinstance(hello, Probe) and rank is not None:
            if rank in self._joined:
                self._act("close", self._joined[rank][0])  # the old connection was lost
            self._act("keep", caller)
            self._joined[rank] = caller, hello
            left = max(0.0, self._until - now)
            self._act("send", caller, Wait(min(left, messages.MOST_SECONDS)))

    # -- the coordinator: a ballot -----------------------------------------------------------------------------------

    def _propose(self, missing: list[int], now: float) -> None:
        """Begin a ballot among the ranks that have joined."""
        present = {self._rank, *self._joined}
        twice = 2 * len(present) + (0 in present)
        if missing and twice <= self._size:
            raise CollectiveTimeout(
                f"ranks {missing} neither answered within {self._timeout} s nor have they ended, and without them the "
                f"others (ranks {sorted(present)}) are not more than half of the {self._size} ranks, nor half of them "
                f"with rank 0; end the processes of ranks {missing}, or make a new group"
            )
        me, promised = self._me, [join.promised for _, join in self._joined.values()]
        highest = max(promised, default=(0, 0))
        is_new = highest > me.promised and highest[1] == self._rank
        me.promised = highest if is_new else (1 + max(me.promised[0], highest[0]), self._rank)
        self._answer_by = now + ANSWER_SECONDS
        if all(each == me.promised for each in promised):
            self._phase = "promised"
            self._go_on()
        else:
            self._ask("promised", Prepare(me.promised))

    def _ask(self, phase: str, message: Message) -> None:
        self._phase = phase
        self._awaited = {channel for channel, _ in self._joined.values()}
        for channel in self._awaited:
            self._act("send", channel, message)
        if not self._awaited:
            self._go_on()

    def _go_on(self) -> None:
        """Continue after all have answered."""
        if self._phase == "promised":
            found = (self._me.accepted, *(join.accepted for _, join in self._joined.values()))
            if accepted := [each for each in found if each]:
                return self._ask_to_accept(max(accepted, key=lambda each: each[0])[1])
            value = self._me.latest
        elif self._me.accepted is not None:
            value = self._me.accepted[1]
        self._phase = "prepared" if self._phase == "promised" else "announced"
        self._act("inform", value.left_out, Decided("", value))

    def _ask_to_accept(self, value: Decision) -> None:
        self._me.accepted = self._me.promised, value
        self._ask("accepted", Accept(self._me.promised, value))

    def _begin_again(self, now: float) -> None:
        """Begin again after the loss of a rank: the others call again, with their promises and acceptances."""
        for channel, _ in self._joined.values():
            self._act("close", channel)
        self._joined.clear()
        self._phase, self._awaited = "", set()
        self._until = max(self._until, now + ANSWER_SECONDS)

    def _next_group(self, out_of_reach: Iterable[Member]) -> Decision:
        """The ranks that take part, in their present order, and the processes that wait at them."""
        brought = {self._rank: self._own} | {
            rank: Own(join.member, join.calls, join.newcomers) for rank, (_, join) in self._joined.items()
        }
        present = [each.member for _, each in sorted(brought.items())]
        newcomers = itertools.chain.from_iterable(each.newcomers for _, each in sorted(brought.items()))
        left_out = (*out_of_reach, *(self._me.members[rank] for rank in self._missing()))
        calls = max(each.calls for each in brought.values())
        return Decision(self._me.epoch + 1, _distinct((*present, *newcomers)), calls, left_out)


def _distinct(members: Iterable[Member]) -> tuple[Member, ...]:
    """The first one with each id, and at each place."""
    ids: dict[str, Member] = {}
    places: set[tuple[str, int]] = set()
    for member in members:
        if member.id not in ids and member.place not in places:
            ids[member.id] = member
            places.add(member.place)
    return tuple(ids.values())
