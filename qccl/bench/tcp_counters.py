"""What TCP counts for a connection: packets sent, and packets that were lost (Linux's TCP_INFO)."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

__all__ = ["Counters", "abort", "counters", "limit_rate", "set_congestion"]

#: of struct tcp_info in linux/tcp.h: bytes before each counter, all of 32 bits
_TOTAL_RETRANS, _DATA_SEGS_OUT, _DSACK_DUPS = 100, 156, 216
_LONGEST = 512
#: of asm-generic/socket.h, which Python does not have
_SO_MAX_PACING_RATE = 47
_MOST = 2**32 - 2


class Counters(NamedTuple):
    """Packets with data that one side has sent, and those among them that had to be sent again."""

    sent: int = 0
    lost: int = 0

    def __add__(self, other: object) -> Counters:
        """The sums."""
        if not isinstance(other, Counters):
            return NotImplemented
        return Counters(self.sent + other.sent, self.lost + other.lost)


def counters(connection: socket.socket) -> Counters | None:
    """Those of a connection; None on systems that do not tell them.

    Packets that were sent again although the first one had arrived are not counted as lost.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LONGEST)
    except OSError:
        return None
    sent, again = _number(info, _DATA_SEGS_OUT), _number(info, _TOTAL_RETRANS)
    return Counters(sent, max(0, again - _number(info, _DSACK_DUPS))) if sent else None


def _number(info: bytes, offset: int) -> int:
    """0 where an older kernel has less."""
    return int(struct.unpack_from("=I", info, offset)[0]) if offset + 4 <= len(info) else 0


def set_congestion(connection: socket.socket, name: str) -> None:
    """Let a connection use this congestion control, if the kernel permits it."""
    if name and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def limit_rate(connection: socket.socket, rate: float) -> None:
    """Let a connection send at most so many bytes per second, if the system has that."""
    if hasattr(socket, "TCP_INFO"):  # Linux
        with contextlib.suppress(OSError):
            connection.setsockopt(
                socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", max(1, min(_MOST, int(rate))))
            )


def abort(connection: socket.socket) -> None:
    """Close a connection without sending what it still holds."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
