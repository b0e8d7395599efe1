"""The processes that call this one: a bounded number, of bounded size, each of which must say soon what it wants.

This is the only place that accepts connections in Python: for rank 0 of a meeting (meeting_host.py), and for the
sockets of a group's processes (membership_callers.py). Anybody may connect, so a caller is *unknown* until it has said
what it wants, and perhaps has proved it. Only unknown callers count for the bounds.
"""

from __future__ import annotations

import errno
import socket
import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from qccl.transports import descriptors
from qccl.transports.sockets import BACKLOG, seats, send_at_once
from qccl.transports.strangers import report

__all__ = ["NO_ROOM", "Callers"]

#: how long a caller may take to say what it wants
HELLO_SECONDS = 5.0
#: connections that one accept() accepts (more than wait at the socket), and bytes of incomplete messages, at most
_MOST_ACCEPTED = 2 * BACKLOG
_MOST_NBYTES = 8 << 20
NO_ROOM = "too many of them at once"


class Caller(Protocol):
    """A connection that this process has accepted.

    Attributes:
        until: the time.monotonic() at which it is dropped.
    """

    until: float

    @property
    def nbytes(self) -> int:
        """What has come of a message that is not complete."""

    @property
    def is_proved(self) -> bool:
        """It has proved over TLS that it has the secret."""

    def close(self) -> None:
        """Close the connection."""


_C = TypeVar("_C", bound=Caller)


class Callers(ABC, Generic[_C]):
    """The connections to a listening socket, which belongs to this object. Subclasses say what callers may say."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._unknown: dict[_C, None] = {}  # the oldest first
        self._known: dict[_C, None] = {}
        server.setblocking(False)

    @abstractmethod
    def _welcome(self, connection: socket.socket) -> _C:
        """A new caller."""

    @abstractmethod
    def _hear(self, caller: _C) -> None:
        """Read what a caller has sent, and act on it; never blocks for long."""

    def _forget(self, caller: _C) -> None:
        """A caller is about to be closed, or belongs to somebody else from now on."""

    def _oldest_known(self) -> _C | None:
        """A known caller that may be dropped where no unknown one is left: it calls again."""

    def close(self) -> None:
        """Close the listening socket and all connections. Idempotent."""
        self._server.close()
        for each in (*self._unknown, *self._known):
            each.close()
        self._unknown, self._known = {}, {}

    def accept(self) -> str:
        """Accept all connections that wait, and greet them; why not all of them could be accepted, else nothing."""
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                break
            except OSError as error:  # otherwise the caller has gone
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                    return descriptors.exhausted() or str(error)
            else:
                send_at_once(connection)
                caller = self._welcome(connection)
                caller.until = time.monotonic() + HELLO_SECONDS
                self._unknown[caller] = None
                self._hear(caller)
                if len(self._unknown) > seats():
                    self._make_room()
        return ""

    def bound(self) -> None:
        """Drop callers that are too late, and the largest ones of too many bytes."""
        now = time.monotonic()
        for each in [each for each in (*self._unknown, *self._known) if each.until < now]:
            self.drop(each, "it says nothing, or too slowly")
        while sum(each.nbytes for each in self._unknown) > _MOST_NBYTES:
            self.drop(max(self._unknown, key=lambda each: each.nbytes), "too many bytes")

    def drop(self, caller: _C, cause: str = "") -> None:
        """Close a connection; the log has the ``cause`` if the caller is unknown. Idempotent."""
        if caller in self._unknown and cause:
            report(cause)
        if self._remove(caller):
            caller.close()

    def _remove(self, caller: _C) -> bool:
        """From now on the connection is not of this object; whether it was."""
        if caller not in self._unknown and caller not in self._known:
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

        An unknown caller is heard once more before: what it wants may have come. Those that have proved that they have
        the secret stay longer than others.
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
