"""The messages of a meeting over TCP, and their checks. Nothing that was received is executed or unpickled.

A rank calls rank 0 and sends its **hello**: which rank of which meeting it is, and its first note. All messages are
sealed with a key that follows from the job's name (channel.py). They are few and of bytes, so that a meeting needs
Python's standard library alone, as scripts/gpu-check does.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from qccl.meeting.strangers import NotARank

__all__ = ["MOST_NBYTES", "NONCE_NBYTES", "NOTE_NBYTES", "Hello", "MeetingKind", "MeetingMessage"]
__all__ += ["join", "parse", "part", "seal"]

#: most bytes of a rank's note
NOTE_NBYTES = 64 << 10
#: rank, size, number of the meeting, process; the note follows
_HELLO = struct.Struct("<III8s")
#: the longest message to rank 0: its kind, a hello and a note
MOST_NBYTES = 1 + _HELLO.size + NOTE_NBYTES
#: length of a nonce, and of a proof: a nonce and the number of a process
NONCE_NBYTES, _PROOF_NBYTES = 16, 24


class MeetingKind(IntEnum):
    """The kinds of messages, and their content."""

    HELLO = 0  # a rank's first message: a Hello
    PROVE = 1  # from rank 0: a nonce, and the process of the hello, which proves that rank 0 has read it
    PROOF = 2  # the rank's answer to PROVE: the same content
    NOTES = 3  # from rank 0: the notes of all ranks
    TAKEN = 4  # the rank has the notes
    NOTE = 5  # the rank's note in a further gather
    LATER = 6  # from rank 0: it is not at this meeting yet
    REFUSED = 7  # from rank 0: the reason why it refuses the rank


#: least and most bytes of a content
_NBYTES = {
    MeetingKind.HELLO: (_HELLO.size, _HELLO.size + NOTE_NBYTES),
    MeetingKind.PROVE: (_PROOF_NBYTES, _PROOF_NBYTES),
    MeetingKind.PROOF: (_PROOF_NBYTES, _PROOF_NBYTES),
    MeetingKind.NOTES: (0, 1 << 32),  # the channel of a rank takes NOTE_NBYTES for each rank
    MeetingKind.TAKEN: (0, 0),
    MeetingKind.NOTE: (0, NOTE_NBYTES),
    MeetingKind.LATER: (0, 0),
    MeetingKind.REFUSED: (0, 4096),
}


class MeetingMessage(NamedTuple):
    """A kind, and the content that belongs to it."""

    kind: MeetingKind
    content: bytes = b""

    def packed(self) -> bytes:
        """The message as bytes, for a Channel."""
        return bytes([self.kind]) + self.content


def parse(packed: bytes) -> MeetingMessage:
    """The reverse of packed(). Raises NotARank."""
    kind, content = packed[0] if packed else -1, packed[1:]
    if kind not in _NBYTES:
        raise NotARank("a message of an unknown kind")
    least, most = _NBYTES[MeetingKind(kind)]
    if not least <= len(content) <= most:
        raise NotARank("a message that is too short or too long")
    return MeetingMessage(MeetingKind(kind), content)


class Hello(NamedTuple):
    """The first message of a rank, with its first note; ``process``: random bytes."""

    rank: int
    size: int
    meeting: int
    process: bytes
    note: bytes

    def message(self) -> MeetingMessage:
        """The bytes of the message."""
        return MeetingMessage(MeetingKind.HELLO, _HELLO.pack(*self[:4]) + self.note)

    @classmethod
    def of(cls, content: bytes) -> Hello:
        """The hello in a message's content."""
        rank, size, meeting, process = _HELLO.unpack_from(content)
        return cls(rank, size, meeting, process, content[_HELLO.size :])

    def refusal(self, size: int, meeting: int) -> MeetingMessage | None:
        """The message by which rank 0 of this meeting refuses the sender; None if it accepts the sender."""
        if self.size != size or not 0 < self.rank < size:
            this = f"rank {self.rank} of {self.size}"
            return MeetingMessage(
                MeetingKind.REFUSED, f"rank 0 expects ranks 1 to {size - 1} of {size}, and this is {this}".encode()
            )
        return None if self.meeting == meeting else MeetingMessage(MeetingKind.LATER)


def seal(job: str) -> bytes:
    """The key that seals the messages of ranks that know the job's name."""
    return hashlib.sha256(b"qccl" + job.encode()).digest()


def join(notes: Sequence[bytes]) -> MeetingMessage:
    """The message with the notes of all ranks."""
    return MeetingMessage(MeetingKind.NOTES, struct.pack(f"<{len(notes)}I", *map(len, notes)) + b"".join(notes))


def part(joined: bytes, size: int) -> list[bytes] | None:
    """The notes in the content of join(); None unless there are ``size`` of them."""
    if len(joined) < 4 * size:
        return None
    lengths = struct.unpack_from(f"<{size}I", joined)
    ends = list(itertools.accumulate(lengths, initial=4 * size))
    return [joined[begin:end] for begin, end in itertools.pairwise(ends)] if ends[-1] == len(joined) else None
