"""What labs make on the machine, by its names, and its removal: also of labs whose process was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from qccl.bench.claims import Claim
from qccl.bench.namespaces import NAMESPACES
from qccl.bench.tools import run

__all__ = ["FILES", "IDS", "prefix", "remove", "remove_stale"]

#: ``ip netns exec NAME`` mounts the files of the folder NAME here over those of /etc
FILES = Path("/etc/netns")
_OWNED = re.compile(r"(?:qccl-|qcclb|qv)(\d+)(?:[-.](?:\d+|switch))?")
#: process ids are less; further labs of the same id, in other PID namespaces or in one process, add multiples of it
IDS = 10_000_000


def remove_stale() -> None:
    """Remove the labs of processes that no longer exist (killed by SIGKILL, or out of memory)."""
    for number in set(_numbers()):
        if not _is_alive(number % IDS):
            with contextlib.suppress(OSError):  # FileExistsError: its process lives in another PID namespace
                claim = Claim(number)
                remove(number)
                claim.release()


def prefix(number: int) -> str:
    """How the names of a lab's namespaces begin."""
    return f"qccl-{number}-"


def _numbers() -> Iterator[int]:
    """The labs' numbers in the names of every interface, namespace and folder that a lab made."""
    names = os.listdir("/sys/class/net")
    for folder in (NAMESPACES, FILES):
        names += os.listdir(folder) if folder.is_dir() else []
    for name in names:
        if match := _OWNED.fullmatch(name):
            yield int(match[1])


def remove(number: int) -> None:
    """Remove what a lab has made, and kill the processes in it."""
    for name in os.listdir("/sys/class/net"):
        if (match := _OWNED.fullmatch(name)) and int(match[1]) == number:
            run("ip", "link", "del", name, check=False)  # deletes both ends of the pair
    for path in NAMESPACES.glob(f"{prefix(number)}*"):
        for process in run("ip", "netns", "pids", path.name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "del", path.name, check=False)
    for path in FILES.glob(f"{prefix(number)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
