"""Claims on a lab's number, which the lab's process holds as long as it lives.

A process id says nothing to a process in another PID namespace, such as another container: to that one every lab would
seem to be left over. A claim is seen there: it is a socket with an abstract name, seen wherever the lab's interfaces
are, and a lock on a file in /run, seen wherever the names of its namespaces are. The kernel ends both with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

__all__ = ["Claim"]

_FOLDER = Path("/run/qccl")


class Claim:
    """The claim on ``number``. Raises FileExistsError if another lab has it, and OSError if it cannot be made."""

    def __init__(self, number: int) -> None:
        self._path = _FOLDER / f"lab-{number}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._file = -1
        try:
            self._socket.bind(f"\0qccl-lab-{number}")
            _FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._file = self._locked()
        except OSError as error:
            self._close()
            if error.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                raise FileExistsError(f"another lab has the number {number}") from error
            raise

    def _locked(self) -> int:
        """The file, locked; its owner removes it when it ends, so what was opened may be gone."""
        while True:
            file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file), os.stat(self._path)):
                        return file
            except OSError:
                os.close(file)
                raise
            os.close(file)

    def release(self) -> None:
        """Let others have the number. Idempotent."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        self._socket.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
