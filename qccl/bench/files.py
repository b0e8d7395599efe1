"""Writing of files, which are complete even if the program is killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from typing import Any

__all__ = ["is_special", "write_json"]


def write_json(path: str, document: Any) -> None:
    """Replace the file by ``document``; readers find either the complete old or the complete new file.

    A symbolic link stays, and its target is replaced, with the same mode. Pipes, terminals and devices, such as
    /dev/null, are written into.
    """
    text = json.dumps(document, indent=1) + "\n"
    if is_special(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        _replace(os.path.realpath(path), text)


def is_special(path: str) -> bool:
    """Whether something exists there that is neither a regular file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replace(path: str, text: str) -> None:
    # O_EXCL and a random name: in a folder that others may write nobody can have put a link there
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            _adopt(descriptor, path)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _adopt(descriptor: int, path: str) -> None:
    """Give the new file the owner and the mode of the old one, if there is one and this user may."""
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(path)
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
