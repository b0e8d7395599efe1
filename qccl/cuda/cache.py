"""Compiled kernels on disk, so that a process need not compile the kernels of an earlier one.

A file holds one kernel. Its name is a digest of everything that the compiler's output depends on: source, options, GPU,
versions. A file gets its name only when it is complete, and is checked when it is read; a damaged file counts as
missing. Errors of the disk are ignored: the kernels are then compiled.

The files are in QCCL_CACHE_DIR (if it is empty, nothing is kept), or else in ``qccl`` in XDG_CACHE_HOME or
``~/.cache``. They may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["compiled", "folder"]


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


def compiled(inputs: Iterable[str], make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
    """A kernel's binary and its mangled name: read from the file of these inputs, or made by ``make`` and written."""
    place = folder()
    if place is None:
        return make()
    digest = hashlib.sha256(json.dumps(list(inputs)).encode()).hexdigest()
    path = place / f"{digest}.kernel"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, *found)
    return found


def _read(path: Path) -> tuple[bytes, str] | None:
    try:
        head, _, binary = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if header["sha256"] == hashlib.sha256(binary).hexdigest():
            return binary, str(header["name"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path, binary: bytes, name: str) -> None:
    head = json.dumps({"name": name, "sha256": hashlib.sha256(binary).hexdigest()})
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head.encode() + b"\n" + binary)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
