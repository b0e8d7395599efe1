"""Network namespaces and other things that labs make, found by their names and removed, also after SIGKILL.

A lab's number is in all its names. It is the id of its process; further labs of the same id add multiples of ``_IDS``.
The process also holds an abstract socket with that number in its name. The socket is visible wherever the lab's
interfaces are, also in another container, where the process id is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
from pathlib import Path

from qccl.bench.lab.namespaces import NAMESPACES, LabError, run

__all__ = ["FILES", "claim", "prefix", "remove", "remove_stale"]

#: ``ip netns exec NAME`` mounts the files of the folder NAME here over those of /etc
FILES = Path("/etc/netns")
_INTERFACES = Path("/sys/class/net")
_OWNED = re.compile(r"(?:qccl-|qcclb|qv)(\d+)(?:[-.](?:\d+|line))?")
_IDS = 10_000_000


def claim() -> tuple[int, socket.socket]:
    """Take a number that no other lab has, and remove its last lab's remains. Returns it and its socket."""
    for number in range(os.getpid(), 9 * _IDS, _IDS):
        if held := _hold(number):
            remove(number)
            return number, held
    raise LabError("too many labs have this process's id; end some of them")


def _hold(number: int) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0qccl-lab-{number}")
    except OSError:
        held.close()
        return None
    return held


def prefix(number: int) -> str:
    """The begin of the names of a lab's namespaces."""
    return f"qccl-{number}-"


def remove_stale() -> None:
    """Remove the labs of processes that no longer exist (killed by SIGKILL, or out of memory)."""
    names = [name for folder in (_INTERFACES, NAMESPACES, FILES) if folder.is_dir() for name in os.listdir(folder)]
    for number in {int(match[1]) for match in map(_OWNED.fullmatch, names) if match}:
        if not Path(f"/proc/{number % _IDS}").exists() and (held := _hold(number)):
            with held:
                remove(number)


def remove(number: int) -> None:
    """Remove a lab's interfaces, namespaces and files, and kill the processes in it."""
    for name in os.listdir(_INTERFACES):
        if (match := _OWNED.fullmatch(name)) and int(match[1]) == number:
            run("ip", "link", "del", name, check=False)  # deletes both ends of the pair
    for path in NAMESPACES.glob(f"{prefix(number)}*"):
        for process in run("ip", "netns", "pids", path.name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "del", path.name, check=False)
    for path in FILES.glob(f"{prefix(number)}*"):
        shutil.rmtree(path, ignore_errors=True)
