"""Drives the agreement of membership.py over TCP.

Each rank has a listening socket, calls the sockets of others, and gives their messages to the state machine, which says
what to send. The socket stays open as long as the process is in a group: others find by it that the process has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout, PeerLost, own
from qccl.meeting.channel import ANSWER_SECONDS, CONNECT_SECONDS, TLS_NONCE, Channel, Keys, call, retry
from qccl.meeting.membership import Action, Agreement, Membership, Own, expect
from qccl.meeting.membership_callers import MembershipCaller, MembershipCallers
from qccl.meeting.messages import Challenge, Decided, Decision, Join, Knock, Look, Member, parse
from qccl.meeting.sockets import listen_at, place_text
from qccl.meeting.topology import machine
from qccl.meeting.watch import Listener, Watch, make_greeting, refusal_means_end

__all__ = ["MembershipSocket"]

_NAP_SECONDS = 0.005


class MembershipSocket(Membership):
    """One process in its group, with its listening socket.

    Attributes:
        transport: returns the transport of the latest group; None: no group was made, or its transport is gone.
    """

    transport: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, host: str, ports: Sequence[int] = (), secret: bytes | None = None) -> None:
        """``host``: the address at which the others reach this process; see listen().

        ``ports``: the ports at which it may listen; empty: any port. ``secret``: the job's 32 bytes; with it only
        callers that have it are heard. Raises OSError if all ports are used.
        """
        server = listen_at(host, ports)
        super().__init__(os.urandom(16).hex(), host, int(server.getsockname()[1]))
        self._keys = Keys.of(secret)
        self._callers = MembershipCallers(server, self.id, self._keys)
        self._reached: set[str] = set()  # ids of processes whose sockets were reached
        self._agrees = False

    def close(self) -> None:
        """Leave the group: from now on this process counts as ended. Idempotent."""
        self._callers.close()

    @property
    def greeting(self) -> bytes:
        """The first bytes from a Watch to the processes of this job."""
        return make_greeting(self._keys.seal)

    def look_at_names(self, watch: Watch) -> None:
        """When a group begins, find out which of the sockets can be reached that a Watch does not see."""
        for rank in watch.unseen:  # usually rank 0 alone has a name
            with contextlib.suppress(OSError), self.call(self.members[rank], is_sealed=True) as channel:
                channel.send(Look(), 0)

    def look(self, watch: Watch) -> None:
        """When all ranks of a group have met, find out whose sockets can be reached."""
        self._reached |= {self.members[rank].id for rank in watch.reach()}

    def hear(self) -> None:
        """Drop callers that only looked whether this process lives."""
        self._callers.hear()

    def check_whole(self) -> None:
        """While this group connects, raise PeerLost if one of its ranks already asks for the next group.

        Processes that have missed that they are in this group are told again.
        """
        self.hear()
        self._tell_newcomers()
        for caller in self._callers:
            message = caller.inbox[0]
            if not isinstance(message, Join):
                continue
            ranks = [rank for rank, each in enumerate(self.members) if each.id == message.member.id]
            if not ranks:
                continue
            if message.epoch == self.epoch:
                raise own(PeerLost(f"rank {ranks[0]} gave up while the group was made", ranks[0]))
            if message.epoch < self.epoch:
                self._callers.dismiss(caller, self.told(message.member.id))

    def call(self, member: Member, seconds: float = CONNECT_SECONDS, *, is_sealed: bool = False) -> Channel:
        """A connection to a process. Raises ConnectionRefusedError if it has ended, else another OSError.

        A refusal counts as watch.py says. A rank behind a refusing firewall seems silent unless it calls itself.
        ``is_sealed``: for a message that must not wait for an answer.
        """
        try:
            channel = self._call(member.place, seconds, is_sealed=is_sealed)
        except ConnectionRefusedError as error:
            if refusal_means_end(_listener_here(member), was_reached=member.id in self._reached):
                raise
            raise ConnectionAbortedError("refused, perhaps by a firewall") from error
        self._reached.add(member.id)
        return channel

    def _call(self, place: tuple[str, int], seconds: float, *, is_sealed: bool = False) -> Channel:
        keys = Keys(b"", self._keys.seal) if is_sealed else self._keys
        return call(place, min(seconds, CONNECT_SECONDS), keys, parse, proof=Challenge(TLS_NONCE))

    def has_left_port(self, rank: int) -> bool:
        """Whether a rank's process was on this machine, and no longer listens; makes no call."""
        return refusal_means_end(_listener_here(self.members[rank]), was_reached=False)

    def inform(self, processes: Iterable[Member], decision: Decision) -> list[Member]:
        """Send a decision to processes that it leaves out. Returns the processes that are out of reach."""
        out_of_reach = []
        deadline = Deadline(ANSWER_SECONDS)
        for process in processes:
            try:
                with self.call(process, deadline.remaining(), is_sealed=True) as channel:
                    channel.send(Decided(process.id, decision))
            except ConnectionRefusedError:
                pass  # the process has ended
            except OSError:
                out_of_reach.append(process)
        return out_of_reach

    def find_lost(self, suspect: int) -> int | None:
        """A rank whose process has ended, preferably ``suspect``; None if no process ends within a moment.

        A rank that gives up after the loss of another one closes its connections, too, and its last message may be
        lost. So the end of a connection does not tell who was lost. Returns None at once during an agreement, which
        finds that out itself.
        """
        if self._agrees:
            return None
        deadline = Deadline(CONNECT_SECONDS)
        ranks = [suspect, *(rank for rank in range(len(self.members)) if rank not in (suspect, self.rank))]

        def look() -> int | None:
            for rank in ranks:
                try:
                    self.call(self.members[rank], deadline.remaining(), is_sealed=True).close()
                except ConnectionRefusedError:
                    return rank
                except OSError:
                    pass
            return None

        return retry(look, deadline)

    def agree(
        self,
        worker: bytes,
        calls: int,
        timeout: float,
        *,
        grows: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Collective: the next group of the ranks that take part, with ``grows`` also of the processes in knock().

        Calls ``meanwhile`` every few milliseconds. Ranks that have not ended and do not come cost ``timeout`` seconds
        together; those that should have coordinated cost ``timeout`` each. Raises PeerLost if the group goes on without
        this rank, CollectiveTimeout if too many are silent.
        """
        newcomers = [message.member for _, message in self._knocks()] if grows else []
        own = Own(self.member(worker), calls, list({each.id: each for each in newcomers}.values()))
        agreement = Agreement(self, own, timeout, time.monotonic())
        self._agrees = True
        try:
            return self._adopt(_Driver(self, agreement, self._callers, meanwhile).run())
        finally:
            self._agrees = False

    def knock(self, address: tuple[str, int], worker: bytes, deadline: Deadline) -> Decision:
        """The group that has a member at ``address``, when it has taken in this process. Raises CollectiveTimeout."""

        def ask() -> Decision | None:
            with self._call(address, deadline.remaining()) as channel:
                nonce = expect(channel.receive(deadline), Challenge).nonce
                channel.send(Knock(nonce, self.member(worker)))
                decision = self.checked(expect(channel.receive(deadline), Decided).decided)
                return decision if any(member.id == self.id for member in decision.members) else None

        decision = retry(ask, deadline)
        if decision is None:
            raise CollectiveTimeout(
                f"no group took this process in at {place_text(address)} within {deadline.seconds} s; the address must "
                f"be comm.address of one of its ranks, and all ranks must call comm.grow(), with one version of qccl"
            )
        return self._adopt(decision)

    def waiting(self) -> int:
        """Number of the processes that wait at this rank's address."""
        return len(self._knocks())

    def _knocks(self) -> list[tuple[MembershipCaller, Any]]:
        self._callers.hear()
        return self._callers.knocks()

    def _adopt(self, decision: Decision) -> Decision:
        if self.adopt(decision):
            self._callers.hear()
            self._tell_newcomers()
        _ = self.rank  # raises PeerLost if the group has left this process out
        return self.latest

    def _tell_newcomers(self) -> None:
        """Tell the processes that wait to join that the group has them."""
        members, deadline = {member.id for member in self.members}, Deadline(ANSWER_SECONDS)
        for caller, message in self._callers.knocks():
            if message.member.id in members:
                self._callers.dismiss(caller, self.told(message.member.id), deadline.remaining())


def _listener_here(member: Member) -> Listener | None:
    """The socket of a process of this machine; None on other machines, which may have its address behind NAT."""
    return Listener.of(member.host, member.port, None) if member.machine == machine() else None


class _Driver:
    """Executes the agreement's actions and feeds it incoming messages."""

    def __init__(
        self,
        me: MembershipSocket,
        agreement: Agreement,
        callers: MembershipCallers,
        meanwhile: Callable[[], None],
    ) -> None:
        self._me, self._agreement, self._callers, self._meanwhile = me, agreement, callers, meanwhile
        self._channels: dict[Hashable, Channel] = {}  # connections to called ranks, and kept callers

    def run(self) -> Decision:
        """Drive the agreement until the next group is decided. Raises CollectiveTimeout."""
        try:
            while True:
                self._act()
                if self._agreement.decision is not None:
                    return self._agreement.decision
                self._meanwhile()
                self._hear_channels()
                if self._agreement.gathers:
                    self._hear_callers()
                self._agreement.passed(time.monotonic())
        finally:
            for channel in self._channels.values():
                channel.close()

    def _act(self) -> None:
        while self._agreement.actions:
            action = self._agreement.actions.pop(0)
            try:
                self._do(action)
            except OSError:
                self._lose(action)

    def _lose(self, action: Action) -> None:
        """Close a connection after an OSError of an action, and report the loss.

        A signal handler may have raised the error after the message was sent; the rank at the other end would then
        wait for the next message.
        """
        if action.do == "inform":  # inform() catches the errors of its connections
            self._agreement.actions.insert(0, action)
            return
        channel = self._channels.pop(action.channel, action.channel)
        if isinstance(channel, Channel):
            channel.close()
        self._agreement.lost(action.channel, time.monotonic())

    def _do(self, action: Action) -> None:
        do, channel, message = action
        match do:
            case "call":
                self._call(channel)
            case "inform" if isinstance(message, Decided):
                self._agreement.informed(self._me.inform(channel, message.decided))
            case "keep":
                self._callers.take(channel)
                self._channels[channel] = channel
            case "close" if channel not in self._channels and isinstance(channel, MembershipCaller):
                self._callers.dismiss(channel, message)
            case "close":
                if channel in self._channels:
                    self._channels.pop(channel).close()
            case "send" if message is not None:
                self._channels.get(channel, channel).send(message)

    def _call(self, rank: int) -> None:
        try:
            self._channels[rank] = self._me.call(self._me.members[rank])
        except ConnectionRefusedError:
            self._agreement.refused(rank, time.monotonic())
        except OSError:
            self._agreement.lost(rank, time.monotonic(), reached=False)

    def _hear_channels(self) -> None:
        """Wait a moment, and give the agreement the messages of its channels."""
        poll = select.poll()
        for channel in self._channels.values():
            poll.register(channel, select.POLLIN)
        poll.poll(1000 * _NAP_SECONDS)
        for key, channel in list(self._channels.items()):
            if self._channels.get(key) is channel:
                with contextlib.suppress(OSError):
                    channel.hear()
            while channel.inbox and self._channels.get(key) is channel:
                self._give(key, channel)
            if channel.has_ended and self._channels.get(key) is channel:
                self._channels.pop(key).close()
                self._agreement.lost(key, time.monotonic())
                self._act()

    def _hear_callers(self) -> None:
        self._callers.hear()
        for caller in self._callers:
            if self._agreement.gathers and not caller.is_knock:
                self._give(caller, caller)

    def _give(self, key: Hashable, channel: Channel) -> None:
        self._agreement.heard(key, channel.inbox.pop(0), time.monotonic())
        self._act()
