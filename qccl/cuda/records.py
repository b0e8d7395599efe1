"""The records of the CUDA engine's last calls: what the host knows of them by flags in pinned memory (flags.py).

A call is queued until its first kernel has run, and under way until its last one has. The watchdog looks at the flags
every 10 ms, so times are that much late at most. How far a call's transfers are only the GPU knows: NCCL tells nobody.
"""

from __future__ import annotations

import time
from collections import deque

from qccl.deadline import Deadline
from qccl.engine.records import CallRecord, State

__all__ = ["CallLog", "LoggedCall"]

#: as on the host (kernels/engine/recorder.h)
_CALLS = 1024


class LoggedCall:
    """One call. It refers to no memory of the run, which may be given back before."""

    __slots__ = ("_call", "_deadline", "_ended", "_sequence", "_text")

    def __init__(self, sequence: int, call: int, text: str, deadline: Deadline) -> None:
        self._sequence, self._call, self._text, self._deadline = sequence, call, text, deadline
        self._ended: float | None = None

    def end(self) -> None:
        """The call has ended well; its deadline has counted before."""
        self._ended = time.monotonic()

    def record(self) -> CallRecord:
        """What is known of it now."""
        begun = self._deadline.begun
        state: State = "ended" if self._ended is not None else "queued" if begun is None else "under way"
        return CallRecord(self._sequence, self._call, self._text, state, begun, self._ended)


class CallLog:
    """The last calls of an engine. Any thread may read it at any time, also a handler of a signal."""

    def __init__(self) -> None:
        self._calls: deque[LoggedCall] = deque(maxlen=_CALLS)

    def add(self, sequence: int, call: int, text: str, deadline: Deadline) -> LoggedCall:
        """A call, which has begun when ``deadline`` counts."""
        logged = LoggedCall(sequence, call, text, deadline)
        self._calls.append(logged)
        return logged

    def drop_last(self) -> None:
        """Forget the last call."""
        self._calls.pop()

    def records(self) -> list[CallRecord]:
        """From the oldest on."""
        return [each.record() for each in self._calls.copy()]
