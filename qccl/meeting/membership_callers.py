"""The callers of a group member's socket: ranks that agree on the next group, and processes that join."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from qccl.base.deadline import Deadline
from qccl.meeting.callers import NO_ROOM, Caller, Callers
from qccl.meeting.channel import ANSWER_SECONDS, TLS_NONCE, Keys
from qccl.meeting.messages import Challenge, Decided, Join, Knock, Look, Message, Stranger, parse
from qccl.meeting.sockets import seats
from qccl.meeting.strangers import NotARank

__all__ = ["MembershipCaller", "MembershipCallers"]


class MembershipCaller(Caller):
    """A connection that this process has accepted.

    Attributes:
        nonce: the text that the caller's first message must repeat.
    """

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        super().__init__(connection, keys, parse)
        self.nonce = TLS_NONCE if keys.tls else os.urandom(16).hex()

    @property
    def is_knock(self) -> bool:
        """Whether the caller wants to join."""
        return bool(self.inbox) and isinstance(self.inbox[0], Knock)


class MembershipCallers(Callers[MembershipCaller]):
    """The connections to a listening socket of the process with the id ``id``.

    A caller counts when its first message repeats the nonce that it was sent, and the id of this process. Only ranks
    know the id, which is random. There are two exceptions. A process that wants to join does not know the id. A rank
    that sends a decision to a stopped process does not wait for the nonce.

    In a group with a secret all of this runs inside TLS, except sealed messages (channel.py), and no byte of a message
    is read before the caller has proved that it has the secret. TLS itself makes old messages useless, so no nonce is
    sent.
    """

    def __init__(self, server: socket.socket, id: str, keys: Keys) -> None:
        super().__init__(server, keys)
        self._id = id

    def __iter__(self) -> Iterator[MembershipCaller]:
        """The callers that have said what they want. Other callers may come and go meanwhile."""
        return iter([each for each in self._known if each.inbox])

    def __del__(self) -> None:
        self.close()

    def knocks(self) -> list[tuple[MembershipCaller, Any]]:
        """The processes that wait to join, with their messages."""
        return [(each, each.inbox[0]) for each in self if each.is_knock]

    def dismiss(
        self, caller: MembershipCaller, message: Message | None = None, seconds: float = ANSWER_SECONDS
    ) -> None:
        """Close a connection after a last ``message``, which may take ``seconds``."""
        with contextlib.suppress(OSError):
            if message is not None:
                caller.send(message, seconds)
        self.drop(caller)

    def hear(self) -> None:
        """Accept all connections, and read what earlier ones have sent. Never blocks."""
        self.accept()
        for caller in (*self._unknown, *self._known):
            if caller in self:
                self._hear(caller)
        self.drop_late()

    def _welcome(self, connection: socket.socket) -> MembershipCaller:
        caller = MembershipCaller(connection, self._keys)
        if not self._keys.tls:  # heard at once, before it can become the oldest caller
            with contextlib.suppress(OSError):
                caller.send(Challenge(caller.nonce), 0)
        return caller

    def _oldest_known(self) -> MembershipCaller | None:
        """A process that wants to join: it calls again."""
        return next((each for each, _ in self.knocks()), None)

    def _judge(self, caller: MembershipCaller) -> None:
        """Act on a caller's first message."""
        if caller in self._unknown and caller.inbox:
            self._admit(caller, caller.inbox[0])
        if caller not in self:
            return
        if caller.is_knock and (len(caller.inbox) > 1 or caller.nbytes):
            raise NotARank("a message that no rank sends now")
        if caller.has_ended and not any(isinstance(message, Decided) for message in caller.inbox):
            self.drop(caller)

    def _admit(self, caller: MembershipCaller, message: Message) -> None:
        match message:
            case Look():  # a Watch has seen that this process lives, and may call again
                return self.drop(caller)
            case Decided():
                pass
            case Knock() | Join() if not caller.is_plain:
                if message.nonce != caller.nonce:
                    raise NotARank("an old message")
            case _:
                raise NotARank("a message that no rank sends now")
        if isinstance(message, Knock):
            if len(self.knocks()) >= seats():
                raise NotARank(NO_ROOM)
        elif message.to != self._id:  # meant for an earlier process at this port, which has ended
            return self.dismiss(caller, Stranger(), 0)
        caller.until = Deadline(float("inf"))
        self._set_known(caller)
