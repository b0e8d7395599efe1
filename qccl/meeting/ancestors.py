"""The ancestors of this process, and the environments with which they were started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "ancestors", "lineage"]


class Process(NamedTuple):
    """A process of this machine; ``begin`` is its start in clock ticks since the machine was started."""

    pid: int
    name: str
    begin: str


def ancestors() -> Iterator[Process]:
    """The parent of this process, its parent, and so on, as far as this process may see them."""
    pid = os.getppid()
    while pid > 0:
        name, parent, begin = _stat(pid)
        yield Process(pid, name, begin)
        pid = parent


def lineage() -> list[dict[str, str]]:
    """The environments with which this process, its parent and so on were started; empty if secret."""
    return [_environment(pid) for pid in (os.getpid(), *(each.pid for each in ancestors()))]


def _stat(pid: int) -> tuple[str, int, str]:
    """Name, parent and begin of a process."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        return head.partition("(")[2], int(fields[1]), fields[19]
    except (OSError, IndexError, ValueError):
        return "", 0, ""


def _environment(pid: int) -> dict[str, str]:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(each).partition("=") for each in found.split(b"\0"))
    return {name: value for name, _, value in pairs}
