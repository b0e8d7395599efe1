"""The interface of transports: a group of ranks, and transfers of bytes between them, on the host or on CUDA streams.

On the host, transfers are tagged and do not block: send() and receive() start them, poll() reports which have ended.
Only transfers with the same peer and the same tag keep their order. On a device, exchange() returns calls that put a
group of transfers on a stream. A transport knows nothing of codecs, schedules, or the deadlines of calls.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from qccl.base.errors import CollectiveTimeout, EngineError, MismatchError, PeerLost, is_own, names_rank, own, with_text

if TYPE_CHECKING:
    from qccl._host import Wire

__all__ = ["ApiCall", "DeviceTransfer", "DeviceTransport", "Group", "Transport", "renumbered", "split_groups"]


class Group(ABC):
    """The ranks of a group, and the collective operations that set-up needs.

    Attributes:
        name: the library that carries the bytes, e.g. "mpi".
        rank, size: number of this process (or thread) in the group, and number of all.
        local_rank, local_size: the same among the ranks of this machine.
        nodes: for each rank, the number of its machine. Network namespaces on one machine count as machines.
        is_threaded: any thread may use the group (one at a time), whatever other threads do with the library below.
        can_regroup: the ranks that are left after a loss can make another group.
        halves: for each rank, the number of the half of its machine that is its node in a hierarchical all-reduce by
            default; empty: the machines are the nodes.
        hardware: on CUDA, the GPUs of all ranks and the version of NCCL; empty on the host.
        engine: the engine that uses this transport; None: no engine does yet.
        made: the transport of the latest group that split() or regroup() made, or is making.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]
    halves: tuple[int, ...] = ()
    is_threaded: bool = True
    can_regroup: bool = False
    hardware: str = ""
    engine: Any = None
    made: Group | None = None
    _gone = False  # closed or aborted, by an engine or by the program

    def _check_alive(self) -> None:
        if self._gone:
            raise EngineError("this transport was closed or aborted; make another communicator")

    @property
    def carrier(self) -> str:
        """The carrier of the messages, in words."""
        return self.name

    @abstractmethod
    def split(self, color: int | None, key: int, timeout: float) -> Group | None:
        """Collective: a transport of the ranks with the same ``color``, ordered by (key, rank); None for color None."""

    @abstractmethod
    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Collective, for set-up: every rank's ``item``, in rank order. Raises CollectiveTimeout and PeerLost."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """After a failure: cancel the transfers under way, so that the process can exit. Blocks for 0.1 s at most."""

    @abstractmethod
    def close(self) -> None:
        """Release the group; collective if the library demands it. Idempotent.

        Keeps the memory of transfers that are still under way because other ranks have not closed.
        """

    # -- for groups that change: a library without this keeps these methods, which raise EngineError -----------------

    @property
    def address(self) -> str:
        """The text by which new processes find this rank, such as "host:port"."""
        raise self.impossible("address")

    def waiting(self) -> int:
        """Number of the processes that wait to join at this rank."""
        raise self.impossible("grow()")

    def regroup(self, calls: int, timeout: float, *, grows: bool) -> tuple[Transport, int]:
        """Collective among the ranks that are left: make their new transport; also returns their largest ``calls``.

        With ``grows``, processes that wait join the group, behind the others. This transport is useless afterwards.
        Until the ranks have agreed, it delivers this rank's messages, because others may still be in the last call.
        Raises PeerLost if the others go on without this rank, CollectiveTimeout, EngineError.
        """
        raise self.impossible("grow()" if grows else "shrink()")

    def impossible(self, what: str) -> EngineError:
        """The error of a method of Communicator that needs another library."""
        return EngineError(
            f"{what} is not possible over {self.name}; use UCX: install qccl[ucx], and start the program without "
            f"MPI or set QCCL_TRANSPORT=ucx (between sites: QCCL_TRANSPORT=wan)"
        )


_COLOR_AND_KEY = struct.Struct("<?qq")


def split_groups(group: Group, color: int | None, key: int, timeout: float) -> dict[int, list[int]]:
    """Collective: for each color the ranks that gave it to split(), in the order of their new ranks."""
    mine = _COLOR_AND_KEY.pack(color is not None, color or 0, key)
    entries = map(_COLOR_AND_KEY.unpack, group.allgather(mine, timeout))
    found: dict[int, list[int]] = {}
    for _, rank, other in sorted((k, r, c) for r, (has_color, c, k) in enumerate(entries) if has_color):
        found.setdefault(other, []).append(rank)
    return found


@contextmanager
def renumbered(maker: Group, ranks: Sequence[int | None]) -> Iterator[None]:
    """Let errors of a group that ``maker`` makes number ranks as ``maker`` does, whose failure they become.

    ``ranks``: for each rank of the new group its number in ``maker``, None if it joins. Errors of ``maker`` itself,
    which the progress hook raises, stay as they are, and so do errors that name no rank.
    """
    try:
        yield
    except (PeerLost, MismatchError, CollectiveTimeout, EngineError) as error:
        is_makers = maker.engine is not None and error is maker.engine.end.failure
        if is_makers or not names_rank(str(error)) or list(ranks) == list(range(maker.size)):
            raise
        lost = error.rank if isinstance(error, PeerLost) else None
        named = enumerate(ranks) if lost is None else [(lost, ranks[lost])]
        numbers = ", ".join(f"rank {new} {'joins' if old is None else f'is rank {old} here'}" for new, old in named)
        made = with_text(error, f"in a new group, whose {numbers}: {error}")
        if isinstance(made, PeerLost) and lost is not None:
            made.rank = ranks[lost]
        raise (own(made) if is_own(error) else made) from error


class Transport(Group):
    """Tagged non-blocking transfers between the ranks of one group, on the host.

    Attributes:
        progress_hook: allgather() and split() call it while they wait, and raise its errors. The engine sets it.
        eager_nbytes: bytes by which a message may be shorter than its receive; the most data behind a header.
        shares_memory: all ranks are on one machine and in one network namespace, so no link is slower than they are.
        is_between_sites: the ranks may be far from each other, and packets may be lost.
        sends_ahead: the ranks for which this transport limits the messages that it keeps until they make a call. To
            these ranks a call may send everything before it has their headers, to others only one window of messages.
        wire: send, receive and poll in native code; None: the run loop calls the methods of this class.
    """

    progress_hook: Callable[[], object]
    eager_nbytes: int = 0
    shares_memory: bool = False
    is_between_sites: bool = False
    sends_ahead: Sequence[int] = ()
    wire: Wire | None = None

    @abstractmethod
    def send(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable) -> None:
        """Start sending; poll() returns ``token`` when the memory may be written again. The caller keeps it alive."""

    @abstractmethod
    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable, *, arrived: int = 0) -> None:
        """Start receiving ``nbytes``; poll() returns ``token`` when the bytes have arrived.

        With ``arrived``, the address of 8 bytes, the message may be shorter, and its size is written there before
        poll() returns the token. A transport with ``eager_nbytes`` 0 may ignore ``arrived``: every message then has
        exactly ``nbytes``.
        """

    @abstractmethod
    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Tokens of the transfers that have ended since the last poll. Blocks for a millisecond at most.

        ``idle`` is the number of preceding polls in a row that found nothing. With 0 it returns at once; with more it
        may yield the processor, and then nap.

        Raises MismatchError if a message has another size than its receive, PeerLost if a peer is gone, EngineError for
        other failures of the library.
        """

    @abstractmethod
    def split(self, color: int | None, key: int, timeout: float) -> Transport | None:
        """Collective: as in Group, with a transport for host memory."""


#: a function and its arguments, prepared once; each run calls it to put work on a stream
ApiCall = tuple[Callable[..., object], tuple[Any, ...]]


class DeviceTransfer(NamedTuple):
    """A transfer to or from ``peer`` of ``nbytes`` at an address on the device."""

    peer: int
    address: int
    nbytes: int


class DeviceTransport(Group):
    """Transfers between the GPUs of one group's ranks, in the order of a stream.

    Attributes:
        device: number of this rank's GPU.
        stream: the stream of transfers; all ranks put the same transfers on it, in the same order.
        link: the slowest link between two ranks, a key of qccl.collectives.chunks.GPU; the same on all ranks.
        host: a transport between the same ranks for host memory, which one engine may use, or None. It ends with this
            transport.
    """

    device: int
    stream: int
    link: str = "PCIe"
    host: Transport | None

    @abstractmethod
    def exchange(
        self, sends: Sequence[DeviceTransfer], receives: Sequence[DeviceTransfer], stream: int
    ) -> list[ApiCall]:
        """The calls that put one group of transfers on ``stream``. They neither block nor allocate."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error that the library has found asynchronously, if any."""
