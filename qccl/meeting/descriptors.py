"""The process's file descriptors, one for each TCP connection to another rank, and what else the system may refuse."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qccl.base.errors import EngineError, QcclError, own

__all__ = ["allow", "exhausted", "left", "or_engine_error", "shortage"]

#: beside one for each rank: the library's own, and those that the program opens meanwhile
_SPARE = 5
_MORE = 64
#: so few that are left mean that an attempt to open more has failed
_FEW = 4


def _open() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:  # there is none for that one
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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


def exhausted(few: int = _FEW) -> str:
    """A sentence that at most ``few`` descriptors are left; empty if there are more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open()
    if soft == resource.RLIM_INFINITY or used + few < soft:
        return ""
    return f"EMFILE (too many open files): {used} of the {soft} descriptors that ulimit -n allows are open; raise it"


@contextmanager
def or_engine_error(what: str) -> Iterator[None]:
    """Raise EngineError, which begins with ``what``, where the system refuses a descriptor, a thread or an address."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QcclError | TimeoutError):  # of a deadline, perhaps the program's own
            raise
        raise own(EngineError(f"{what}: {error}{_remedy(error.errno)}", code=error.errno)) from error


def _remedy(number: int | None) -> str:
    """Advice about an error of the system; empty if the error's text says enough."""
    if number == errno.EMFILE:
        return f"; {exhausted(sys.maxsize)}"  # also where closing has made room meanwhile
    if number == errno.ENFILE:
        return "; the machine has no descriptor left: end other programs, or raise fs.file-max"
    if number == errno.EAGAIN:
        return "; allow the process more threads: see ulimit -u, and pids.max of its container"
    return ""
