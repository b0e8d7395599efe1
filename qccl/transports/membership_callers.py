"""The processes that call the socket of a process in a group: ranks that agree on the next one, and those that join."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator
from typing import Any

from qccl.transports.callers import NO_ROOM, Callers
from qccl.transports.channel import ANSWER_SECONDS, TLS_NONCE, Channel, Keys
from qccl.transports.secure_socket import SecureSocket
from qccl.transports.sockets import seats
from qccl.transports.strangers import NotARank, report

__all__ = ["MembershipCaller", "MembershipCallers"]

#: the first byte of every TLS connection
_HANDSHAKE = b"\x16"


class MembershipCaller(Channel):
    """A connection that this process has accepted.

    Attributes:
        nonce: what its first message must repeat.
        until: when it is dropped if it has not said what it wants.
    """

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        super().__init__(connection, keys.seal)
        self._plain: socket.socket | None = connection if keys.tls else None  # until it is known how it speaks
        self._keys = keys
        self.nonce = TLS_NONCE if keys.tls else os.urandom(16).hex()
        self.until = math.inf

    @property
    def is_proved(self) -> bool:
        """It has proved over TLS that it has the job's secret."""
        return isinstance(self._connection, SecureSocket) and self._connection.is_proved

    @property
    def is_sealed(self) -> bool:
        """It speaks without TLS, in a group that has a secret."""
        return bool(self._keys.tls) and not isinstance(self._connection, SecureSocket)

    def hear(self) -> None:
        """As of a Channel. Where there is a secret, first find out whether the caller begins with TLS."""
        if self._plain is not None:
            self._plain.setblocking(False)
            try:
                first = self._plain.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                first = b""
            if first == _HANDSHAKE:
                self._connection = SecureSocket(self._plain, self._keys.tls, is_server=True)
            self._plain = None
        super().hear()

    @property
    def is_knock(self) -> bool:
        """Whether it is a process that wants to join."""
        return bool(self.inbox) and self.inbox[0]["kind"] == "knock"


class MembershipCallers(Callers[MembershipCaller]):
    """The connections to a listening socket of the process with the id ``id``.

    A caller counts when its first message repeats the nonce that it was sent, and the id of this process. Only ranks
    know the id, which is random. There are two exceptions. A process that wants to join does not know the id. A rank
    that sends a decision to a stopped process does not wait for the nonce.

    In a group that has a secret all of this runs inside TLS, except sealed messages (channel.py), and nothing of a
    message is read before the caller has proved that it has the secret. TLS itself makes old messages useless, so no
    nonce is sent.
    """

    def __init__(self, server: socket.socket, id: str, keys: Keys) -> None:
        super().__init__(server)
        self._id, self._keys = id, keys

    def __iter__(self) -> Iterator[MembershipCaller]:
        """Those that have said what they want; the others may change meanwhile."""
        return iter([each for each in self._known if each.inbox])

    def __del__(self) -> None:
        self.close()

    def knocks(self) -> list[tuple[MembershipCaller, Any]]:
        """The processes that wait to join, with their messages."""
        return [(each, each.inbox[0]) for each in self if each.is_knock]

    def take(self, caller: MembershipCaller) -> None:
        """From now on it is the caller of this method that reads and closes this connection."""
        self._remove(caller)

    def dismiss(self, caller: MembershipCaller, seconds: float = ANSWER_SECONDS, **message: object) -> None:
        """Close a connection, after a last ``message``, for which it has some seconds."""
        with contextlib.suppress(OSError):
            if message:
                caller.send(message, seconds)
        self.drop(caller)

    def hear(self) -> None:
        """Accept all connections, and read what has come before. Never blocks."""
        self.accept()
        for caller in (*self._unknown, *self._known):
            self._hear(caller)
        self.bound()

    def _welcome(self, connection: socket.socket) -> MembershipCaller:
        caller = MembershipCaller(connection, self._keys)
        if not self._keys.tls:  # at once: its answer may be there before it is the oldest
            with contextlib.suppress(OSError):
                caller.send({"kind": "challenge", "nonce": caller.nonce}, 0)
        return caller

    def _oldest_known(self) -> MembershipCaller | None:
        """A process that wants to join calls again."""
        return next((each for each, _ in self.knocks()), None)

    def _hear(self, caller: MembershipCaller) -> None:
        try:
            caller.hear()
            self._judge(caller)
        except NotARank as stranger:
            report(str(stranger))
            self.drop(caller)

    def _judge(self, caller: MembershipCaller) -> None:
        """Find out what a caller wants. Raises NotARank."""
        if caller in self._unknown and caller.inbox:
            self._admit(caller, caller.inbox[0])
        if caller not in self._unknown and caller not in self._known:
            return
        if caller.is_knock and (len(caller.inbox) > 1 or caller.nbytes):
            raise NotARank("a message that no rank sends now")
        if caller.has_ended and not any(message["kind"] == "decided" for message in caller.inbox):
            self.drop(caller)

    def _admit(self, caller: MembershipCaller, message: Any) -> None:
        kind = message["kind"]
        if kind == "watch":  # it has seen what it wanted, and may call again
            return self.drop(caller)
        if kind not in ("knock", "join", "probe", "decided") or (caller.is_sealed and kind != "decided"):
            raise NotARank("a message that no rank sends now")
        if kind != "decided" and message["nonce"] != caller.nonce:
            raise NotARank("an old message")
        if kind != "knock" and message["to"] != self._id:  # the process that had this port has ended
            self.dismiss(caller, 0, kind="stranger")
        elif kind == "knock" and len(self.knocks()) >= seats():
            raise NotARank(NO_ROOM)
        else:
            caller.until = math.inf
            self._set_known(caller)
