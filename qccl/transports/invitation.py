"""Which ranks of a machine can share memory: found out by a proof, not by the machine's name.

Each rank keeps a file without a name in /dev/shm, which has the address of its wire for shared memory. It tells the
others its process, the file's descriptor, and a checksum of the content: an Invitation. A rank that can read that file
has what shared memory needs: the same machine, user, /dev/shm and namespace of processes. Nobody else gets the address.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from typing import NamedTuple

from qccl.transports.topology import memory_id, network_id

__all__ = ["Invitation", "invite", "machine"]

_SHARED = "/dev/shm"
#: random bytes before the content of a file, which so cannot be guessed
_SALT_NBYTES = 16
_MOST_NBYTES = 1 << 16
_TEXT = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,10}) ([0-9a-f]{32})")


def machine() -> str:
    """Equal for processes that may be able to share memory; empty: unknown.

    Network namespaces of one machine count as machines, as they do in a communicator's ``nodes``.
    """
    network, memory = network_id(), memory_id()
    return _digest(f"{network} {memory} {os.geteuid()}".encode()) if network and memory else ""


class Invitation(NamedTuple):
    """Where the ranks of a machine find a rank's file.

    Attributes:
        machine: as machine() says.
        process, descriptor: that have the file open.
        checksum: of its content.
    """

    machine: str
    process: int
    descriptor: int
    checksum: str

    def text(self) -> bytes:
        """For the other ranks."""
        return " ".join(map(str, self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> Invitation | None:
        """The reverse of text(); None for anything else."""
        found = _TEXT.fullmatch(text)
        return cls(found[1].decode(), int(found[2]), int(found[3]), found[4].decode()) if found else None

    def content(self) -> bytes:
        """What the rank has written; empty: this process cannot read it, or finds something else."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        try:
            if not _is_shared(os.stat(path)):  # opening a device might do something
                return b""
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = file.read(_MOST_NBYTES) if _is_shared(os.fstat(descriptor)) else b""
        except OSError:
            return b""
        return found[_SALT_NBYTES:] if hmac.compare_digest(_digest(found), self.checksum) else b""


def invite(content: bytes) -> tuple[Invitation, int] | None:
    """An invitation, and the descriptor that stays open until the others have read; None: memory cannot be shared."""
    own, salted = machine(), os.urandom(_SALT_NBYTES) + content
    try:
        descriptor = os.open(_SHARED, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600) if own else -1
    except OSError:
        return None
    if descriptor < 0:
        return None
    os.write(descriptor, salted)
    return Invitation(own, os.getpid(), descriptor, _digest(salted)), descriptor


def _is_shared(found: os.stat_result) -> bool:
    """Whether it is a file of this user, without a name, in this machine's shared memory."""
    is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_size <= _MOST_NBYTES
    return is_file and found.st_uid == os.geteuid() and found.st_dev == os.stat(_SHARED).st_dev


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16, person=b"qccl memory").hexdigest()
