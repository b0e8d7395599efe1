"""The processes that call this one: a bounded number, of bounded size, each of which must say soon what it wants."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from qccl.transports.channel import ANSWER_SECONDS, Channel, Keys
from qccl.transports.relayed import RelayListener
from qccl.transports.secure_socket import SecureSocket
from qccl.transports.sockets import BACKLOG, seats
from qccl.transports.strangers import NotARank, report

__all__ = ["Caller", "Callers"]

#: how long a caller may take for its first message
HELLO_SECONDS = 5.0
#: connections that one hear() accepts (more than wait at the socket), and bytes of incomplete messages, at most
_MOST_ACCEPTED = 2 * BACKLOG
_MOST_NBYTES = 8 << 20
_NO_ROOM = "too many of them at once"
#: the first byte of every TLS connection
_HANDSHAKE = b"\x16"


class Caller(Channel):
    """A connection that this process has accepted.

    Attributes:
        nonce: what its first message must repeat.
        until: when it is dropped if it has not said what it wants.
    """

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        super().__init__(connection, keys.seal)
        self._plain: socket.socket | None = connection if keys.tls else None  # until it is known how it speaks
        self._keys = keys
        self.nonce = os.urandom(16).hex()
        self.until = time.monotonic() + HELLO_SECONDS
        self.is_greeted = False

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


class Callers:
    """The connections to a listening socket of the process with the id ``id``.

    A caller counts when its first message repeats the nonce that it was sent, and the id of this process. Only ranks
    know the id, which is random. There are two exceptions. A process that wants to join does not know the id. A rank
    that sends a decision to a stopped process does not wait for the nonce.

    In a group that has a secret all of this runs inside TLS, except sealed messages (channel.py), and nothing of a
    message is read before the caller has proved that it has the secret.
    """

    def __init__(self, server: socket.socket | RelayListener, id: str, keys: Keys) -> None:
        self._server, self._id, self._keys = server, id, keys
        self._unknown: dict[Caller, None] = {}  # the oldest first
        self._known: dict[Caller, None] = {}
        server.setblocking(False)

    def __iter__(self) -> Iterator[Caller]:
        """Those that have said what they want; the others may change meanwhile."""
        return iter([each for each in self._known if each.inbox])

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        self._server.close()
        for each in (*self._unknown, *self._known):
            each.close()
        self._unknown, self._known = {}, {}

    def knocks(self) -> list[tuple[Caller, Any]]:
        """The processes that wait to join, with their messages."""
        return [(each, each.inbox[0]) for each in self if each.is_knock]

    def take(self, caller: Caller) -> None:
        """From now on it is the caller of this method that reads and closes this connection."""
        del self._known[caller]

    def dismiss(self, caller: Caller, seconds: float = ANSWER_SECONDS, **message: object) -> None:
        """Close a connection, after a last ``message``, for which it has some seconds."""
        self._unknown.pop(caller, None)
        self._known.pop(caller, None)
        with contextlib.suppress(OSError), caller:
            if message:
                caller.send(message, seconds)

    def hear(self) -> None:
        """Accept all connections, and read what has come before. Never blocks."""
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                    break
            else:
                caller = Caller(connection, self._keys)
                self._unknown[caller] = None
                if self._keys.tls:
                    self._hear(caller)
                else:
                    self._greet(caller)  # at once: its answer may be there before it is the oldest
                if len(self._unknown) > seats():
                    self._drop_oldest()
        for caller in (*self._unknown, *self._known):
            self._hear(caller)
        while sum(each.nbytes for each in self._unknown) > _MOST_NBYTES:
            report("too many bytes")
            self.dismiss(max(self._unknown, key=lambda each: each.nbytes))

    def _hear(self, caller: Caller) -> None:
        try:
            caller.hear()
            self._judge(caller)
        except NotARank as stranger:
            report(str(stranger))
            self.dismiss(caller)

    def _drop_oldest(self) -> bool:
        """Make room: drop the oldest caller that has not said yet what it wants, or else the oldest that wants to join.

        Returns whether there was one. A caller of the first kind is heard once more before, because a rank that waited
        at the socket of a stopped process has said what it wants. A process that wants to join calls again. Those that
        have proved that they have the secret stay longer than others.
        """
        oldest = next((each for each in self._unknown if not each.is_proved), next(iter(self._unknown), None))
        if oldest is not None:
            self._hear(oldest)
            drops = oldest in self._unknown
        else:
            oldest = next((each for each, _ in self.knocks()), None)
            drops = oldest is not None
        if drops and oldest is not None:
            report(_NO_ROOM)
            self.dismiss(oldest)
        return oldest is not None

    def _greet(self, caller: Caller) -> None:
        caller.is_greeted = True
        with contextlib.suppress(OSError):
            caller.send({"kind": "challenge", "nonce": caller.nonce}, 0)

    def _judge(self, caller: Caller) -> None:
        """Find out what a caller wants. Raises NotARank."""
        if caller in self._unknown and caller.inbox:
            self._admit(caller, caller.inbox[0])
        elif caller in self._unknown and time.monotonic() > caller.until:
            raise NotARank("it says nothing, or too slowly")
        if caller not in self._unknown and caller not in self._known:
            return
        if caller.is_knock and (len(caller.inbox) > 1 or caller.nbytes):
            raise NotARank("a message that no rank sends now")
        if caller.has_ended and not any(message["kind"] == "decided" for message in caller.inbox):
            self.dismiss(caller)
        elif not (caller.is_greeted or caller.has_ended or caller.inbox) and (caller.is_proved or not self._keys.tls):
            self._greet(caller)

    def _admit(self, caller: Caller, message: Any) -> None:
        kind = message["kind"]
        if kind == "watch":  # it has seen what it wanted, and may call again
            return self.dismiss(caller)
        if kind not in ("knock", "join", "probe", "decided") or (caller.is_sealed and kind != "decided"):
            raise NotARank("a message that no rank sends now")
        if kind != "decided" and message["nonce"] != caller.nonce:
            raise NotARank("an old message")
        if kind != "knock" and message["to"] != self._id:  # the process that had this port has ended
            self.dismiss(caller, 0, kind="stranger")
        elif kind == "knock" and len(self.knocks()) >= seats():
            raise NotARank(_NO_ROOM)
        else:
            del self._unknown[caller]
            self._known[caller] = None
