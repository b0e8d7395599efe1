"""Records of calls: what each of a rank's last calls was, when it began and ended, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CallRecord", "State", "TransferRecord"]

#: of a call; a queued one waits for other calls of its rank
State = Literal["ended", "under way", "queued"]


@dataclass(frozen=True)
class TransferRecord:
    """A send or receive that has begun and not completed.

    Attributes:
        is_send: or a receive.
        peer: the other rank.
        nbytes: of data.
        since: its begin in time.monotonic() seconds, early by one operation of its rank at most.
    """

    is_send: bool
    peer: int
    nbytes: int
    since: float


@dataclass(frozen=True)
class CallRecord:
    """One call of a group.

    Attributes:
        sequence: number in the group, barriers included.
        call: number that keys its random numbers.
        text: the call with its arguments, as the ranks compare it.
        state: one of State.
        begun, ended: in time.monotonic() seconds; None where it has not. The end is some milliseconds early at most.
        send_nbytes, receive_nbytes: bytes of encoded data that this rank sends and receives in all.
        sent_nbytes, received_nbytes: how many of these have completed.
        still: seconds of the longest time in which this rank did not advance the call, if it was not short: its process
            was stopped, or an operation, a handler of signals or what it did beside the call took so long.
        missing: the ranks that have not made the call, as far as this rank has heard.
        computes: an operation of this rank is ready or runs.
        transfers: those under way.
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
