"""Finding processes that have ended, by their listening sockets.

The kernel closes the sockets of a process that ends, also if nobody reaps it. By its number such a process, a zombie,
seems to be alive.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence

from qccl.transports.channel import CONNECT_SECONDS

__all__ = ["Watch"]


class Watch:
    """Looks at the processes of a group, from the first call of ended() on. One thread at a time may call it.

    The connection to each stays open, because a process that never accepts it has room for few.
    """

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        """``places``: by rank, host and port of a socket on which the process listens until it ends."""
        self._places = dict(enumerate(places))
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose processes have ended. One that cannot be reached has not."""
        with self._lock:
            return [rank for rank in ranks if rank in self._places and self._has_ended(rank)]

    def close(self) -> None:
        """From now on nothing is known to have ended. Idempotent."""
        with self._lock:
            self._places = {}
            while self._connections:
                self._connections.popitem()[1].close()

    def _has_ended(self, rank: int) -> bool:
        connection = self._connections.get(rank)
        if connection is not None:
            if _is_silent(connection):
                return False
            connection.close()  # by its process, or only by the other side: a new one tells
            del self._connections[rank]
        return self._connect(rank)

    def _connect(self, rank: int) -> bool:
        """Whether the machine refuses a connection. One that does not answer is not asked again."""
        try:
            connection = socket.create_connection(self._places[rank], CONNECT_SECONDS)
        except ConnectionRefusedError:
            return True
        except OSError:
            del self._places[rank]
            return False
        if connection.getsockname() == connection.getpeername():  # TCP connects a free port to itself
            connection.close()
            return True
        self._connections[rank] = connection
        return False


def _is_silent(connection: socket.socket) -> bool:
    """Whether the other side has neither sent nor ended anything."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
