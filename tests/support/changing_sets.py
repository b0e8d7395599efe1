"""Weak sets that change while they are read, as another thread may change them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

#: enough for two attempts to read a set, each of which the second change ends
_CHANGES = 4


@contextlib.contextmanager
def changed_while_read(change: Callable[[], object]) -> Iterator[None]:
    """Inside, ``change`` is called each time that this thread begins or continues to read a WeakSet, at first."""
    reader, left, before = weakref.WeakSet.__iter__.__code__, [change] * _CHANGES, sys.getprofile()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is reader and left:
            left.pop()()

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert not left
