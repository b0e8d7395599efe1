"""Finds lost ranks, whose processes have ended, by their listening sockets.

The kernel closes the sockets of a process that ends, even if nobody reaps it. By its number such a process, a zombie,
seems to be alive.

A machine refuses connections to a closed socket. A firewall may refuse them, too, while UCX reaches the process over
another port or network. So a refusal counts in two cases only:

- The socket was reached before: then no firewall is in the way. A group looks at the sockets on other machines when it
  begins.
- The socket was at a numeric address of this machine, where the port is free now. (A name may mean another machine.)

Otherwise only the deadline finds the end of the process. That costs little: between machines UCX itself finds processes
that have ended.

Two cases remain undecidable. A firewall that begins to refuse connections later looks like the end of the process. A
process that could never be reached, and ends, looks like a process behind a firewall.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qccl.base.deadline import Deadline
from qccl.meeting.channel import frame
from qccl.meeting.messages import Look
from qccl.meeting.sockets import check_connected, is_abandoned

__all__ = ["Listener", "Watch", "make_greeting", "refusal_means_end"]

#: most seconds of one look, because it delays the thread that moves the data
_LOOK_SECONDS = 0.02


class Listener(NamedTuple):
    """A listening socket: its address for the socket module, and whether it was given as a number."""

    family: int
    address: Any
    is_numeric: bool

    @classmethod
    def of(cls, host: str, port: int, own_host: str | None) -> Listener | None:
        """The socket at a host and port; None for another machine's name, because a look-up may take long."""
        for flags in (socket.AI_NUMERICHOST, 0) if host == own_host else (socket.AI_NUMERICHOST,):
            with contextlib.suppress(OSError):
                family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
                return cls(family, address, flags != 0)
        return None


def make_greeting(seal: bytes = b"") -> bytes:
    """The message of a Watch; ``seal``: the group's key for messages outside TLS, if it has one."""
    return frame(Look(), seal)


class Watch:
    """Watches the processes of a group, from the first call of ended() on. One thread at a time may call it.

    The connection to each process stays open, because a process that does not accept connections has room for few. It
    begins with a ``greeting``, which tells ranks of the job from strangers.

    Attributes:
        unseen: the ranks whose sockets it does not watch: those at names of other machines.
    """

    def __init__(self, places: Sequence[tuple[str, int]], own_host: str | None = None, greeting: bytes = b"") -> None:
        """``places``: by rank, host and port of a socket on which the process listens until it ends.

        ``own_host``: this process's host, the only one that is watched although it is a name. ``greeting``: the result
        of make_greeting(); empty: there is no key.
        """
        found = ((rank, Listener.of(*place, own_host)) for rank, place in enumerate(places))
        self._places = {rank: place for rank, place in found if place is not None}
        self._elsewhere = [rank for rank, place in enumerate(places) if place[0] != own_host]
        self.unseen = [rank for rank in self._elsewhere if rank not in self._places]
        self._greeting = greeting or make_greeting()
        self._calls: dict[int, socket.socket] = {}  # rank -> a call that was not answered yet
        self._connections: dict[int, socket.socket] = {}
        self._reached: set[int] = set()
        self._lock = threading.Lock()

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """The ranks among ``ranks`` whose processes have ended, if their machines answer within some milliseconds.

        A later answer counts at the next call. A process that cannot be reached has not ended.
        """
        with self._lock:
            for rank in ranks:
                if rank in self._places and not self._is_connected(rank) and rank not in self._calls:
                    self._call(rank)
            ended = {rank for rank, connection in self._answered() if self._has_ended(rank, connection)}
            return [rank for rank in ranks if rank in ended]

    def begin(self) -> None:
        """Begin to connect, without waiting, to the ranks at other addresses than this rank's; reach() follows."""
        with self._lock:
            for rank in self._elsewhere:
                if rank in self._places:
                    self._call(rank)

    def reach(self) -> set[int]:
        """The ranks at other addresses whose sockets can be reached now; refusals by them count later.

        Takes 0.02 s at most, and keeps no connection.
        """
        self.ended(self._elsewhere)
        with self._lock:
            while self._connections:
                self._connections.popitem()[1].close()
            return set(self._reached)

    def close(self) -> None:
        """Stop: ended() finds nothing from now on. Idempotent."""
        with self._lock:
            self._places = {}
            for sockets in (self._calls, self._connections):
                while sockets:
                    sockets.popitem()[1].close()

    def _is_connected(self, rank: int) -> bool:
        connection = self._connections.get(rank)
        if connection is None or _is_silent(connection):
            return connection is not None
        connection.close()  # closed by the process, or only by what lies between: a new connection tells
        del self._connections[rank]
        return False

    def _call(self, rank: int) -> None:
        """Begin to connect, without waiting."""
        place = self._places[rank]
        with contextlib.suppress(OSError):  # no descriptor is left now; the next look tries again
            call = self._calls[rank] = socket.socket(place.family, socket.SOCK_STREAM)
            call.setblocking(False)
            # the call may get its target's port, which must then be free at once for is_abandoned()
            call.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            call.connect(place.address)  # raises BlockingIOError while it is under way

    def _answered(self) -> Iterator[tuple[int, socket.socket]]:
        """The calls that end within a moment."""
        deadline = Deadline(_LOOK_SECONDS)
        poll = select.poll()
        ranks = {call.fileno(): rank for rank, call in self._calls.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLOUT)
        while ranks:
            for descriptor, _ in poll.poll(1000 * deadline.remaining()):
                poll.unregister(descriptor)
                rank = ranks.pop(descriptor)
                yield rank, self._calls.pop(rank)
            if deadline.is_over:
                return

    def _has_ended(self, rank: int, connection: socket.socket) -> bool:
        """Whether the answer to a call says that the process has ended; keeps an open connection."""
        try:
            check_connected(connection)
            self._reached.add(rank)
            connection.sendall(self._greeting)
        except OSError as error:
            connection.close()
            is_refused = isinstance(error, ConnectionRefusedError)
            return is_refused and refusal_means_end(self._places[rank], was_reached=rank in self._reached)
        self._connections[rank] = connection
        return False


def refusal_means_end(listener: Listener | None, *, was_reached: bool) -> bool:
    """Whether a refused connection means that the process has ended, in the two cases above; None: another machine."""
    if was_reached or listener is None:
        return was_reached
    return listener.is_numeric and is_abandoned(listener.family, listener.address)


def _is_silent(connection: socket.socket) -> bool:
    """Whether the other side has neither sent nor ended anything."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
