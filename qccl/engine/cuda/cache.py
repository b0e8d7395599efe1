"""Compiled kernels on disk, so that a process need not compile the kernels of an earlier one.

A file holds one kernel. Its name is a digest of everything that the compiler's output depends on: source, options, GPU,
versions. A file gets its name only when it is complete, and is checked when it is read. A damaged file counts as
missing, and so does a file that a user other than this one and root could have written, because its code would run
with this user's rights. A folder that others can write is not used, with a warning. After an error of the disk the
kernels are compiled.

The files are in QCCL_CACHE_DIR (if it is empty, nothing is kept), or else in ``qccl`` in XDG_CACHE_HOME or
``~/.cache``. They may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qccl.base.files import reading, replacing

__all__ = ["folder", "load_or_make"]

#: the most bytes of a file that is read: ten times the largest kernel
_MOST_NBYTES = 64 << 20


def folder() -> Path | None:
    """The folder of the files; None if none are kept."""
    chosen = os.environ.get("QCCL_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "qccl"
    except RuntimeError:  # this user has no home folder
        return None


def load_or_make(inputs: Iterable[str], make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
    """Read a kernel's binary and its mangled name from the file of these inputs, or make and write them."""
    digest = hashlib.sha256(json.dumps(list(inputs)).encode()).hexdigest()
    with _opened(folder()) as place:
        found = None if place is None else _read(place, digest)
        if found is None:
            found = make()
            if place is not None:
                _write(place, digest, *found)
    return found


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[int | None]:
    """Open the folder, or make it. Yields its descriptor, or None if the folder cannot be used."""
    place = None
    if path is not None:
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if place is not None and not _is_ours(place):
            warnings.warn(
                f"qccl keeps no compiled kernels: other users can write {path}; change its owner or mode, or set "
                f"QCCL_CACHE_DIR to a folder of your own, or to nothing",
                RuntimeWarning,
                stacklevel=4,
            )
            yield None
        else:
            yield place
    finally:
        if place is not None:
            os.close(place)


def _is_ours(descriptor: int) -> bool:
    """Whether only this user and root can write it."""
    status = os.fstat(descriptor)
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(digest: str, binary: bytes, name: str) -> str:
    return hashlib.sha256(json.dumps([digest, name]).encode() + binary).hexdigest()


def _read(place: int, digest: str) -> tuple[bytes, str] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with reading(_name(digest), _MOST_NBYTES, folder=place, follow=False) as file:
            if not _is_ours(file.fileno()):
                return None
            head, _, binary = file.read().partition(b"\n")
        header = json.loads(head)
        if header["sha256"] == _checksum(digest, binary, str(header["name"])):
            return binary, str(header["name"])
    return None


def _write(place: int, digest: str, binary: bytes, name: str) -> None:
    head = json.dumps({"name": name, "sha256": _checksum(digest, binary, name)})
    with contextlib.suppress(OSError), replacing(_name(digest), mode=0o600, folder=place) as file:
        file.write(head.encode() + b"\n" + binary)


def _name(digest: str) -> str:
    return f"{digest}.kernel"
