"""Strangers, callers that are not ranks: port scanners, programs that use the same port by mistake, other jobs' ranks.

They are dropped, and the log says so once per cause. callers.py bounds what they may send, messages.py and
meeting_messages.py say which messages are valid. Text that came over the network is printed without its control
characters, which a terminal would obey.
"""

from __future__ import annotations

import logging

__all__ = ["NotARank", "printable", "report"]

_log = logging.getLogger("qccl")
#: the causes logged so far: texts of this program, never of a stranger, so the set stays small
_reported: set[str] = set()


class NotARank(ConnectionError):
    """The other side sent a message that no rank sends, or that no rank sends at this moment; the text says which."""


def report(cause: str) -> None:
    """Log that a caller was dropped, once per ``cause`` in this process."""
    if cause not in _reported:
        _reported.add(cause)
        _log.warning("dropped a connection that is not of a rank: %s (further ones are not reported)", cause)


def printable(text: str | bytes, most: int = 1000) -> str:
    """Text from the network, cut after ``most`` characters, with unprintable characters escaped."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
