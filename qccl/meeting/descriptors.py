"""The process's file descriptors (one for each TCP connection), and errors of the system as EngineError."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qccl.base.errors import EngineError, QcclError, own

__all__ = ["allow", "exhausted", "left", "or_engine_error", "shortage"]

#: descriptors beside the connections: the library's own, and some for the program
_SPARE = 5
_MORE = 64
#: at most this many left descriptors mean that opening more has failed
_FEW = 4


def _open() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the descriptor that lists them
    except OSError:  # no descriptor is left to list them
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def left() -> int:
    """How many more descriptors this process may open, if it raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if hard == resource.RLIM_INFINITY else max(0, hard - _open())


def allow(ranks: int) -> None:
    """Raise the soft limit if it is too low for the library itself and connections to this many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open() + 2 * ranks + _MORE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def shortage(ranks: int, found: int) -> str:
    """Why a process with ``found`` descriptors left cannot connect to these ranks over TCP; empty if it can."""
    if found >= ranks + _SPARE:
        return ""
    return (
        f"EMFILE (too many open files): TCP needs {ranks + _SPARE} descriptors for {ranks} ranks, and the process may "
        f"open only {found} more; raise its hard limit (ulimit -Hn)"
    )


def exhausted(few: int = _FEW) -> str:
    """A sentence that says how few descriptors are left; empty if there are more than ``few``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open()
    if soft == resource.RLIM_INFINITY or used + few < soft:
        return ""
    return f"EMFILE (too many open files): {used} of the {soft} descriptors that ulimit -n allows are open; raise it"


@contextmanager
def or_engine_error(what: str) -> Iterator[None]:
    """Raise EngineError, which begins with ``what``, if the system refuses a descriptor, a thread or an address."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QcclError | TimeoutError):  # TimeoutError comes from a deadline, perhaps the program's own
            raise
        raise own(EngineError(f"{what}: {error}{_remedy(error.errno)}", code=error.errno)) from error


def _remedy(number: int | None) -> str:
    """Advice about an error of the system; empty if the error's text says enough."""
    if number == errno.EMFILE:
        return f"; {exhausted(sys.maxsize)}"  # the limit itself, although closing may have made room meanwhile
    if number == errno.ENFILE:
        return "; the machine has no descriptor left: end other programs, or raise fs.file-max"
    if number == errno.EAGAIN:
        return "; allow the process more threads: see ulimit -u, and pids.max of its container"
    return ""
