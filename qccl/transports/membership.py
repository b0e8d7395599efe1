"""Who is in a group after some ranks were lost or others came: the ranks agree over TCP.

Every process has a listening socket, whose address all ranks of its group know from the start, so any rank may be lost.
The groups that follow each other are numbered by epochs. agree() decides the next one as Paxos does. The lowest rank
that answers coordinates: the others call it, it waits for all, asks each to promise (which reports what the rank has
accepted before) and then to accept a list of members, and announces the list when all that promised have accepted. If
the coordinator is lost, the others call the next rank, which must propose what any of them has accepted.

There is never a second group, with one exception below. A list needs the promise and the acceptance of the same ranks,
and these are either

- all ranks except those that have ended. The machine of a process that has ended refuses connections to its socket; a
  process that is stopped, busy or out of reach does not refuse them. Or
- more than half of the old group, or half of it with rank 0.

Take two lists for one epoch. If a living rank accepted both, the ballot that came later has proposed the same list.
Otherwise all ranks that accepted the first list have ended.

Processes that joined with the first list did not accept it, and may live. A rank that is not on that list does not know
them: it would make a group of its own when all ranks that it knows have ended. So every rank that is left out and has
not ended gets the list before it is announced. If the rank is stopped, the list waits in its socket, and it reads the
list before it decides anything: the ranks that it knows end later. The exception is a rank that is out of reach. Lists
name such ranks, and the next coordinators call them, too. Two groups are possible if such a rank is out of reach for
all coordinators until all ranks that it knows have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from qccl.errors import CollectiveTimeout, PeerLost
from qccl.transports import messages
from qccl.transports.callers import Caller, Callers
from qccl.transports.channel import ANSWER_SECONDS, CONNECT_SECONDS, Channel, call
from qccl.transports.messages import Decision, Member
from qccl.transports.sockets import listen, place_text
from qccl.transports.strangers import NotARank

__all__ = ["Decision", "Member", "Membership"]

_NAP_SECONDS = 0.005
_RETRY_SECONDS = 0.05
#: how much longer than its coordinator a rank waits
_MARGIN_SECONDS = 5.0


class _Own(NamedTuple):
    """What a rank brings to the next group: itself with its new worker, its calls, and processes that wait at it."""

    member: Member
    calls: int
    newcomers: list[Member]


class Membership:
    """One process in its group.

    Attributes:
        epoch: number of the group; -1 before it is in one.
        members: of the group, in the order of their ranks.
    """

    def __init__(self, host: str) -> None:
        """``host``: the address of this machine, as the others reach it; if it is a number, no other is listened at."""
        self._id = os.urandom(16).hex()
        server = listen(host)
        self._callers = Callers(server, self._id)
        self._host, self._port = host, int(server.getsockname()[1])
        self._latest = Decision(-1, (), 0)
        self._promised = 0, 0  # ballot: number and coordinator
        self._accepted: tuple[tuple[int, int], Decision] | None = None  # ballot and list
        self._patience = 0.0  # until when this rank follows the present coordinator

    @property
    def epoch(self) -> int:
        return self._latest.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        return self._latest.members

    @property
    def rank(self) -> int:
        """Of this process. Raises PeerLost if the group does not have it."""
        for rank, member in enumerate(self.members):
            if member.id == self._id:
                return rank
        raise PeerLost(
            "the other ranks have made a group without this one, because it did not answer in time; it can only join "
            "them again as a new process does (qccl.join())"
        )

    @property
    def address(self) -> str:
        """For qccl.join()."""
        return place_text((self._host, self._port))

    def member(self, worker: bytes) -> Member:
        """This process, with the address of its worker."""
        return Member.make(self._id, self._host, self._port, worker)

    def begin(self, members: Iterable[Member]) -> None:
        """The first group."""
        self._latest = Decision(0, tuple(members), 0)

    def close(self) -> None:
        """Leave: from now on this process counts as ended. Idempotent."""
        self._callers.close()

    def find_ended(self, suspect: int) -> int | None:
        """A rank whose process has ended, ``suspect`` if it has; None if none ends within a moment.

        A rank that gives up after the loss of another one closes its connections, too, and its last message may be
        lost. So the end of a connection does not tell who was lost.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        others = [rank for rank in range(len(self.members)) if rank not in (suspect, self.rank)]
        while time.monotonic() < deadline:
            for rank in (suspect, *others):
                member = self.members[rank]
                try:
                    call((member.host, member.port), deadline).close()
                except ConnectionRefusedError:
                    return rank
                except OSError:
                    pass
            time.sleep(_RETRY_SECONDS)
        return None

    def __del__(self) -> None:
        if hasattr(self, "_callers"):  # otherwise there is no socket
            self.close()

    # -- the next group ----------------------------------------------------------------------------------------------

    def agree(self, worker: bytes, calls: int, timeout: float, *, grows: bool = False) -> Decision:
        """Collective: the next group, of the ranks that take part, and with ``grows`` of the processes in knock().

        The ranks that have not ended and do not come cost ``timeout`` seconds together, or each if they would have
        coordinated. Raises PeerLost if the group goes on without this rank, CollectiveTimeout if too many are silent.
        """
        newcomers = [message["member"] for _, message in self._knocks()] if grows else []
        own = _Own(self.member(worker), calls, list({each.id: each for each in newcomers}.values()))
        ended: set[int] = set()
        silent: set[int] = set()
        for rank in range(self.rank):
            self._patience = time.monotonic() + timeout
            try:
                return self._adopt(self._follow(rank, own))
            except ConnectionRefusedError:
                ended.add(rank)
            except TimeoutError:
                silent.add(rank)
        return self._adopt(_Coordinator(self, own, ended, silent, timeout).decide())

    def knock(self, address: tuple[str, int], worker: bytes, timeout: float) -> Decision:
        """The group that has a member at ``address``, when it has taken in this process. Raises CollectiveTimeout."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), call(address, deadline) as channel:
                hello = {"kind": "knock", "nonce": _greeting(channel, deadline), "member": self.member(worker)}
                channel.send(hello)
                decision = self._checked(_expect(channel.receive(deadline), "decided")["decided"])
                if any(member.id == self._id for member in decision.members):
                    return self._adopt(decision)
            time.sleep(_RETRY_SECONDS)
        raise CollectiveTimeout(
            f"no group took this process in at {place_text(address)} within {timeout} s; the address must be "
            f"comm.address of one of its ranks, and all ranks must call comm.grow()"
        )

    def waiting(self) -> int:
        """Number of the processes that wait at this rank's address."""
        return len(self._knocks())

    def _knocks(self) -> list[tuple[Caller, Any]]:
        self._callers.hear()
        return self._callers.knocks()

    def _checked(self, decision: Decision) -> Decision:
        """``decision``, which came from outside. Raises NotARank if it is not for a later group than this rank's."""
        own = [member for member in decision.members if member.id == self._id]
        if decision.epoch <= self.epoch or any(member[1:3] != (self._host, self._port) for member in own):
            raise NotARank("a decision that is old, or of another group")
        return decision

    def _adopt(self, decision: Decision) -> Decision:
        if decision.epoch > self.epoch:
            self._latest, self._promised, self._accepted = decision, (0, 0), None
            members = {member.id for member in decision.members}
            until = time.monotonic() + ANSWER_SECONDS
            for caller, message in self._knocks():
                if message["member"].id in members:
                    self._tell(caller, message["member"].id, until - time.monotonic())
        _ = self.rank  # raises
        return self._latest

    def _tell(self, caller: Caller, to: str, seconds: float = ANSWER_SECONDS) -> None:
        """Tell a caller of the latest group, and no more."""
        self._callers.dismiss(caller, seconds, kind="decided", to=to, decided=self._latest)

    # -- followers ---------------------------------------------------------------------------------------------------

    def _follow(self, rank: int, own: _Own) -> Decision:
        """What rank ``rank`` decides. Raises ConnectionRefusedError if it has ended, TimeoutError if it is silent."""
        to, host, port = self.members[rank][:3]
        while time.monotonic() < self._patience:
            try:
                with call((host, port), self._patience) as channel:
                    channel.send(self._hello("join", own, to, _greeting(channel, self._patience)))
                    return self._obey(channel, to)
            except ConnectionRefusedError:
                raise
            except OSError:  # it begins again, has ended, or is out of reach
                time.sleep(_RETRY_SECONDS)
        raise TimeoutError

    def _obey(self, channel: Channel, to: str) -> Decision:
        while True:
            message = channel.receive(self._patience)
            match message["kind"]:
                case "wait":
                    self._patience = max(self._patience, time.monotonic() + message["seconds"] + _MARGIN_SECONDS)
                case "stranger":
                    raise ConnectionRefusedError
                case "tell":
                    channel.send({"kind": "decided", "to": to, "decided": self._latest})
                case "prepare":
                    self._promised = message["ballot"]
                    channel.send({"kind": "promised"})
                case "accept":
                    self._promised = message["ballot"]
                    self._accepted = message["ballot"], self._checked(message["value"])
                    channel.send({"kind": "accepted"})
                case _:
                    return self._checked(_expect(message, "decided")["decided"])

    def _hello(self, kind: str, own: _Own, to: str, nonce: str) -> dict[str, Any]:
        """The first message to the process with the id ``to``: "join" makes this rank follow it, "probe" does not."""
        state = {"promised": self._promised, "accepted": self._accepted}
        return {"kind": kind, "nonce": nonce, "to": to, "epoch": self.epoch, **own._asdict(), **state}


def _expect(message: dict[str, Any], kind: str) -> dict[str, Any]:
    """The message, which must be of this kind."""
    if message["kind"] != kind:
        raise NotARank("a message that no rank sends now")
    return message


def _greeting(channel: Channel, until: float) -> str:
    """What the called process wants to hear again."""
    return str(_expect(channel.receive(until), "challenge")["nonce"])


class _Coordinator:
    """The coordinator's side of agree()."""

    def __init__(self, membership: Membership, own: _Own, ended: set[int], silent: set[int], timeout: float) -> None:
        self._me, self._own, self._ended, self._silent, self._timeout = membership, own, ended, silent, timeout
        self._rank, self._size = membership.rank, len(membership.members)
        self._joined: dict[int, tuple[Channel, Any]] = {}
        self._probes: dict[int, Channel] = {}
        self._next_probe = 0.0
        self._until = time.monotonic() + timeout

    def decide(self) -> Decision:
        """The next group, or a later one that this rank has missed. Raises CollectiveTimeout."""
        try:
            while True:
                decision = self._hear()
                if decision is not None:
                    return decision
                missing = self._missing()
                if self._silent.issuperset(missing) or time.monotonic() > self._until:
                    self._check_quorum(missing)
                    with contextlib.suppress(OSError):
                        return self._propose()
                    self._begin_again()
                self._probe(missing)
                time.sleep(_NAP_SECONDS)
        finally:
            for channel in (*self._probes.values(), *(channel for channel, _ in self._joined.values())):
                channel.close()

    def _missing(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and r not in self._joined and r not in self._ended]

    def _check_quorum(self, missing: list[int]) -> None:
        present = {self._rank, *self._joined}
        twice = 2 * len(present) + (0 in present)
        if missing and twice <= self._size:
            raise CollectiveTimeout(
                f"ranks {missing} neither answered within {self._timeout} s nor have they ended, and without them the "
                f"others (ranks {sorted(present)}) are not more than half of the {self._size} ranks, nor half of them "
                f"with rank 0; end the processes of ranks {missing}, or make a new group"
            )

    def _begin_again(self) -> None:
        """A rank was lost in the middle: the others come again, with what they have promised and accepted."""
        for channel, _ in self._joined.values():
            channel.close()
        self._joined.clear()
        self._until = max(self._until, time.monotonic() + ANSWER_SECONDS)

    # -- who is there ------------------------------------------------------------------------------------------------

    def _hear(self) -> Decision | None:
        """Handle the messages that have come; a decision that this rank has missed, if one of them has it."""
        me = self._me
        me._callers.hear()
        for rank, (channel, _) in list(self._joined.items()):
            self._keep(self._joined, rank, channel)
        for caller in me._callers:
            if not caller.is_knock:
                decision = self._answer(caller, caller.inbox.pop(0))
                if decision is not None:
                    return decision
        for rank, probe in list(self._probes.items()):
            self._keep(self._probes, rank, probe)
            while probe.inbox:
                try:
                    decision = self._hear_probe(rank, probe, probe.inbox.pop(0))
                except OSError:
                    probe.close()
                    self._probes.pop(rank, None)
                    break
                if decision is not None:
                    return decision
        return None

    def _hear_probe(self, rank: int, probe: Channel, message: Any) -> Decision | None:
        """The answer of a process at a missing rank's socket. Raises OSError if it is of no use."""
        me = self._me
        to = me.members[rank].id
        match message["kind"]:
            case "challenge":
                probe.send(me._hello("probe", self._own, to, message["nonce"]))
            case "stranger":
                self._ended.add(rank)
            case "tell":
                probe.send({"kind": "decided", "to": to, "decided": me._latest})
            case _:
                return me._checked(_expect(message, "decided")["decided"])
        return None

    def _keep(self, channels: dict[int, Any], rank: int, channel: Channel) -> None:
        """Read what has come, and drop the channel if it has ended."""
        with contextlib.suppress(OSError):
            channel.hear()
        if channel.has_ended and not channel.inbox:
            channel.close()
            del channels[rank]

    def _answer(self, caller: Caller, message: Any) -> Decision | None:
        me = self._me
        if message["kind"] == "decided":
            me._callers.dismiss(caller)
            with contextlib.suppress(NotARank):
                decision = me._checked(message["decided"])
                # nobody sends it of his own accord but to those whom it leaves out
                if caller.was_asked or any(member.id == me._id for member in decision.left_out):
                    return decision
            return None
        member = message["member"]
        rank = next((r for r, each in enumerate(me.members) if each[:3] == member[:3]), None)
        if message["epoch"] < me.epoch or (rank is None and message["epoch"] == me.epoch):
            me._tell(caller, member.id)
        elif message["epoch"] > me.epoch:
            caller.was_asked = True
            with contextlib.suppress(OSError):
                caller.send({"kind": "tell"})
        elif message["kind"] == "join" and rank is not None:
            if rank in self._joined:
                self._joined[rank][0].close()  # that connection was lost
            me._callers.take(caller)
            self._joined[rank] = caller, message
            with contextlib.suppress(OSError):
                left = max(0.0, self._until - time.monotonic())
                caller.send({"kind": "wait", "seconds": min(left, messages.MOST_SECONDS)})
        return None

    def _probe(self, missing: list[int]) -> None:
        """Find out which of the missing ranks have ended, by a connection to each."""
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _RETRY_SECONDS
        for rank in missing:
            if rank in self._probes:
                continue
            _, host, port = self._me.members[rank][:3]
            try:
                self._probes[rank] = call((host, port), now + CONNECT_SECONDS)
            except ConnectionRefusedError:
                self._ended.add(rank)
            except OSError:
                self._next_probe = now + 1.0  # out of reach

    # -- a ballot ----------------------------------------------------------------------------------------------------

    def _propose(self) -> Decision:
        """Decide with the ranks that have joined. Raises OSError if one of them is lost in the middle."""
        me = self._me
        joins = [message for _, message in self._joined.values()]
        ballot = 1 + max(each[0] for each in (me._promised, *(join["promised"] for join in joins))), self._rank
        me._promised = ballot
        self._ask({"kind": "prepare", "ballot": ballot}, "promised")
        accepted = [each for each in (me._accepted, *(join["accepted"] for join in joins)) if each]
        value = max(accepted, key=lambda each: each[0])[1] if accepted else self._next_group()
        me._accepted = ballot, value
        self._ask({"kind": "accept", "ballot": ballot, "value": value}, "accepted")
        _inform(value.left_out, value)
        for channel, join in self._joined.values():
            with contextlib.suppress(OSError):
                channel.send({"kind": "decided", "to": join["member"].id, "decided": value})
        return value

    def _ask(self, message: dict[str, Any], answer: str) -> None:
        for channel, _ in self._joined.values():
            channel.send(message)
        deadline = time.monotonic() + ANSWER_SECONDS
        for channel, _ in self._joined.values():
            if channel.receive(deadline)["kind"] != answer:
                raise ConnectionError

    def _next_group(self) -> Decision:
        """The ranks that take part, in their present order, and the processes that wait at them."""
        brought = {self._rank: self._own} | {
            rank: _Own(join["member"], join["calls"], join["newcomers"]) for rank, (_, join) in self._joined.items()
        }
        present = [each.member for _, each in sorted(brought.items())]
        newcomers = itertools.chain.from_iterable(each.newcomers for _, each in sorted(brought.items()))
        calls = max(each.calls for each in brought.values())
        latest = self._me._latest
        left_out = [*_inform(latest.left_out, latest), *(self._me.members[rank] for rank in self._missing())]
        return Decision(latest.epoch + 1, _distinct((*present, *newcomers)), calls, tuple(left_out))


def _distinct(members: Iterable[Member]) -> tuple[Member, ...]:
    """The first one with each id, and at each place."""
    ids: dict[str, Member] = {}
    places: set[tuple[str, int]] = set()
    for member in members:
        if member.id not in ids and (member.host, member.port) not in places:
            ids[member.id] = member
            places.add((member.host, member.port))
    return tuple(ids.values())


def _inform(processes: Iterable[Member], decision: Decision) -> list[Member]:
    """Send a decision to processes that it leaves out; returns those that are out of reach."""
    out_of_reach = []
    until = time.monotonic() + ANSWER_SECONDS
    for process in processes:
        try:
            with call((process.host, process.port), until) as channel:
                channel.send({"kind": "decided", "to": process.id, "decided": decision})
        except ConnectionRefusedError:
            pass  # it has ended
        except OSError:
            out_of_reach.append(process)
    return out_of_reach
