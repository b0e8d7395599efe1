"""Conversion of data from files to types, by msgspec."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["converted"]

_lock = threading.Lock()


def converted(given: Any, kind: Any) -> Any:
    """Convert parsed JSON to a type. Raises msgspec.ValidationError, a ValueError, if it does not fit.

    One thread at a time: msgspec 0.22 describes a type when it first converts to it, and a second thread that finds the
    description half made ends the process with a segmentation fault.
    """
    import msgspec  # here: a program that reads no such files, such as scripts/gpu-check, does not need it

    with _lock:
        return msgspec.convert(given, kind)
