"""What a transport gives: a group of ranks, and transfers of bytes between them, on the host or on CUDA streams.

On the host they are tagged and non-blocking: one method posts, one polls, and order is kept only among transfers of the
same peer *and* tag. On a device they are calls that put a group of transfers on a stream. A transport knows nothing of
codecs, schedules or the deadlines of calls; those are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from qccl._host import Wire

__all__ = ["Call", "DeviceTransfer", "DeviceTransport", "Group", "Transport", "numbered"]


def numbered(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Equal names as equal numbers, from 0 on in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class Group(Protocol):
    """The ranks, and what is needed to set things up among them.

    Attributes:
        name: of the library that carries the bytes, e.g. "mpi".
        rank, size: of this process (thread) in the group.
        local_rank, local_size: among the ranks of the same machine.
        nodes: of each rank, the number of its machine (and of the network it sees, where it has one of its own).
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]

    def split(self, color: int | None, key: int, timeout: float) -> Group | None:
        """Collective: the transport of the ranks with the same ``color``, ordered by (key, rank); None: in none."""

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Collective: every rank's ``item`` in rank order. For set-up only. Raises CollectiveTimeout, PeerLost."""

    def abort(self, reason: str) -> None:
        """Give up after a failure: withdraw what is under way, so that the process can exit; never blocks."""

    def close(self) -> None:
        """Collective where the library demands it: release the group. Idempotent.

        Where transfers are under way, because other ranks have not closed, their memory is kept.
        """


class Transport(Group, Protocol):
    """Tagged non-blocking transfers between the ranks of one group, on the host.

    Attributes:
        is_threaded: another thread may use it than the one that made it (one at a time), whatever other threads do with
            the library underneath.
        progress_hook: allgather() and split() call it while they wait, and raise its errors. The engine sets it.
        eager_nbytes: what a message may have less than the receive that it meets: as much data may go with a header.
        shares_memory: all ranks are on one machine and one network, so that no link is slower than they are.
    """

    is_threaded: bool
    progress_hook: Callable[[], object]
    eager_nbytes: int
    shares_memory: bool

    @property
    def wire(self) -> Wire | None:
        """What does send(), receive() and poll() for native code, or None: then these are called."""

    def buffer(self, address: int, nbytes: int) -> Any:
        """Prepare ``nbytes`` at ``address`` for repeated use in send() and receive(); the caller keeps it alive."""

    def send(self, peer: int, tag: int, buffer: Any, token: Hashable) -> None:
        """Start sending; ``token`` comes back from poll() when the buffer may be written again."""

    def receive(self, peer: int, tag: int, buffer: Any, token: Hashable, *, at_most: bool = False) -> None:
        """Start receiving the buffer's size, or ``at_most`` that; poll() gives ``token`` when the bytes are there.

        With ``eager_nbytes`` 0 only exactly.
        """

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Tokens completed since the last poll; never blocks longer than about a millisecond.

        ``idle`` is the number of polls in a row, before this one, that found nothing and had no other work to do: 0
        returns at once; more lets the transport yield the processor, and then nap.

        Raises MismatchError where a message has another size than was posted, PeerLost where a peer is gone,
        EngineError for other failures of the library.
        """

    def split(self, color: int | None, key: int, timeout: float) -> Transport | None: ...

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str) -> None:
        """Blocking uncompressed all-reduce of the library itself (``source == target``: in place); the yardstick."""


#: a function and its arguments: something to be put on a stream, prepared once and done in every run
Call = tuple[Callable[..., object], tuple[Any, ...]]


class DeviceTransfer(NamedTuple):
    """A transfer to or from ``peer`` of ``nbytes`` at an address on the device."""

    peer: int
    address: int
    nbytes: int


class DeviceTransport(Group, Protocol):
    """Transfers between the GPUs of one group's ranks, in the order of a stream.

    Attributes:
        device: number of this rank's GPU.
        stream: where the transport's own transfers are put; all ranks put the same on it, in the same order.
        host: transfers between the same ranks from host memory, for one engine's use; None where there are none. It
            ends with this transport.
    """

    device: int
    stream: int
    host: Transport | None

    def exchange(self, sends: Sequence[DeviceTransfer], receives: Sequence[DeviceTransfer], stream: int) -> list[Call]:
        """The calls that put transfers which belong together on ``stream``. They neither block nor allocate."""

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
        """Put an uncompressed all-reduce of the library itself on ``stream``; the yardstick."""

    def check(self) -> None:
        """Raise the error that the library has met since, in the background."""
