"""Control messages: the consistency check of each call, abort and shutdown.

In each call every rank sends a header to every other rank, together with the first data but on a separate tag, so
the check costs no round trip. If the transport allows it, the same message has a little data after the header. A
rank uses no data of other ranks, and writes no output, before the headers of all ranks have arrived and are
equal. One receive per rank is always posted. A rank that gives up or leaves sends its message there, so the
others raise at once instead of at their deadlines.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from qccl import _host
from qccl.base.errors import EngineError, MismatchError, PeerLost, for_others, gave_up, names_rank
from qccl.meeting.strangers import printable

__all__ = ["CALL", "HEADER_NBYTES", "Block", "ControlKind", "Header", "text_of"]

#: bytes of a control message: the fields below, zero-padded text in UTF-8, and the number of bytes of data that follow.
#: On ranks that agree, all but this number is equal
HEADER_NBYTES = _host.HEADER_NBYTES
CONTROL_TAG = _host.CONTROL_TAG

_MAGIC = b"qccl"
_VERSION = 3
_LAYOUT = struct.Struct("<4sHHQ32s")  # magic, version, kind, sequence, SHA-256 of the whole text
#: a flag in the sequence number of a last message: the text is the reason that the lost rank gave, not a whole sentence
_IS_REASON = 1 << 63
_AGREED_NBYTES = _host.AGREED_NBYTES
_TEXT_NBYTES = _AGREED_NBYTES - _LAYOUT.size
_FIXED = struct.Struct("<4sHHQ")


class ControlKind(IntEnum):
    """The kinds of control message."""

    CALL = 1  # the header of a call
    ABORT = 2  # the sender's group has failed; the text says why
    MISMATCH = 3  # the sender gave up, because the ranks do not agree
    CLOSE = 4  # the sender makes no more calls


@lru_cache(maxsize=1024)
def _tail(text: str) -> bytes:
    encoded = text.encode(errors="backslashreplace")  # an error's text may contain a file name that is not UTF-8
    return hashlib.sha256(encoded).digest() + encoded[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")


class Header(NamedTuple):
    """The contents of a control message; two ranks agree on a call when the packed bytes are equal.

    ``sequence``: the number of the call; in a rank's last message 1 + the lost rank, or 0 if that is unknown.
    ``pairs``: for each peer, a further text on which this rank and the peer must agree; usually ().
    """

    kind: ControlKind
    sequence: int
    text: str
    pairs: tuple[str, ...] = ()

    def pack(self, peer: int | None = None) -> bytes:
        """Pack the message to one peer, or to all, without the number of bytes that follow.

        A long text is truncated, but the digest covers the whole text.
        """
        text = self.text if peer is None or not self.pairs else self.text + self.pairs[peer]
        return _FIXED.pack(_MAGIC, _VERSION, self.kind, self.sequence) + _tail(text)

    @property
    def call_text(self) -> str:
        """The call with its number, for messages."""
        return f"{self.text} (call {self.sequence} of the group)"

    @classmethod
    def unpack(cls, message: bytes, peer: int) -> Header:
        """Unpack the header in ``message``. Raises EngineError if another version of qccl sent it."""
        magic, version, kind, sequence, _ = _LAYOUT.unpack_from(message)
        if magic != _MAGIC or version != _VERSION or kind not in ControlKind.__members__.values():
            raise EngineError(
                f"rank {peer} sent a control message that this version of qccl cannot read (starts with "
                f"{message[:8]!r}); every rank must run the same version"
            )
        return cls(ControlKind(kind), sequence, printable(text_of(message)))

    @classmethod
    def of_end(cls, kind: ControlKind, rank: int, error: BaseException) -> Header:
        """The last message of ``rank``, whose communicator ends because of ``error``."""
        told = for_others(rank, error)
        lost = told.rank + 1 if isinstance(told, PeerLost) and told.rank is not None else 0
        reason = told.reason if isinstance(told, PeerLost) else None
        return cls(kind, lost, str(told)) if reason is None else cls(kind, lost | _IS_REASON, reason)

    def end(self, peer: int, size: int) -> PeerLost:
        """The error that a last message of ``peer`` brings to the other ranks of ``size``."""
        lost = (self.sequence & ~_IS_REASON) - 1
        rank = lost if 0 <= lost < size else None
        if self.sequence & _IS_REASON or not names_rank(self.text):
            return gave_up(peer if rank is None else rank, self.text)
        return PeerLost(self.text, rank)


def text_of(header: bytes) -> str:
    """The text in the packed header of a call, which may be truncated."""
    return header[_LAYOUT.size : _AGREED_NBYTES].rstrip(b"\0").decode(errors="replace")


#: the first bytes of the header of a call
CALL = _FIXED.pack(_MAGIC, _VERSION, ControlKind.CALL, 0)[: _host.SEQUENCE_OFFSET]


def data_nbytes(nbytes: int) -> bytes:
    """Pack the last part of a control message: the number of bytes of data that follow."""
    return nbytes.to_bytes(4, "little")


def data_nbytes_of(message: bytes) -> int:
    """Read from a control message the number of bytes of data that follow."""
    return int.from_bytes(message[_AGREED_NBYTES:HEADER_NBYTES], "little")


class Block:
    """Zeroed memory; ``address`` is a multiple of 64. Freed with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = ctypes.create_string_buffer(nbytes + 64)
        base = ctypes.addressof(self._memory)
        self.address = -(-base // 64) * 64
        self._view = memoryview(self._memory).cast("B")[self.address - base :][:nbytes]

    def write(self, data: bytes, start: int = 0) -> None:
        """Put ``data`` at ``start``."""
        self._view[start : start + len(data)] = data

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from ``start``."""
        return bytes(self._view[start : start + nbytes])


def mismatch_error(mine: bytes, theirs: bytes, rank: int, peer: int) -> MismatchError:
    """The error for two headers that differ."""
    own, other = Header.unpack(mine, rank), Header.unpack(theirs, peer)
    hidden = f"; they differ after the first {_TEXT_NBYTES} bytes, which are all that a header holds"
    return MismatchError(
        f"the ranks do not agree: rank {rank} called {own.call_text}, rank {peer} called {other.call_text}"
        f"{hidden if own == other else ''}; all ranks must make the same calls in the same order"
    )
