"""The name of this machine as a text that can be sent, written and compared."""

from __future__ import annotations

import os
import socket

__all__ = ["machine_name"]


def machine_name() -> str:
    """The machine's name; bytes that are not UTF-8 are escaped."""
    return os.fsencode(socket.gethostname()).decode(errors="backslashreplace")
