"""Records of a rank's last calls: their arguments, when they began and ended, and why they wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CallRecord", "State", "TransferRecord"]

#: the state of a call; a queued call waits for other calls of its rank
State = Literal["ended", "under way", "queued"]


@dataclass(frozen=True)
class TransferRecord:
    """A send or receive that has begun and not completed.

    Attributes:
        is_send: whether it is a send.
        peer: the other rank.
        nbytes: bytes of data.
        since: its beginning in time.monotonic() seconds, too early by at most one operation of its rank.
    """

    is_send: bool
    peer: int
    nbytes: int
    since: float


@dataclass(frozen=True)
class CallRecord:
    """One call of a group.

    Attributes:
        sequence: number of the call in the group, barriers included.
        call: the number that keys the call's random numbers.
        text: the call with its arguments, as the ranks compare it.
        state: one of State.
        begun, ended: in time.monotonic() seconds; None before. The end is at most some milliseconds too early.
        send_nbytes, receive_nbytes: bytes of encoded data that this rank sends and receives in all.
        sent_nbytes, received_nbytes: the part of these bytes whose transfers have completed.
        still: the longest time in seconds in which this rank did not advance the call, unless it was short. The process
            was stopped, or spent the time in an operation, a signal handler, or outside the call.
        missing: the ranks from which this rank has no header of the call.
        computes: whether an operation of this rank is ready or runs.
        transfers: the transfers under way.
    """

    sequence: int
    call: int
    text: str
    state: State
    begun: float | None
    ended: float | None = None
    send_nbytes: int = 0
    receive_nbytes: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    still: float = 0.0
    missing: tuple[int, ...] = ()
    computes: bool = False
    transfers: tuple[TransferRecord, ...] = ()
