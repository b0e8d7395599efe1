"""What a host transport gives the engine: tagged, non-blocking transfers of bytes between ranks.

One method posts, one polls. A transport keeps order only among transfers of the same peer *and* tag. It knows nothing
of codecs, schedules or deadlines; those are the engine's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

__all__ = ["Transport"]


class Transport(Protocol):
    """Tagged non-blocking transfers between the ranks of one group.

    Attributes:
        name: "mpi" or "loopback".
        rank, size: of this process (thread) in the group.
        local_rank, local_size: among the ranks of the same machine.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def buffer(self, address: int, nbytes: int) -> Any:
        """Prepare ``nbytes`` at ``address`` for repeated use in send() and receive(); the caller keeps it alive."""

    def send(self, peer: int, tag: int, buffer: Any, token: Hashable) -> None:
        """Start sending; ``token`` comes back from poll() when the buffer may be written again."""

    def receive(self, peer: int, tag: int, buffer: Any, token: Hashable) -> None:
        """Start receiving exactly the buffer's size; ``token`` comes back from poll() when the bytes are there."""

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Tokens completed since the last poll; never blocks longer than about a millisecond.

        ``idle`` is the number of polls in a row, before this one, that found nothing and had no other work to do: 0
        returns at once; more lets the transport yield the processor, and then nap.

        Raises MismatchError where a message has another size than was posted, PeerLost where a peer is gone,
        EngineError for other failures of the library.
        """

    def split(self, color: int | None, key: int, timeout: float) -> Transport | None:
        """Collective: the transport of the ranks with the same ``color``, ordered by (key, rank); None: in none."""

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Collective: every rank's ``item`` in rank order. For set-up only. Raises CollectiveTimeout, PeerLost."""

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str) -> None:
        """Blocking uncompressed all-reduce of the library itself (``source == target``: in place); the yardstick."""

    def abort(self, reason: str) -> None:
        """Give up after a failure: withdraw what is posted, so that the process can exit; never blocks."""

    def close(self) -> None:
        """Collective where the library demands it: release the group. Idempotent."""
