"""Ranks that are threads of one process: for tests, notebooks and the first example.

A send completes only when the matching receive has taken its bytes (MPI's rendezvous protocol). So a schedule that
relies on buffering inside the library deadlocks here instead of on a cluster. One lock guards the whole group, also
while bytes are copied: this transport is not made for speed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, MismatchError, gave_up
from qccl.transports.base import Transport

__all__ = ["LoopbackGroup", "LoopbackTransport"]

_NAP_SECONDS = 1e-3
#: most bytes of the pending messages of an aborting rank that are still delivered: control messages are smaller
_CONTROL_NBYTES = 4096

_Key = tuple[int, int, int]  # (sender, receiver, tag)


@dataclass(slots=True)
class _Transfer:
    """A posted send or receive; ``kept`` holds the bytes of a sender that has left, ``arrived``: see receive()."""

    address: int
    nbytes: int
    token: Hashable
    kept: Any = None
    arrived: int = 0


@dataclass(slots=True)
class _Gather:
    """One collective call for set-up: the item of each rank, and groups that the first rank made of the items."""

    items: dict[int, Any] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)
    leavers: int = 0


class LoopbackGroup:
    """The state that ``size`` ranks share; each thread uses its ``transport(rank)``."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ArgumentError(f"a group needs at least 1 rank, not {size}")
        self.size = size
        self.failure: tuple[int, str] | None = None  # the rank that gave up, and why
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(size)]
        self.completed: list[list[Hashable]] = [[] for _ in range(size)]
        self.faults: list[MismatchError | None] = [None] * size
        self._sends: dict[_Key, deque[_Transfer]] = {}
        self._receives: dict[_Key, deque[_Transfer]] = {}
        self._gathers: dict[int, _Gather] = {}
        self._calls = [0] * size

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of one rank."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} is not one of the {self.size} ranks of this group (0 to {self.size - 1})")
        return LoopbackTransport(self, rank)

    def post(self, key: _Key, transfer: _Transfer, *, is_send: bool) -> None:
        """Match ``transfer`` with the oldest one of the other side, or queue it."""
        mine, theirs = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        with self.lock:
            waiting = theirs.get(key)
            if not waiting:
                mine.setdefault(key, deque()).append(transfer)
                return
            other = waiting.popleft()
            if not waiting:
                del theirs[key]
            self._copy(key, *((transfer, other) if is_send else (other, transfer)))

    def _copy(self, key: _Key, source: _Transfer, target: _Transfer) -> None:
        sender, receiver, tag = key
        if source.nbytes == target.nbytes or (target.arrived and source.nbytes < target.nbytes):
            ctypes.memmove(target.address, source.address, source.nbytes)
            if target.arrived:
                ctypes.c_size_t.from_address(target.arrived).value = source.nbytes
            self.completed[receiver].append(target.token)
        else:
            sizes = f"{source.nbytes} bytes to rank {receiver}, which expected {target.nbytes}"
            self.faults[receiver] = MismatchError(f"rank {sender} sent {sizes} (tag {tag})")
        if source.kept is None:
            self.completed[sender].append(source.token)
            self.wake[sender].notify_all()
        self.wake[receiver].notify_all()

    def withdraw(self, rank: int, reason: str | None) -> None:
        """Remove all transfers of ``rank``, so that its memory may be freed; with a ``reason`` the group has failed."""
        with self.lock:
            for (sender, _, _), sends in self._sends.items():
                if sender == rank:
                    small = [t for t in sends if t.nbytes <= _CONTROL_NBYTES and t.kept is None]
                    sends.clear()
                    for t in small:
                        kept = ctypes.create_string_buffer(ctypes.string_at(t.address, t.nbytes), max(t.nbytes, 1))
                        sends.append(_Transfer(ctypes.addressof(kept), t.nbytes, t.token, kept))
            for (_, receiver, _), receives in self._receives.items():
                if receiver == rank:
                    receives.clear()
            if reason is not None and self.failure is None:
                self.failure = rank, reason
            for condition in self.wake:
                condition.notify_all()

    def gather(self, rank: int, item: Any, timeout: float, progress_hook: Callable[[], object]) -> _Gather:
        """Collective: wait for the items of all ranks; calls ``progress_hook`` meanwhile."""
        deadline = Deadline(timeout)
        with self.lock:
            number = self._calls[rank]
            self._calls[rank] += 1
            gathered = self._gathers.setdefault(number, _Gather())
            gathered.items[rank] = item
            for condition in self.wake:
                condition.notify_all()
        while True:
            with self.lock:
                if len(gathered.items) == self.size:
                    break
                if self.failure is not None:
                    raise gave_up(*self.failure)
                if deadline.is_over:
                    missing = [r for r in range(self.size) if r not in gathered.items]
                    raise CollectiveTimeout(f"ranks {missing} did not come to a collective call within {timeout} s")
                self.wake[rank].wait(_NAP_SECONDS)
            progress_hook()
        with self.lock:
            gathered.leavers += 1
            if gathered.leavers == self.size:
                del self._gathers[number]
        return gathered


class LoopbackTransport(Transport):
    """One rank of a LoopbackGroup. ``shares_memory`` stays False: its larger chunks gain nothing here."""

    name = "loopback"
    eager_nbytes = 8 << 10

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = group.size
        self.nodes = (0,) * group.size
        self.progress_hook: Callable[[], object] = lambda: None
        self._group = group

    def send(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable) -> None:
        """Post a send; it completes when the receiver has taken its bytes."""
        self._group.post((self.rank, peer, tag), _Transfer(address, nbytes, token), is_send=True)

    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable, *, arrived: int = 0) -> None:
        """Post a receive; it takes the bytes of a send that waits for it."""
        self._group.post((peer, self.rank, tag), _Transfer(address, nbytes, token, arrived=arrived), is_send=False)

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Return completed transfers; raise the failure of the group only when none is left."""
        group, rank = self._group, self.rank
        with group.lock:
            if idle and not group.completed[rank] and group.faults[rank] is None and group.failure is None:
                group.wake[rank].wait(_NAP_SECONDS)
            tokens = group.completed[rank]
            if tokens:
                group.completed[rank] = []
                return tokens
            fault, group.faults[rank] = group.faults[rank], None
        if fault is not None:
            raise fault
        if group.failure is not None:
            raise gave_up(*group.failure)
        return ()

    def split(self, color: int | None, key: int, timeout: float) -> LoopbackTransport | None:
        """Collective: a new LoopbackGroup for each color, in the same process."""
        gathered = self._group.gather(self.rank, (color, key), timeout, self.progress_hook)
        if color is None:
            return None
        members = sorted((k, r) for r, (c, k) in gathered.items.items() if c == color)
        with self._group.lock:
            if color not in gathered.made:
                gathered.made[color] = LoopbackGroup(len(members))
        group: LoopbackGroup = gathered.made[color]
        return group.transport(members.index((key, self.rank)))

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Collective: pass the items in memory."""
        items = self._group.gather(self.rank, item, timeout, self.progress_hook).items
        return [items[r] for r in range(self.size)]

    def abort(self, reason: str) -> None:
        """Withdraw this rank's transfers; the others raise PeerLost with ``reason``, after its last small messages."""
        if not self._gone:
            self._gone = True
            self._group.withdraw(self.rank, reason)

    def close(self) -> None:
        """Withdraw this rank's transfers; small messages that it has sent still arrive. Never waits."""
        if not self._gone:
            self._gone = True
            self._group.withdraw(self.rank, None)
