"""Accepts callers: a bounded number, of bounded size, each of which must soon say what it wants.

Rank 0 of a meeting (meeting_host.py) and the sockets of a group's processes (membership_callers.py) accept connections
here alone; Links::accept in kernels/wires/wan/ does so for `wan`, with the same bounds of number and time. Anybody may
connect, so a caller is *unknown* until it has said what it wants, and perhaps has proved it. Only unknown callers count
for the bounds.
"""

from __future__ import annotations

import errno
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from qccl.base.deadline import Deadline
from qccl.meeting import descriptors
from qccl.meeting.channel import MOST_NBYTES, Channel, Keys
from qccl.meeting.secure_socket import SecureSocket
from qccl.meeting.sockets import BACKLOG, seats, send_at_once
from qccl.meeting.strangers import NotARank, report

__all__ = ["HELLO_SECONDS", "NO_ROOM", "Caller", "Callers"]

#: the first byte of every TLS connection
HANDSHAKE = b"\x16"

#: seconds in which a caller must say what it wants, also at a port of `wan`
HELLO_SECONDS = 5.0
#: most connections of one accept(), more than wait at the socket; most bytes of incomplete messages
_MOST_ACCEPTED = 2 * BACKLOG
_MOST_NBYTES = 8 << 20
NO_ROOM = "too many of them at once"


class Caller(Channel):
    """A connection that this process has accepted.

    Attributes:
        until: the time at which the caller is dropped if it is still unknown.
        begins_with_tls: the caller's first byte begins a TLS connection.
        may_be_plain: the caller may send sealed messages without TLS, although this process has a key for TLS.
    """

    may_be_plain = True

    def __init__(
        self, connection: socket.socket, keys: Keys, parse: Callable[[bytes], Any], most: int = MOST_NBYTES
    ) -> None:
        super().__init__(connection, parse, keys.seal, most=most)
        self._fresh: socket.socket | None = connection  # the socket until it is known whether the caller uses TLS
        self._keys = keys
        self.until = Deadline(HELLO_SECONDS)
        self.begins_with_tls = False

    @property
    def is_plain(self) -> bool:
        """Whether the caller has begun without TLS although this process has a key for TLS."""
        return bool(self._keys.tls) and self._fresh is None and not isinstance(self._connection, SecureSocket)

    def hear(self) -> None:
        """Hear as a Channel does. First find out whether the caller begins with TLS."""
        if self._fresh is not None:
            self._fresh.setblocking(False)
            try:
                first = self._fresh.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                first = b""
            self.begins_with_tls = first == HANDSHAKE
            if self.begins_with_tls and self._keys.tls:
                self._connection = SecureSocket(self._fresh, self._keys.tls, is_server=True)
            self._fresh = None
            if first and self.is_plain and not self.may_be_plain:
                raise NotARank("it does not have the secret, or speaks another protocol")
        super().hear()


_C = TypeVar("_C", bound=Caller)


class Callers(ABC, Generic[_C]):
    """The connections to a listening socket, which belongs to this object. Subclasses say what callers may say."""

    def __init__(self, server: socket.socket, keys: Keys) -> None:
        self._server, self._keys = server, keys
        self._unknown: dict[_C, None] = {}  # the oldest first
        self._known: dict[_C, None] = {}
        server.setblocking(False)

    def __contains__(self, caller: _C) -> bool:
        return caller in self._unknown or caller in self._known

    @abstractmethod
    def _welcome(self, connection: socket.socket) -> _C:
        """The caller for a new connection."""

    @abstractmethod
    def _judge(self, caller: _C) -> None:
        """Act on a caller's messages; never blocks for long. Raises NotARank."""

    def _hear(self, caller: _C) -> None:
        """Read a caller's messages and act on them; drop the largest callers if all together hold too many bytes."""
        try:
            caller.hear()
            self._judge(caller)
        except NotARank as stranger:
            self._refuse(caller, stranger)
        while caller in self._unknown and sum(each.nbytes for each in self._unknown) > _MOST_NBYTES:
            self.drop(max(self._unknown, key=lambda each: each.nbytes), "too many bytes")

    def _refuse(self, caller: _C, stranger: NotARank) -> None:
        """Drop a caller that is not a rank, or sent a message that no rank sends now."""
        report(str(stranger))
        self.drop(caller)

    def _forget(self, caller: _C) -> None:
        """Called before a caller is closed or handed over: forget it."""

    def _oldest_known(self) -> _C | None:
        """A known caller that may be dropped if no unknown one is left, because it calls again."""

    def close(self) -> None:
        """Close the listening socket and all connections. Idempotent."""
        self._server.close()
        for each in (*self._unknown, *self._known):
            each.close()
        self._unknown, self._known = {}, {}

    def accept(self) -> str:
        """Accept and greet all waiting connections. Returns why some could not be accepted, or an empty text."""
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                break
            except OSError as error:  # other errors mean that the caller has gone
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                    return descriptors.exhausted() or str(error)
            else:
                send_at_once(connection)
                caller = self._welcome(connection)
                self._unknown[caller] = None
                self._hear(caller)
                if len(self._unknown) > seats():
                    self._make_room()
        return ""

    def drop_late(self) -> None:
        """Drop the callers whose time is over."""
        now = time.monotonic()
        for each in [each for each in (*self._unknown, *self._known) if each.until.end < now]:
            self.drop(each, "it says nothing, or too slowly")

    def drop(self, caller: _C, cause: str = "") -> None:
        """Close a connection; the log has the ``cause`` if the caller is unknown. Idempotent."""
        if caller in self._unknown and cause:
            report(cause)
        if self.take(caller):
            caller.close()

    def take(self, caller: _C) -> bool:
        """Hand a connection over: its new owner reads and closes it. Returns whether it was here."""
        if caller not in self:
            return False
        self._unknown.pop(caller, None)
        self._known.pop(caller, None)
        self._forget(caller)
        return True

    def _set_known(self, caller: _C, is_known: bool = True) -> None:
        here, there = (self._unknown, self._known) if is_known else (self._known, self._unknown)
        here.pop(caller, None)
        there[caller] = None

    def _make_room(self) -> bool:
        """Drop the oldest unknown caller, or else a known one that may go. Returns whether there was one.

        An unknown caller is heard once more first, because its request may have come. Callers that have proved that
        they have the secret stay longer than others.
        """
        oldest = next((each for each in self._unknown if not each.is_proved), next(iter(self._unknown), None))
        if oldest is None:
            oldest = self._oldest_known()
            if oldest is not None:
                report(NO_ROOM)
                self.drop(oldest)
            return oldest is not None
        self._hear(oldest)
        if oldest in self._unknown:
            self.drop(oldest, NO_ROOM)
        return True
