"""Ranks that are threads of one process: for tests, notebooks and the first example.

The semantics are those that are hardest on a schedule: a send completes only when the matching receive has taken its
bytes (MPI's rendezvous), so that a schedule that relies on buffering inside the library stops here instead of on a
cluster. One lock guards the whole group, also while bytes are copied; speed is not what this transport is for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qccl.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost

__all__ = ["LoopbackGroup", "LoopbackTransport"]

_NAP_SECONDS = 1e-3
#: pending messages of a rank that aborts are still delivered up to this size: its last words
_LAST_WORDS_NBYTES = 4096
_YARDSTICK_SECONDS = 60.0

_Key = tuple[int, int, int]  # sender, receiver, tag


@dataclass(slots=True)
class _Transfer:
    """One posted send or receive; ``kept`` holds the bytes of a sender that is gone."""

    address: int
    nbytes: int
    token: Hashable
    kept: Any = None
    at_most: bool = False


@dataclass(slots=True)
class _Meeting:
    """One collective of the set-up kind: what each rank brought, and what the first to look made of it."""

    items: dict[int, Any] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)
    leavers: int = 0


class LoopbackGroup:
    """The meeting place of ``size`` ranks; each thread takes its ``transport(rank)``."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ArgumentError(f"a group needs at least 1 rank, not {size}")
        self.size = size
        self.failure: str | None = None
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(size)]
        self.completed: list[list[Hashable]] = [[] for _ in range(size)]
        self.faults: list[MismatchError | None] = [None] * size
        self._sends: dict[_Key, deque[_Transfer]] = {}
        self._receives: dict[_Key, deque[_Transfer]] = {}
        self._meetings: dict[int, _Meeting] = {}
        self._met = [0] * size

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of one rank."""
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} is not one of the {self.size} ranks of this group (0 to {self.size - 1})")
        return LoopbackTransport(self, rank)

    def post(self, key: _Key, transfer: _Transfer, *, is_send: bool) -> None:
        """Match ``transfer`` with the oldest of the other side, or leave it for the other side to find."""
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
        if source.nbytes == target.nbytes or (target.at_most and source.nbytes < target.nbytes):
            ctypes.memmove(target.address, source.address, source.nbytes)
            self.completed[receiver].append(target.token)
        else:
            sizes = f"{source.nbytes} bytes to rank {receiver}, which expected {target.nbytes}"
            self.faults[receiver] = MismatchError(f"rank {sender} sent {sizes} (tag {tag})")
        if source.kept is None:
            self.completed[sender].append(source.token)
            self.wake[sender].notify_all()
        self.wake[receiver].notify_all()

    def withdraw(self, rank: int, failure: str | None) -> None:
        """Take back all that ``rank`` has posted, so that its memory may go; with ``failure`` the group has failed."""
        with self.lock:
            for (sender, _, _), sends in self._sends.items():
                if sender == rank:
                    small = [t for t in sends if t.nbytes <= _LAST_WORDS_NBYTES and t.kept is None]
                    sends.clear()
                    for t in small:
                        kept = ctypes.create_string_buffer(ctypes.string_at(t.address, t.nbytes), max(t.nbytes, 1))
                        sends.append(_Transfer(ctypes.addressof(kept), t.nbytes, t.token, kept))
            for (_, receiver, _), receives in self._receives.items():
                if receiver == rank:
                    receives.clear()
            if failure is not None and self.failure is None:
                self.failure = failure
            for condition in self.wake:
                condition.notify_all()

    def meet(self, rank: int, item: Any, timeout: float, progress_hook: Callable[[], object]) -> _Meeting:
        """Collective: wait until every rank has brought its item, and call ``progress_hook`` meanwhile."""
        deadline = time.monotonic() + timeout
        with self.lock:
            number = self._met[rank]
            self._met[rank] += 1
            meeting = self._meetings.setdefault(number, _Meeting())
            meeting.items[rank] = item
            for condition in self.wake:
                condition.notify_all()
        while True:
            with self.lock:
                if len(meeting.items) == self.size:
                    break
                if self.failure is not None:
                    raise PeerLost(self.failure)
                if time.monotonic() > deadline:
                    missing = [r for r in range(self.size) if r not in meeting.items]
                    raise CollectiveTimeout(f"ranks {missing} did not come to a collective call within {timeout} s")
                self.wake[rank].wait(_NAP_SECONDS)
            progress_hook()
        with self.lock:
            meeting.leavers += 1
            if meeting.leavers == self.size:
                del self._meetings[number]
        return meeting


class LoopbackTransport:
    """One rank of a LoopbackGroup (interface: Transport)."""

    name = "loopback"
    eager_nbytes = 8 << 10
    is_threaded = True
    shares_memory = False  # there is no speed to gain
    wire = None

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = group.size
        self.nodes = (0,) * group.size
        self.progress_hook: Callable[[], object] = lambda: None
        self._group = group
        self._gone = False

    def buffer(self, address: int, nbytes: int) -> tuple[int, int]:
        return address, nbytes

    def send(self, peer: int, tag: int, buffer: tuple[int, int], token: Hashable) -> None:
        self._group.post((self.rank, peer, tag), _Transfer(*buffer, token), is_send=True)

    def receive(self, peer: int, tag: int, buffer: tuple[int, int], token: Hashable, *, at_most: bool = False) -> None:
        self._group.post((peer, self.rank, tag), _Transfer(*buffer, token, at_most=at_most), is_send=False)

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """As in Transport. What has completed comes before the news that the group has failed."""
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
            raise PeerLost(group.failure)
        return ()

    def split(self, color: int | None, key: int, timeout: float) -> LoopbackTransport | None:
        meeting = self._group.meet(self.rank, (color, key), timeout, self.progress_hook)
        if color is None:
            return None
        members = sorted((k, r) for r, (c, k) in meeting.items.items() if c == color)
        with self._group.lock:
            if color not in meeting.made:
                meeting.made[color] = LoopbackGroup(len(members))
        group: LoopbackGroup = meeting.made[color]
        return group.transport(members.index((key, self.rank)))

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        items = self._group.meet(self.rank, item, timeout, self.progress_hook).items
        return [items[r] for r in range(self.size)]

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str) -> None:
        """Every rank combines all ranks' values with NumPy; float32 and float16, in rank order."""
        import numpy as np

        combine = {"sum": np.add, "min": np.minimum, "max": np.maximum}.get(op)
        if dtype not in ("float32", "float16") or combine is None:
            raise ArgumentError(f"the plain all-reduce takes float32 or float16 and sum, min or max, not {dtype}, {op}")
        nbytes = count * np.dtype(dtype).itemsize
        addresses = self._group.meet(self.rank, source, _YARDSTICK_SECONDS, self.progress_hook).items
        total = np.zeros(0, dtype)
        for rank in range(self.size):
            values = np.frombuffer(ctypes.string_at(addresses[rank], nbytes), dtype)
            total = combine(total, values) if rank else values
        self._group.meet(self.rank, None, _YARDSTICK_SECONDS, self.progress_hook)  # all have read before anyone writes
        ctypes.memmove(target, total.ctypes.data, nbytes)

    def abort(self, reason: str) -> None:
        if not self._gone:
            self._gone = True
            self._group.withdraw(self.rank, f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        if not self._gone:
            self._gone = True
            self._group.withdraw(self.rank, None)
