"""The jobs that may use a relay: their keys, and how much each of them uses."""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from qccl.errors import ArgumentError
from qccl.transports.relay_protocol import job_id
from qccl.transports.secret import NBYTES, Secret, read_private
from qccl.transports.strangers import printable

__all__ = ["Job", "key_text", "read_jobs"]

_MOST_NBYTES = 1 << 20
_MOST_JOBS = 1000
#: what a job may send at once after a pause, in seconds of its rate
_BURST_SECONDS = 0.05


class Job:
    """Ranks that share a token.

    Attributes:
        key: the relay key.
        name: for messages.
        connections: that it has now, waiting or joined.
        pairs: joined pairs now.
        nbytes: forwarded so far.
    """

    def __init__(self, key: bytes, name: str = "") -> None:
        self.key = key
        self.id = job_id(key)
        self.name = name or self.id.hex()
        self.connections = self.pairs = self.nbytes = 0
        self._allowance, self._counted_at = 0.0, 0.0

    def spend(self, nbytes: int) -> None:
        """Count bytes that were forwarded."""
        self.nbytes += nbytes
        self._allowance -= nbytes

    def may_send(self, rate: float | None) -> bool:
        """Whether it has not sent more than ``rate`` allows, in bytes per second; None: any amount."""
        if rate is None:
            return True
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._counted_at) * rate, _BURST_SECONDS * rate)
        self._counted_at = now
        return self._allowance > 0


def key_text(key: bytes) -> str:
    """A relay key as a file of keys has it."""
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file with a line ``KEY [NAME]`` for each; empty lines and those that begin with # do not count.

    Raises ArgumentError for another file, and for one that other users may read or change.
    """
    source = f"--keys {str(path)!r}"
    lines = enumerate(read_private(path, source, _MOST_NBYTES).splitlines(), 1)
    return _distinct(
        (_job(line, f"{source}, line {i}") for i, line in lines if line.strip() and line[0] != "#"), source
    )


def _job(line: str, where: str) -> Job:
    text, _, name = line.strip().partition(" ")
    with contextlib.suppress(binascii.Error, ValueError):
        key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if len(key) == NBYTES:
            return Job(Secret(key), printable(name.strip(), 100))
    raise ArgumentError(f"{where} is not a relay key; qccl-relay --show-key prints one where a job's token is")


def _distinct(jobs: Iterable[Job], source: str) -> list[Job]:
    found = {job.id: job for job in jobs}
    if not 0 < len(found) <= _MOST_JOBS:
        raise ArgumentError(f"{source} has {len(found)} keys; 1 to {_MOST_JOBS} are allowed")
    return list(found.values())
