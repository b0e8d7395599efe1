"""The messages of a meeting over TCP, and their checks. Nothing that was received is executed or unpickled.

A rank calls rank 0 and sends its **hello**: which rank of which job and meeting it is, and its first note. All other
messages have a kind, a length and a checksum, in both directions.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from qccl.errors import EngineError
from qccl.transports.secure_socket import Connection
from qccl.transports.sockets import place_text
from qccl.transports.timed import receive

__all__ = [
    "HELLO_NBYTES",
    "NONCE_NBYTES",
    "NOTE_NBYTES",
    "PROOF_NBYTES",
    "Hello",
    "Kind",
    "join",
    "message",
    "part",
    "proof",
    "receive_message",
    "stranger",
]

#: largest note of a rank, and reason for a refusal
NOTE_NBYTES = 64 << 10
_REASON_NBYTES = 4096
_MAGIC = b"qccl/rdv"
_VERSION = 7
#: magic, version, rank, size, number of the meeting, job, process, note's length
_HELLO = struct.Struct("<8sIIII16s8sI")
HELLO_NBYTES = _HELLO.size
#: magic, version, kind, length of the content, SHA-256 of kind and content
_HEAD = struct.Struct("<8sIII32s")
#: content of PROVE: a nonce, and rank 0's own proof; a proof is a keyed hash
NONCE_NBYTES, PROOF_NBYTES = 16, 32


class Kind(IntEnum):
    """The kinds of messages, and their content."""

    NOTES = 0  # of rank 0: the notes of all ranks
    LATER = 1  # of rank 0: it is not at this meeting yet; the reason
    REFUSED = 2  # of rank 0: the reason
    PROVE = 3  # of rank 0: a nonce, and its own proof
    NOTE = 4  # of another rank: its note


class Hello(NamedTuple):
    """The first message of a rank, without the note that follows."""

    magic: bytes
    version: int
    rank: int
    size: int
    meeting: int
    job: bytes
    process: bytes
    note_nbytes: int

    @classmethod
    def of(cls, rank: int, size: int, meeting: int, job: bytes, process: bytes, note_nbytes: int) -> Hello:
        """For the name of a ``job``."""
        return cls(_MAGIC, _VERSION, rank, size, meeting, digest(job), process, note_nbytes)

    def pack(self) -> bytes:
        """As it is sent."""
        return _HELLO.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> Hello:
        """From its bytes, of any sender."""
        return cls(*_HELLO.unpack(head))

    def refusal(self, size: int, meeting: int, job: bytes) -> tuple[Kind, str] | None:
        """Why rank 0 of this job's meeting does not take the sender; None if it does.

        Raises ValueError for what is no hello.
        """
        if self.magic != _MAGIC:
            raise ValueError("not a hello")
        if self.version != _VERSION:
            return Kind.REFUSED, f"rank 0 runs another version of qccl (its meetings are of version {_VERSION})"
        if self.job != digest(job):
            return Kind.REFUSED, "rank 0 belongs to another job; give each job a port of its own in QCCL_PORT"
        if self.size != size or not 0 < self.rank < size:
            this = f"rank {self.rank} of {self.size}"
            return Kind.REFUSED, f"rank 0 expects ranks 1 to {size - 1} of {size}, and this is {this}"
        return None if self.meeting == meeting else (Kind.LATER, "rank 0 is not there yet")


def digest(job: bytes) -> bytes:
    """It tells jobs apart, and tells nothing of their names."""
    return hashlib.sha256(job).digest()[:16]


def proof(job: bytes, who: bytes, *parts: bytes) -> bytes:
    """That its author knows the job's name."""
    return hmac.digest(hashlib.sha256(b"qccl" + job).digest(), who + b"".join(parts), "sha256")


def message(kind: Kind, content: bytes) -> bytes:
    """As it is sent."""
    return _HEAD.pack(_MAGIC, _VERSION, kind, len(content), _checksum(kind, content)) + content


def receive_message(
    connection: Connection, place: tuple[str, int], size: int, deadline: float, expected: Sequence[Kind]
) -> tuple[Kind, bytes] | None:
    """The next message, of one of the ``expected`` kinds; None where the other side has ended instead.

    ``place`` is that of rank 0, for errors. Raises EngineError for what is no message, or is damaged; OSError where the
    connection breaks, also in the middle of a message.
    """
    limits = {
        Kind.NOTES: size * (4 + NOTE_NBYTES),
        Kind.LATER: _REASON_NBYTES,
        Kind.REFUSED: _REASON_NBYTES,
        Kind.PROVE: NONCE_NBYTES + PROOF_NBYTES,
        Kind.NOTE: NOTE_NBYTES,
    }
    head = receive(connection, _HEAD.size, deadline)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise stranger(place)
    magic, version, kind, length, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or version != _VERSION or kind not in expected or length > limits[Kind(kind)]:
        raise stranger(place)
    content = receive(connection, length, deadline)
    if len(content) < length:
        raise ConnectionError("the connection ended in the middle of a message")
    if checksum != _checksum(kind, content):
        raise EngineError(f"a message of the meeting at {place_text(place)} was damaged on its way")
    return Kind(kind), content


def stranger(place: tuple[str, int]) -> EngineError:
    """The error of a rank that has met another program."""
    return EngineError(
        f"what answers at {place_text(place)} is not rank 0 of this job, or runs another version of qccl; set "
        f"QCCL_PORT to a free port, the same on all ranks"
    )


def join(notes: Sequence[bytes]) -> bytes:
    """The content of NOTES."""
    return struct.pack(f"<{len(notes)}I", *map(len, notes)) + b"".join(notes)


def part(joined: bytes, size: int) -> list[bytes] | None:
    """The reverse of join(); None if that is not what they are."""
    if len(joined) < 4 * size:
        return None
    lengths = struct.unpack_from(f"<{size}I", joined)
    ends = list(itertools.accumulate(lengths, initial=4 * size))
    return [joined[begin:end] for begin, end in itertools.pairwise(ends)] if ends[-1] == len(joined) else None


def _checksum(kind: int, content: bytes) -> bytes:
    return hashlib.sha256(bytes([kind]) + content).digest()
