"""Ranks of a meeting over TCP, for tests: one gather, and what a rank says that a test plays."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import patience

from qccl.base.deadline import Deadline
from qccl.meeting.channel import Channel, frame
from qccl.meeting.meeting_messages import Hello, MeetingKind, MeetingMessage, parse, seal
from qccl.meeting.rendezvous import Rendezvous

Place = tuple[str, int]
JOB = "the job"


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

    def connected() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        return None

    return patience.wait_until(connected, what=f"a rank listens at {port}")


def hello(rank: int, size: int = 3, note: bytes = b"stranger", job: str = JOB) -> bytes:
    """The first message of a rank, with its note."""
    return frame(Hello(rank, size, 1, b"stranger", note).message(), seal(job))


def challenge(connection: socket.socket, job: str = JOB) -> bytes:
    """Rank 0's demand for a proof: its content."""
    found = Channel(connection, parse, seal(job)).receive(Deadline(60.0))
    connection.settimeout(60)
    assert found.kind is MeetingKind.PROVE
    return bytes(found.content)


def prove(connection: socket.socket, job: str = JOB) -> None:
    """Answer rank 0's demand for a proof, as one that knows this job's name."""
    connection.sendall(frame(MeetingMessage(MeetingKind.PROOF, challenge(connection)), seal(job)))


class Meeting:
    """Three ranks that meet at a port of this machine. Rank 0 waits from the begin on."""

    NOTES = (b"the note of rank 0", b"the note of rank 1", b"the note of rank 2")

    def __init__(self, port: int, key: bytes | None = None) -> None:
        self.port, self.key = port, key
        self._pool = ThreadPoolExecutor(8)
        self.first: Future[list[bytes]] | None = self.start(0)
        reach(port).close()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def start(self, rank: int, *key: bytes | None, port: int = 0) -> Future[list[bytes]]:
        """A rank, with another key if one is given; None is none."""
        found, place = [*key, self.key][0], ("127.0.0.1", port or self.port)
        return self._pool.submit(gather, self.NOTES[rank], rank, 3, place, 60.0 * patience.factor(), JOB, key=found)

    def go_on(self, *others: int, port: int = 0) -> None:
        """The others come, ranks 1 and 2 in this order if none are named, and all meet; again if they have met."""
        found = [self.first or self.start(0), *(self.start(rank, port=port) for rank in others or (1, 2))]
        self.first = None
        assert [each.result(60 * patience.factor()) for each in found] == [list(self.NOTES)] * 3
