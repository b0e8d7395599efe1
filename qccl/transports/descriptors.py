"""The process's file descriptors: a rank needs one for each TCP connection to another rank."""

from __future__ import annotations

import os
import resource

__all__ = ["allow", "exhausted", "left", "shortage"]

#: beside one for each rank: the library's own, and those that the program opens meanwhile
_SPARE = 5
_MORE = 64
#: so few that are left mean that an attempt to open more has failed
_FEW = 4


def _open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them


def left() -> int:
    """How many more this process may open, with the soft limit raised as far as it may raise it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if hard == resource.RLIM_INFINITY else max(0, hard - _open())


def allow(ranks: int) -> None:
    """Raise the soft limit, if it is too low for the library itself and connections to so many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open() + 2 * ranks + _MORE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def shortage(ranks: int, found: int) -> str:
    """Why a process where left() has ``found`` so many cannot connect to these ranks over TCP; nothing if it can."""
    if found >= ranks + _SPARE:
        return ""
    return (
        f"EMFILE (too many open files): TCP needs {ranks + _SPARE} descriptors for {ranks} ranks, and the process may "
        f"open only {found} more; raise its hard limit (ulimit -Hn)"
    )


def exhausted() -> str:
    """That this process has no descriptor left; nothing if it has some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = _open()
    except OSError:
        used = soft  # to list them takes one
    if soft == resource.RLIM_INFINITY or used + _FEW < soft:
        return ""
    return f"EMFILE (too many open files): {used} of the {soft} descriptors that ulimit -n allows are open; raise it"
