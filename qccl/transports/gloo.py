"""Ranks of a torch.distributed process group, connected by gloo: host memory in a torch program, without MPI.

qccl makes a gloo process group of its own on the store of torch's default group. It uses the program's group once, to
bring the ranks together.

gloo cannot be polled for transfers, so a thread waits for each transfer under way. When a message is larger than its
receive, gloo terminates the process. So the size is part of the tag: a message of another size matches no receive, and
the headers, which all have one size, report the mismatch.

A thread that returns from gloo while the interpreter ends would terminate the process by abort(). So all connections
are closed first, and the process waits until the threads have returned. gloo does not wake a thread whose transfer was
half done when its connection closed: that thread stays blocked, keeps the transfer's memory, and cannot return.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
import uuid
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from qccl.base import threads
from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, PeerLost
from qccl.base.lifetime import Registry, Stage
from qccl.meeting.topology import find_topology, machine
from qccl.transports.base import Transport, renumbered, split_groups

__all__ = ["TorchTransport", "backend_of", "bytes_at", "connect_gloo", "keep_alive"]

#: gloo's deadline for transfers, which never comes, and seconds that its deadline for collectives is behind qccl's
_NEVER = timedelta(days=20)
_LATER_SECONDS = 10.0
#: seconds in which threads return from gloo after the connections close; others are stuck
_BACK_SECONDS = 2.0
_NAP_SECONDS = 1e-3
#: most seconds between two questions to the store, whose single thread serves all ranks
_LONGEST_NAP_SECONDS = 50e-3
#: least seconds for gloo's set-up; and the factor by which gloo waits longer for a connection than it is told
_LEAST_SECONDS, _GLOOS_FACTOR = 1.0, 5
_POLL_SECONDS = 50e-6
#: seconds in which a lost rank's last messages may arrive after the error that reports the loss, on both sides
_LAST_WORDS_SECONDS = 0.1
#: gloo's tags have 31 bits: the engine's tag above 16 bits for the size; one tag is reserved for _is_closed()
_TAGS = (1 << 15) - 1
_UNUSED_TAG = (1 << 31) - 1

#: gloo's latest collectives, by group. The thread that drops the last reference to one needs the interpreter's lock. If
#: that is gloo's own thread while the interpreter is ending, it terminates the process by abort(). A collective keeps
#: its group's connections open, so it is released with the group, whose threads have ended then
_collectives: weakref.WeakKeyDictionary[Any, deque[object]] = weakref.WeakKeyDictionary()
_MOST_COLLECTIVES = 16


class TorchTransport(Transport):
    """One rank of a gloo group.

    Attributes:
        group: gloo's process group of this transport alone; None after close().
    """

    name = "gloo"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        progress_hook: Callable[[], object] = lambda: None,
        *,
        own: str | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Collective: connect a gloo group by a store of torch that nothing else uses.

        ``own``: this machine's address for the other ranks; None: gloo finds it by GLOO_SOCKET_IFNAME, or by the
        machine's name. ``deadline``: the deadline of ``timeout`` if it counts already.
        """
        deadline = deadline or Deadline(timeout)
        self.rank, self.size = rank, size
        self.progress_hook = progress_hook
        self._store, self._own = store, own
        self._splits = 0
        self._changed = threading.Condition()  # guards the attributes below
        self._done: list[Hashable] = []
        self._fault: tuple[Deadline, int, RuntimeError] | None = None  # time for last messages, peer, error
        self._under_way = 0
        self._threads: list[threading.Thread] = []
        self._waiting = 0  # idle threads
        self._timer: threading.Timer | None = None
        self._back_by = Deadline(_BACK_SECONDS, counts=False)  # the deadline of await_threads()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        _await_all(store, rank, size, deadline, progress_hook)
        try:
            self.group = connect_gloo(store, rank, size, deadline.remaining(), own)
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"gloo did not connect rank {rank}{f', at {own},' if own else ''} with the {size} ranks within "
                f"{timeout} s ({_text(error)}); QCCL_NET or GLOO_SOCKET_IFNAME chooses the network interface"
            ) from error
        self.group._set_default_timeout(timedelta(seconds=timeout + _LATER_SECONDS))
        _open.add(self)
        machines = self.allgather(machine().encode(), deadline.remaining())
        topology = find_topology(rank, [each.decode() for each in machines])
        self.local_rank, self.local_size, self.nodes, self.shares_memory = topology

    @classmethod
    def from_group(cls, group: Any, timeout: float, own: str | None = None) -> TorchTransport:
        """Collective: the ranks of a process group with gloo (None: the default group)."""
        if "gloo" not in (backend := backend_of(group)):
            raise ArgumentError(f"the process group has the backend {backend}, and host memory is sent over gloo")
        name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        options = dist.BroadcastOptions()  # rank 0 of the group is the root
        options.timeout = timedelta(seconds=timeout)
        deadline = Deadline(timeout)
        try:
            used = dist.group.WORLD if group is None else group
            keep_alive(used, used.broadcast([name], options)).wait()
        except RuntimeError as error:
            if not deadline.is_over:
                raise _lost([], error) from error
            raise CollectiveTimeout(f"not every rank called from_torch() within {timeout} s") from error
        store = dist.PrefixStore(f"qccl/{bytes(name.tolist()).hex()}", dist.distributed_c10d._get_default_store())
        return cls(store, dist.get_rank(group), dist.get_world_size(group), timeout, own=own)

    @classmethod
    def at(cls, place: tuple[str, int], rank: int, size: int, timeout: float, own: str | None = None) -> TorchTransport:
        """Collective: ranks that meet at host and port of rank 0."""
        deadline = Deadline(timeout)
        try:
            store = dist.TCPStore(*place, size, is_master=rank == 0, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise CollectiveTimeout(f"not every rank came to {place[0]}:{place[1]} within {timeout} s") from error
        return cls(store, rank, size, timeout, own=own, deadline=deadline)

    def send(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable) -> None:
        """Send by gloo. A thread waits for the transfer, because gloo has no test for its end."""
        self._post(self.group.send, peer, tag, bytes_at(address, nbytes), token)

    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: Hashable, *, arrived: int = 0) -> None:
        """Receive by gloo, with a waiting thread. Messages have exactly ``nbytes``, so ``arrived`` is not used."""
        self._post(self.group.recv, peer, tag, bytes_at(address, nbytes), token)

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        """Return completed transfers; raise the loss of a rank only when none is left.

        The loss is raised a moment later, so that the last messages of the failed rank arrive first.
        """
        with self._changed:
            if idle and not self._done:
                self._changed.wait(_NAP_SECONDS)
            if self._done:
                done, self._done = self._done, []
                return done
            if self._fault is not None:
                last_words, peer, error = self._fault
                if last_words.is_over:
                    raise _lost([peer], error) from error
        return ()

    def split(self, color: int | None, key: int, timeout: float) -> TorchTransport | None:
        """Collective: a gloo group for each color, connected by the same store."""
        groups = split_groups(self, color, key, timeout)
        self._splits += 1
        if color is None:
            return None
        members = groups[color]
        store = dist.PrefixStore(f"{self._splits}.{color}", self._store)
        how = self.progress_hook
        with renumbered(self, members):
            return TorchTransport(store, members.index(self.rank), len(members), timeout, how, own=self._own)

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Do two all-gathers of gloo: one of the items' lengths, one of the items, padded to the longest."""
        self._check_alive()
        deadline = Deadline(timeout)
        lengths = [int.from_bytes(n, "little") for n in self._gather(len(item).to_bytes(8, "little"), deadline)]
        items = self._gather(item.ljust(max(*lengths, 1), b"\0"), deadline)
        return [each[:length] for each, length in zip(items, lengths, strict=True)]

    def abort(self, reason: str) -> None:
        """Close the connections a moment later, by which the other ranks notice the loss."""
        if not self._gone:
            self._gone = True
            self._timer = threading.Timer(_LAST_WORDS_SECONDS, self._give_up)
            self._timer.daemon = True
            try:
                threads.start(self._timer)
            except EngineError:  # no thread can be started, or the process is ending
                self.disconnect()

    def close(self) -> None:
        """End the threads and the group, unless another rank has not closed yet: then the process keeps both."""
        if self._gone:
            return
        self._gone = True
        with self._changed:
            is_over = self._under_way == 0  # otherwise another rank has not closed yet, and transfers stay
        if is_over:
            self._end_threads()
            self.await_threads()
            self.group = None

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _post(self, start: Callable[..., Any], peer: int, tag: int, buffer: torch.Tensor, token: Hashable) -> None:
        """Start a transfer, and let a thread wait for it. poll() raises if the peer is lost."""
        self._check_alive()
        try:
            job = _Job(start([buffer], peer, _tag(tag, buffer.numel())), peer, buffer, token)
        except RuntimeError as error:
            with self._changed:
                self._failed(peer, error)
            return
        with self._changed:
            self._under_way += 1
            if self._waiting:
                self._waiting -= 1
                self._jobs.put(job)
                return
            thread = threading.Thread(target=self._wait_for, args=(job,), name="qccl gloo", daemon=True)
            self._threads.append(thread)
        threads.start(thread)

    def _wait_for(self, job: _Job | None) -> None:
        """Wait for one transfer after the other (in a thread)."""
        while job is not None:
            error = None
            try:
                job.work.wait(_NEVER)
            except RuntimeError as caught:
                error = caught
            with self._changed:
                self._under_way -= 1
                self._waiting += 1
                if error is None:
                    self._done.append(job.token)
                else:
                    self._failed(job.peer, error)
                self._changed.notify_all()
            job = self._jobs.get()

    def _failed(self, peer: int, error: RuntimeError) -> None:
        if self._fault is None:
            self._fault = Deadline(_LAST_WORDS_SECONDS), peer, error

    # -- the end -----------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Close all connections, so that the threads return. The transport is unusable afterwards."""
        self._gone = True
        if self._timer is not None:
            self._timer.cancel()
        if self.group is not None:
            for peer in self._peers():
                # a wait that times out makes gloo close all connections; it fails if the peer's is closed already
                with contextlib.suppress(RuntimeError):
                    self._receive_nothing(peer).wait(timedelta(milliseconds=1))
        self._end_threads()

    def await_threads(self) -> None:
        """After disconnect(): return when the threads have ended, or are stuck in gloo."""
        for thread in (*self._threads, *([self._timer] if self._timer is not None else [])):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._back_by.remaining())
        _open.discard(self)

    def _give_up(self) -> None:
        self.disconnect()
        self.await_threads()

    def _end_threads(self) -> None:
        """Let the threads end after their present transfers."""
        if not self._back_by.counts:
            self._back_by.start()
            for _ in self._threads:
                self._jobs.put(None)

    def _receive_nothing(self, peer: int) -> Any:
        """Start a receive that no send matches. Raises RuntimeError if the connection is closed."""
        return self.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _UNUSED_TAG)

    def _is_closed(self, peer: int) -> bool:
        try:
            self._receive_nothing(peer)
        except RuntimeError:
            return True
        return False

    def _closed(self) -> list[int]:
        """The ranks whose connections are closed."""
        return [peer for peer in self._peers() if self._is_closed(peer)]

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _gather(self, item: bytes, deadline: Deadline) -> list[bytes]:
        """All ranks' items, which have equal lengths."""
        mine = torch.frombuffer(bytearray(item), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = keep_alive(self.group, self.group.allgather([theirs], [mine]))
            while not work.is_completed():
                if deadline.is_over:
                    raise CollectiveTimeout(f"not every rank came to an all-gather within {deadline.seconds} s")
                self.progress_hook()
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise _lost(self._closed(), error) from error
        return [bytes(each.tolist()) for each in theirs]


def _await_all(store: Any, rank: int, size: int, deadline: Deadline, progress_hook: Callable[[], object]) -> None:
    """Collective: wait until all ranks are here, because gloo itself waits for each with a shorter deadline."""
    until, missing = Deadline(deadline.remaining(_LEAST_SECONDS)), list(range(size))
    nap = _NAP_SECONDS
    try:
        store.set(f"here/{rank}", "")
        while missing and not until.is_over:
            if store.check([f"here/{missing[0]}"]):
                missing.pop(0)
                continue
            progress_hook()
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
    except RuntimeError as error:
        raise _lost([], error) from error
    if missing:
        raise CollectiveTimeout(f"rank {missing[0]} did not come to connect gloo within {deadline.seconds} s")


def connect_gloo(store: Any, rank: int, size: int, seconds: float, own: str | None) -> Any:
    """Collective: a process group of gloo, whose ranks connect within ``seconds``; ``own``: see TorchTransport.

    Raises RuntimeError.
    """
    limit = timedelta(seconds=max(_LEAST_SECONDS, seconds / _GLOOS_FACTOR))
    if own is None:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname=own)], limit
    return dist.ProcessGroupGloo(store, rank, size, options)


class _Job(NamedTuple):
    """One of gloo's transfers, its peer, its memory, and its token for poll()."""

    work: Any
    peer: int
    buffer: torch.Tensor
    token: Hashable


def backend_of(group: Any) -> str:
    """The backends that carry a process group's bytes, e.g. "cpu:gloo,cuda:nccl" (None: the default group)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    group = group or dist.group.WORLD
    return ",".join(f"{device.type}:{group._get_backend(device).name()}" for device in group._device_types)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A tensor over ``nbytes`` at ``address``, whose memory the caller keeps alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def keep_alive(group: Any, work: Any) -> Any:
    """Return ``work``, a gloo collective of ``group``, and keep it as long as gloo's threads may use it."""
    _collectives.setdefault(group, deque(maxlen=_MOST_COLLECTIVES)).append(work)
    return work


def _tag(tag: int, nbytes: int) -> int:
    """The tag for gloo. Different sizes get different tags, except 1 of 65536 pairs of sizes."""
    if not 0 <= tag < _TAGS:
        raise EngineError(f"tag {tag} is not 0 to {_TAGS - 1}")
    return tag << 16 | zlib.crc32(nbytes.to_bytes(8, "little")) & 0xFFFF


def _lost(ranks: Sequence[int], error: RuntimeError) -> PeerLost:
    names = ", ".join(map(str, ranks))
    who = f"ranks {names} were" if len(ranks) > 1 else f"rank {names} was" if ranks else "a rank was"
    return PeerLost(f"{who} lost (gloo: {_text(error)})", ranks[0] if len(ranks) == 1 else None)


def _text(error: RuntimeError) -> str:
    """The first sentence of gloo's message, without the place in its source."""
    line = str(error).strip().split("\n")[0]
    line = line.partition("] ")[2] if line.startswith("[") else line
    return line.partition(". ")[0]


#: transports that were not closed, or were closed before those of other ranks. A thread that returned from gloo's code
#: after the end of the interpreter would end the process by abort()
_open = Registry((TorchTransport.disconnect, TorchTransport.await_threads), Stage.TRANSPORTS, keeps=True)
