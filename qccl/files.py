"""Writing of files, which are complete even if the program is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["is_special", "replacing", "writing"]


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write, which replaces ``path`` when the block ends, with the owner and mode of the old file.

    Readers find either the complete old or the complete new file; an exception in the block keeps the old one. A
    symbolic link stays, and its target is replaced. Pipes, terminals and devices, such as /dev/null, are written into.
    Raises OSError if the file cannot be written, or no other file in its folder.
    """
    if is_special(path):
        with open(path, "wb") as file:
            yield file
    else:
        target = os.path.realpath(path)
        with replacing(target) as file:
            _adopt(file.fileno(), target)
            yield file


@contextlib.contextmanager
def replacing(path: str, *, mode: int = 0o666, folder: int | None = None) -> Iterator[BinaryIO]:
    """A new binary file, which gets the name ``path`` when the block ends, and is removed after an exception.

    ``mode`` is what the umask leaves of it; ``folder`` is the descriptor of the folder that ``path`` is in.
    """
    # O_EXCL and a random name: in a folder that others may write nobody can have put a link there
    place, name = os.path.split(path)
    temporary = os.path.join(place, f"{name[:50]}.{secrets.token_hex(8)}.tmp")  # also if the name is as long as allowed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether something exists there that is neither a regular file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _adopt(descriptor: int, path: str) -> None:
    """Give the new file the owner and the mode of the old one, if there is one and this user may."""
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(path)
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
