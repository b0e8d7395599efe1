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
from qccl.transports.channel import ANSWER_SECONDS, CONNECT_SECONDS, Channel, call, listen

__all__ = ["Decision", "Member", "Membership"]

_NAP_SECONDS = 0.005
_RETRY_SECONDS = 0.05
#: how much longer than its coordinator a rank waits
_MARGIN_SECONDS = 5.0


class Member(NamedTuple):
    """A process: its unique id, the address of its socket, and that of its UCX worker in hexadecimal digits."""

    id: str
    host: str
    port: int
    worker: str


class Decision(NamedTuple):
    """A group.

    Attributes:
        epoch: its number.
        members: in the order of their ranks.
        calls: the number of their next call.
        left_out: ranks of earlier groups that have not ended, and perhaps do not know that they are left out.
    """

    epoch: int
    members: tuple[Member, ...]
    calls: int
    left_out: tuple[Member, ...] = ()

    @classmethod
    def of(cls, found: Any) -> Decision:
        """From JSON."""
        epoch, members, calls, left_out = found
        return cls(int(epoch), _members(members), int(calls), _members(left_out))


def _members(found: Any) -> tuple[Member, ...]:
    return tuple(Member(*each) for each in found)


class _Own(NamedTuple):
    """What a rank brings to the next group."""

    worker: str
    calls: int
    newcomers: list[Member]


class Membership:
    """One process in its group.

    Attributes:
        epoch: number of the group; -1 before it is in one.
        members: of the group, in the order of their ranks.
    """

    def __init__(self, host: str) -> None:
        """``host``: the address of this machine, as the others reach it."""
        self._callers: list[Channel] = []
        self._server = listen()
        self._server.setblocking(False)
        self._host, self._port = host, int(self._server.getsockname()[1])
        self._id = os.urandom(16).hex()
        self._latest = Decision(-1, (), 0)
        self._promised: list[int] = [0, 0]  # ballot: number and coordinator
        self._accepted: list[Any] | None = None  # ballot and list
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
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def member(self, worker: bytes) -> Member:
        """This process, with the address of its worker."""
        return Member(self._id, self._host, self._port, worker.hex())

    def begin(self, members: Iterable[Member]) -> None:
        """The first group."""
        self._latest = Decision(0, tuple(members), 0)

    def close(self) -> None:
        """Leave: from now on this process counts as ended. Idempotent."""
        self._server.close()
        for channel in self._callers:
            channel.close()
        self._callers = []

    def find_ended(self, suspect: int) -> int | None:
        """A rank whose process has ended, ``suspect`` if it has; None if none ends within a moment.

        A rank that gives up after the loss of another one closes its connections, too, and its last message may be
        lost. So the end of a connection does not tell who was lost.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        others = [rank for rank in range(len(self.members)) if rank not in (suspect, self.rank)]
        while time.monotonic() < deadline:
            for rank in (suspect, *others):
                _, host, port, _ = self.members[rank]
                try:
                    call((host, port), deadline).close()
                except ConnectionRefusedError:
                    return rank
                except OSError:
                    pass
            time.sleep(_RETRY_SECONDS)
        return None

    def __del__(self) -> None:
        if hasattr(self, "_server"):  # otherwise there is no socket
            self.close()

    # -- the next group ----------------------------------------------------------------------------------------------

    def agree(self, worker: bytes, calls: int, timeout: float, *, grows: bool = False) -> Decision:
        """Collective: the next group, of the ranks that take part, and with ``grows`` of the processes in knock().

        The ranks that have not ended and do not come cost ``timeout`` seconds together, or each if they would have
        coordinated. Raises PeerLost if the group goes on without this rank, CollectiveTimeout if too many are silent.
        """
        newcomers = [Member(*each["member"]) for _, each in self._knocks()] if grows else []
        own = _Own(worker.hex(), calls, newcomers)
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
        hello = {"kind": "knock", "member": self.member(worker)}
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), call(address, deadline) as channel:
                channel.send(hello)
                return self._adopt(Decision.of(channel.receive(deadline)["decided"]))
            time.sleep(_RETRY_SECONDS)
        raise CollectiveTimeout(
            f"no group took this process in at {address[0]}:{address[1]} within {timeout} s; the address must be "
            f"comm.address of one of its ranks, and all ranks must call comm.grow()"
        )

    def waiting(self) -> int:
        """Number of the processes that wait at this rank's address."""
        return len(self._knocks())

    def _knocks(self) -> list[tuple[Channel, Any]]:
        self._hear()
        return [(each, each.inbox[0]) for each in self._callers if each.inbox and each.inbox[0]["kind"] == "knock"]

    def _adopt(self, decision: Decision) -> Decision:
        if decision.epoch > self.epoch:
            self._latest, self._promised, self._accepted = decision, [0, 0], None
            members = {member.id for member in decision.members}
            for channel, hello in self._knocks():
                if hello["member"][0] in members:
                    self._dismiss(channel, kind="decided", decided=decision)
        _ = self.rank  # raises
        return self._latest

    def _hear(self) -> None:
        """Accept connections, and read what has come over them."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._callers.append(Channel(connection))
        for channel in list(self._callers):
            try:
                channel.hear()
            except OSError:
                self._dismiss(channel)
            else:
                if channel.has_ended and all(message["kind"] != "decided" for message in channel.inbox):
                    self._dismiss(channel)

    def _dismiss(self, channel: Channel, **message: object) -> None:
        """Close a connection, after a last ``message``."""
        self._callers.remove(channel)
        with contextlib.suppress(OSError), channel:
            if message:
                channel.send(message)

    # -- followers ---------------------------------------------------------------------------------------------------

    def _follow(self, rank: int, own: _Own) -> Decision:
        """What rank ``rank`` decides. Raises ConnectionRefusedError if it has ended, TimeoutError if it is silent."""
        to, host, port, _ = self.members[rank]
        while time.monotonic() < self._patience:
            try:
                with call((host, port), self._patience) as channel:
                    channel.send(self._hello("join", own, to))
                    return self._obey(channel)
            except ConnectionRefusedError:
                raise
            except OSError:  # it begins again, has ended, or is out of reach
                time.sleep(_RETRY_SECONDS)
        raise TimeoutError

    def _obey(self, channel: Channel) -> Decision:
        while True:
            message = channel.receive(self._patience)
            match message["kind"]:
                case "wait":
                    self._patience = max(self._patience, time.monotonic() + message["seconds"] + _MARGIN_SECONDS)
                case "stranger":
                    raise ConnectionRefusedError
                case "tell":
                    channel.send({"kind": "decided", "decided": self._latest})
                case "prepare":
                    self._promised = message["ballot"]
                    channel.send({"kind": "promised"})
                case "accept":
                    self._promised = message["ballot"]
                    self._accepted = [message["ballot"], message["value"]]
                    channel.send({"kind": "accepted"})
                case _:
                    return Decision.of(message["decided"])

    def _hello(self, kind: str, own: _Own, to: str) -> dict[str, Any]:
        """The first message to the process with the id ``to``: "join" makes this rank follow it, "probe" does not."""
        state = {"promised": self._promised, "accepted": self._accepted}
        return {"kind": kind, "id": self._id, "to": to, "epoch": self.epoch, **own._asdict(), **state}


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
        self._me._hear()
        for rank, (channel, _) in list(self._joined.items()):
            self._keep(self._joined, rank, channel)
        for channel in list(self._me._callers):
            if channel.inbox and channel.inbox[0]["kind"] != "knock":
                decision = self._answer(channel, channel.inbox.pop(0))
                if decision is not None:
                    return decision
        for rank, probe in list(self._probes.items()):
            self._keep(self._probes, rank, probe)
            while probe.inbox:
                message = probe.inbox.pop(0)
                if message["kind"] == "decided":
                    return Decision.of(message["decided"])
                if message["kind"] == "stranger":
                    self._ended.add(rank)
                    break
                with contextlib.suppress(OSError):
                    probe.send({"kind": "decided", "decided": self._me._latest})
        return None

    def _keep(self, channels: dict[int, Any], rank: int, channel: Channel) -> None:
        """Read what has come, and drop the channel if it has ended."""
        with contextlib.suppress(OSError):
            channel.hear()
        if channel.has_ended and not channel.inbox:
            channel.close()
            del channels[rank]

    def _answer(self, channel: Channel, message: Any) -> Decision | None:
        me = self._me
        if message.get("to", me._id) != me._id:  # the process that had this port has ended
            me._dismiss(channel, kind="stranger")
            return None
        if message["kind"] == "decided":
            me._dismiss(channel)
            return Decision.of(message["decided"])
        rank = next((r for r, member in enumerate(me.members) if member.id == message["id"]), None)
        if message["epoch"] < me.epoch or (rank is None and message["epoch"] == me.epoch):
            me._dismiss(channel, kind="decided", decided=me._latest)
        elif message["epoch"] > me.epoch:
            with contextlib.suppress(OSError):
                channel.send({"kind": "tell"})
        elif message["kind"] == "join" and rank is not None:
            if rank in self._joined:
                self._joined[rank][0].close()  # that connection was lost
            me._callers.remove(channel)
            self._joined[rank] = channel, message
            with contextlib.suppress(OSError):
                channel.send({"kind": "wait", "seconds": max(0.0, self._until - time.monotonic())})
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
            to, host, port, _ = self._me.members[rank]
            try:
                self._probes[rank] = call((host, port), now + CONNECT_SECONDS)
                self._probes[rank].send(self._me._hello("probe", self._own, to))
            except ConnectionRefusedError:
                self._ended.add(rank)
            except OSError:
                self._next_probe = now + 1.0  # out of reach

    # -- a ballot ----------------------------------------------------------------------------------------------------

    def _propose(self) -> Decision:
        """Decide with the ranks that have joined. Raises OSError if one of them is lost in the middle."""
        me = self._me
        joins = [message for _, message in self._joined.values()]
        ballot = [1 + max(each[0] for each in (me._promised, *(join["promised"] for join in joins))), self._rank]
        me._promised = ballot
        self._ask({"kind": "prepare", "ballot": ballot}, "promised")
        accepted = [each for each in (me._accepted, *(join["accepted"] for join in joins)) if each]
        value = max(accepted, key=lambda each: each[0])[1] if accepted else self._next_group()
        me._accepted = [ballot, value]
        self._ask({"kind": "accept", "ballot": ballot, "value": value}, "accepted")
        decision = Decision.of(value)
        _inform(decision.left_out, decision)
        for channel, _ in self._joined.values():
            with contextlib.suppress(OSError):
                channel.send({"kind": "decided", "decided": decision})
        return decision

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
            rank: _Own(join["worker"], join["calls"], [Member(*each) for each in join["newcomers"]])
            for rank, (_, join) in self._joined.items()
        }
        members = [self._me.members[rank]._replace(worker=brought[rank].worker) for rank in sorted(brought)]
        newcomers = itertools.chain.from_iterable(brought[rank].newcomers for rank in sorted(brought))
        calls = max(each.calls for each in brought.values())
        latest = self._me._latest
        left_out = [*_inform(latest.left_out, latest), *(self._me.members[rank] for rank in self._missing())]
        return Decision(latest.epoch + 1, (*members, *newcomers), calls, tuple(left_out))


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
