"""Ranks of a meeting over TCP, for tests: one gather, and what a rank says that a test plays."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import patience

from qccl.transports.meeting_messages import NONCE_NBYTES, Hello, Kind, proof, receive_message
from qccl.transports.rendezvous import Rendezvous

Place = tuple[str, int]


def gather(
    note: bytes,
    rank: int,
    size: int,
    place: Place,
    timeout: float,
    job: str = "",
    *,
    is_local: bool = False,
    key: bytes | None = None,
) -> list[bytes]:
    """A meeting with one gather."""
    with Rendezvous(rank, size, place, job, is_local=is_local, key=key) as meeting:
        return meeting.gather(note, timeout)


def reach(port: int) -> socket.socket:
    """A connection to rank 0, which may not listen yet."""
    limit = patience.Limit(60)
    while limit.left():
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        time.sleep(0.01)
    raise AssertionError(f"nobody listens at {port}")


def hello(
    rank: int, size: int = 3, note: bytes = b"stranger", job: str = "", process: bytes = b"stranger", meeting: int = 1
) -> bytes:
    """The first message of a rank, with its note."""
    return Hello.of(rank, size, meeting, job.encode(), process, len(note)).pack() + note


def challenge(connection: socket.socket) -> tuple[bytes, bytes]:
    """Rank 0's demand for a proof: its nonce, and its own proof."""
    found = receive_message(connection, ("there", 1), 3, time.monotonic() + 60, (Kind.PROVE,))
    assert found is not None
    return found[1][:NONCE_NBYTES], found[1][NONCE_NBYTES:]


def prove(connection: socket.socket, said: bytes, job: str = "") -> None:
    """Answer rank 0's demand for a proof."""
    nonce, _ = challenge(connection)
    connection.sendall(proof(job.encode(), b"rank", nonce, said))
