"""The numbers of a communicator's calls, which only this object changes."""

from __future__ import annotations

__all__ = ["Numbers"]


class Numbers:
    """The numbers of a group's next call, for all to read.

    Attributes:
        sequence: the number in the group, barriers included.
        calls: the number that keys the random numbers; it does not count barriers, which change no result.
        offset: what load_state_dict() has added to ``calls``.
    """

    __slots__ = ("calls", "offset", "sequence")

    def __init__(self) -> None:
        self.sequence = self.calls = self.offset = 0

    def take(self) -> tuple[int, int]:
        """Number a call that the engine has accepted, before it sends anything. Returns ``sequence`` and ``calls``."""
        sequence, call = self.sequence, self.calls
        self.sequence, self.calls = sequence + 1, call + 1
        return sequence, call

    def go_back(self, call: int) -> None:
        """Use ``call`` for the next random numbers, after calls that have changed no result."""
        if call < self.calls:
            self.calls = call

    def go_on(self, call: int) -> None:
        """Continue with ``call`` after a restart."""
        self.offset += call - self.calls
        self.calls = call
