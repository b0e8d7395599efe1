"""Whole messages over a socket: sent or received by a deadline, a time.monotonic()."""

from __future__ import annotations

import time

from qccl.transports.secure_socket import Connection
from qccl.transports.sockets import LONGEST_SECONDS

__all__ = ["receive", "send"]


def send(connection: Connection, message: bytes, deadline: float) -> None:
    """Raises TimeoutError where not all of it has left by ``deadline``."""
    _set_timeout(connection, deadline)
    connection.sendall(message)  # whose timeout is for the whole, unlike recv's


def receive(connection: Connection, nbytes: int, deadline: float) -> bytes:
    """``nbytes``, or fewer where the other side ends. Raises TimeoutError where they have not come by ``deadline``."""
    received = bytearray()
    while len(received) < nbytes:
        _set_timeout(connection, deadline)
        part = connection.recv(min(nbytes - len(received), 1 << 20))
        if not part:
            break
        received += part
    return bytes(received)


def _set_timeout(connection: Connection, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(min(left, LONGEST_SECONDS))
