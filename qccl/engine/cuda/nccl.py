"""GPUs as ranks, connected by NCCL through CuPy's communicators.

NCCL has no deadlines, and it connects two ranks at their first transfer, which may block the host until the other rank
arrives. So the calls that can block (making or splitting a communicator, the first transfers, aborting) run on a thread
of their own with a deadline, and a new communicator connects all its ranks at once. Later calls only put work on
streams, which the engine's watchdog watches.

Two communicators on one GPU, such as a trainer's and this one, can wait for each other if their kernels start in
different orders on different ranks. So in a process with PyTorch, NCCL is told to start kernels in the order in which
the program issues them. Other processes keep NCCL's default, because with this order NCCL refuses launches by two
threads at once, such as XLA's and Python's.

All ranks must put the same work on a communicator in the same order. The transport's own collectives run on
``stream``, which is also the engine's communication stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, EngineError, QcclError
from qccl.engine.cuda.garbage import Garbage
from qccl.engine.cuda.libraries import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    LAUNCH_ORDER,
    TRANSFER_PRIORITY,
    as_qccl_error,
    bounded,
    cuda_libraries,
    hardware_of,
    on_device,
    pick_device,
    wait_for,
)
from qccl.engine.cuda.links import common_link, describe, halves
from qccl.engine.cuda.nccl_library import UINT8, BareCommunicator, set_up, with_reason
from qccl.meeting.strangers import printable
from qccl.meeting.topology import find_topology, machine
from qccl.transports.base import ApiCall, DeviceTransfer, DeviceTransport, Transport, split_groups

__all__ = ["NcclTransport", "agreed_id", "get_unique_id"]

#: bytes of a group's id, and of the note in which a rank sends it, or its reason why it cannot take part
_ID_NBYTES, _NOTE_NBYTES = 128, 1024
#: how long a rank waits for ncclCommAbort, and for ncclCommDestroy
_ABORT_SECONDS = _DESTROY_SECONDS = 5.0
_IN_PROGRESS = 7
_ALIGNMENT = 64


class NcclTransport(DeviceTransport):
    """One rank of an NCCL communicator."""

    name = "nccl"

    def __init__(self, comm: Any, device: int, timeout: float) -> None:
        """Collective: take ownership of a NcclCommunicator of CuPy's, and connect all ranks with each other."""
        cuda = cuda_libraries().cupy.cuda
        self.device = device
        self.host: Transport | None = None
        self.comm = comm
        self._timeout = timeout
        self._asking = threading.Lock()  # held while NCCL is asked for errors, so that nobody frees the communicator
        self._lost: list[Any] = []  # memory of collectives that did not finish: the device may still write to it
        self.rank, self.size = comm.rank_id(), comm.size()
        with on_device(device):
            self._stream = cuda.Stream(non_blocking=True, priority=TRANSFER_PRIORITY)
            self._event = cuda.Event(disable_timing=True)
        self.stream: int = self._stream.ptr
        Garbage(device).drop_with(self, [comm], self._lost, [self._stream, self._event])
        try:
            set_up(device, timeout, "the first transfers", self._connect)
            note = "\n".join((machine(), hardware_of(device), describe(device)))
            notes = [each.decode().split("\n") for each in self.allgather(note.encode(), timeout)]
            machines, hardware, gpus = zip(*notes, strict=True)
            self.hardware = "; ".join(f"{hardware.count(each)} x {each}" for each in sorted({*hardware}))
            self.link = common_link(machines, gpus)
            self.halves = halves(gpus) if self.link == "PCIe" else ()
            places = find_topology(self.rank, machines)
        except BaseException as error:
            self.abort(f"the ranks could not be connected: {error}")
            raise
        self.local_rank, self.local_size, self.nodes, _ = places

    @property
    def carrier(self) -> str:
        """See Group."""
        return f"{self.name} over {self.link}"

    # -- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def from_unique_id(
        cls, unique_id: bytes, rank: int, size: int, device: int | None, timeout: float
    ) -> NcclTransport:  # fmt: skip
        """Collective: rank ``rank`` of ``size``; ``device`` None means the current one."""
        gpu = cuda_libraries()
        if not isinstance(unique_id, bytes) or len(unique_id) != _ID_NBYTES:
            raise ArgumentError(
                "unique_id must be the 128 bytes that qccl.get_unique_id() returned on one of the ranks"
            )
        if not 0 <= rank < size:
            raise ArgumentError(f"rank {rank} of {size} ranks does not exist; ranks are 0 to size - 1")
        chosen = pick_device(device, None)
        if "torch" in sys.modules:
            os.environ.setdefault(LAUNCH_ORDER, "1")  # NCCL reads it at its first launch in the process
        make = gpu.nccl.NcclCommunicator
        comm = set_up(chosen, timeout, "the making of the communicator", lambda: make(size, unique_id, rank))
        return cls(comm, chosen, timeout)

    @classmethod
    def from_group(cls, group: Transport, device: int | None, timeout: float) -> NcclTransport:
        """Collective: the ranks of a host group (such as MPI's). The new transport owns the group, as ``host``.

        If a rank has no GPU, all ranks raise EngineError with that rank's reason, and the caller still owns the group.
        """
        chosen, reason = None, ""
        try:
            chosen = pick_device(device, group.local_rank)
        except QcclError as error:
            reason = str(error)
        unique_id = agreed_id(group.rank, lambda note: group.allgather(note, timeout), reason)
        made = cls.from_unique_id(unique_id, group.rank, group.size, chosen, timeout)
        made.host = group
        return made

    @classmethod
    def from_nccl(cls, comm: Any, rank: int, size: int, timeout: float) -> NcclTransport:
        """Collective: the ranks and GPUs of another communicator: one of CuPy's, or an ncclComm_t as an integer.

        This makes a new communicator. The given one carries one broadcast and is not changed.
        """
        cuda_libraries()
        given = BareCommunicator(comm) if isinstance(comm, int) else comm
        try:
            device, found = given.device_id(), (given.rank_id(), given.size())
        except Exception as error:
            raise as_qccl_error(error) or ArgumentError(f"{comm!r} is not an NCCL communicator ({error})") from error
        if found != (rank, size):
            raise ArgumentError(
                f"rank {rank} of {size} was given, but the communicator says rank {found[0]} of {found[1]}"
            )
        unique_id = agreed_id(rank, lambda note: [_broadcast_note(given, note, device, timeout)])
        return cls.from_unique_id(unique_id, rank, size, device, timeout)

    @classmethod
    def from_torch(cls, group: Any, timeout: float) -> NcclTransport:
        """Collective: the ranks of a torch process group with the backend nccl, on their current devices."""
        import torch
        import torch.distributed as dist

        rank, size, device = dist.get_rank(group), dist.get_world_size(group), torch.cuda.current_device()

        def broadcast(note: bytes) -> list[bytes]:
            message = torch.tensor(list(note), dtype=torch.uint8, device=f"cuda:{device}")
            dist.broadcast(message, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
            return [bytes(message.tolist())]

        return cls.from_unique_id(agreed_id(rank, broadcast), rank, size, device, timeout)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Sequence[DeviceTransfer], receives: Sequence[DeviceTransfer], stream: int
    ) -> list[ApiCall]:
        """The calls of one NCCL group, whose transfers progress independently of each other."""
        comm = self.comm
        calls: list[ApiCall] = [
            (comm.recv, (transfer.address, transfer.nbytes, UINT8, transfer.peer, stream)) for transfer in receives
        ]
        calls += [(comm.send, (transfer.address, transfer.nbytes, UINT8, transfer.peer, stream)) for transfer in sends]
        return [(_grouped, (calls,))]

    def check(self) -> None:
        """Raise the NCCL communicator's asynchronous error, unless this rank has aborted it."""
        try:
            with self._asking:
                if not self._gone:
                    self.comm.check_async_error()
        except Exception as error:
            if not (isinstance(error, KeyError) and error.args == (_IN_PROGRESS,)):
                self._raise(error)

    # -- set-up ------------------------------------------------------------------------------------------------------

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Gather over the GPUs in two rounds: the lengths of the items, then the items, padded to the longest."""
        self._check_alive()
        deadline = Deadline(timeout)
        try:
            with on_device(self.device):
                lengths = [int.from_bytes(n, "little") for n in self._gather(len(item).to_bytes(8, "little"), deadline)]
                items = self._gather(item.ljust(max(lengths, default=0) or 1, b"\0"), deadline)
        except Exception as error:
            self._raise(error)
        return [each[:length] for each, length in zip(items, lengths, strict=True)]

    def split(self, color: int | None, key: int, timeout: float) -> NcclTransport | None:
        """Split by ncclCommSplit; also split the host transport. Raises CollectiveTimeout if a rank is missing."""
        groups = split_groups(self, color, key, timeout)
        arguments = (-1, 0) if color is None else (sorted(groups).index(color), groups[color].index(self.rank))
        comm = set_up(self.device, timeout, "the split", lambda: self.comm.commSplit(*arguments))
        host = None if self.host is None else self.host.split(color, key, timeout)
        if comm is None:
            return None
        made = NcclTransport(comm, self.device, timeout)
        made.host = host
        return made

    def abort(self, reason: str) -> None:
        """End the transfers under way on the device. The other ranks notice it at their deadlines, or earlier.

        NCCL ends the transfers at once, but its call returns only when all CUDA graphs with transfers of this
        communicator are deleted.
        """
        if not self._leave():
            return
        if self.host is not None:
            self.host.abort(reason)
        with contextlib.suppress(Exception):  # NCCL sets its flags before it calls CUDA, which may block
            bounded(None, _ABORT_SECONDS, "abort", self.comm.abort)

    def close(self) -> None:
        """Release the communicator.

        NCCL waits until all ranks of the machine release it, and until all CUDA graphs with its transfers are deleted.
        After 5 s the thread is left waiting: an abort in addition would free the communicator twice.
        """
        if not self._leave():
            return
        try:
            bounded(self.device, _DESTROY_SECONDS, "the end of the communicator", self.comm.destroy)
        except QcclError as error:
            warnings.warn(
                f"NCCL has not ended a communicator ({error}): it waits for ranks of this machine that have not closed "
                f"it, and for CUDA graphs that hold its calls; close it on all ranks, and delete graphs before",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.host is not None:
            self.host.close()

    def _leave(self) -> bool:
        """Mark the transport as closed, so that nothing uses the communicator. Returns whether it was open."""
        with self._asking:
            was_open, self._gone = not self._gone, True
        return was_open

    def _connect(self) -> None:
        """Send a byte to every rank and run a collective, so that NCCL makes its connections and loads its kernels."""
        gpu = cuda_libraries()
        with self._stream:
            memory = gpu.cupy.cuda.alloc(_ALIGNMENT * (self.size + 1))
        peers = [peer for peer in range(self.size) if peer != self.rank]
        sends = [DeviceTransfer(peer, memory.ptr, 1) for peer in peers]
        receives = [DeviceTransfer(peer, memory.ptr + _ALIGNMENT * (peer + 1), 1) for peer in peers]
        calls = self.exchange(sends, receives, self.stream) if peers else []
        calls += [(self.comm.allGather, (memory.ptr, memory.ptr + _ALIGNMENT, 1, UINT8, self.stream))]
        for function, arguments in calls:
            function(*arguments)
        self._finish(Deadline(self._timeout))

    def _gather(self, item: bytes, deadline: Deadline) -> list[bytes]:
        """All ranks' items of equal length, by NCCL. The host memory is pinned: copies from other memory block."""
        gpu = cuda_libraries()
        size, slot = len(item), -(-len(item) // _ALIGNMENT) * _ALIGNMENT
        with self._stream:
            memory = gpu.cupy.cuda.alloc(slot * (self.size + 1))
        host = gpu.cupy.cuda.alloc_pinned_memory(slot * (self.size + 1))
        ctypes.memmove(host.ptr, item, size)
        gpu.runtime.memcpyAsync(memory.ptr, host.ptr, size, HOST_TO_DEVICE, self.stream)
        self.comm.allGather(memory.ptr, memory.ptr + slot, slot, UINT8, self.stream)
        gpu.runtime.memcpyAsync(host.ptr + slot, memory.ptr + slot, slot * self.size, DEVICE_TO_HOST, self.stream)
        self._lost.append((memory, host))
        self._finish(deadline)
        self._lost.pop()
        return [ctypes.string_at(host.ptr + slot * (r + 1), size) for r in range(self.size)]

    def _finish(self, deadline: Deadline) -> None:
        """Wait until the stream has done all its work."""
        cuda_libraries().runtime.eventRecord(self._event.ptr, self.stream)
        wait_for(self._event.ptr, deadline, "a collective of the set-up", self.check)
        self._check_alive()  # CUDA counts aborted work as done

    def _raise(self, error: Exception) -> NoReturn:
        """Raise a library's error as one of qccl's, with NCCL's own text about its last error."""
        ours = as_qccl_error(error)
        if ours is None:
            raise error
        raise (ours if self._gone else with_reason(ours)) from error


def _grouped(calls: Sequence[ApiCall]) -> None:
    """Make ``calls`` as one NCCL group, and end the group even after an error: later calls would join an open group."""
    nccl = cuda_libraries().nccl
    nccl.groupStart()
    try:
        for function, arguments in calls:
            function(*arguments)
    finally:
        nccl.groupEnd()


def get_unique_id() -> bytes:
    """Make a new group's id: 128 bytes. One rank makes it and sends it to the others; all give it to Communicator().

    Raises EngineError, with NCCL's reason, for example if it finds no network interface.
    """
    try:
        return bytes(cuda_libraries().nccl.get_unique_id())
    except Exception as error:
        ours = as_qccl_error(error)
        if ours is None:
            raise
        raise with_reason(ours) from error


def agreed_id(rank: int, gather: Callable[[bytes], Sequence[bytes]], reason: str = "") -> bytes:
    """Collective: rank 0 makes a new group's id, which all ranks return.

    ``gather`` returns the notes of all ranks, or of rank 0 alone; all notes have equal lengths. ``reason`` says why
    this rank cannot take part. If a rank has a reason, or rank 0 can make no id, all ranks raise EngineError.
    """
    found, own = b"", None
    if rank == 0 and not reason:
        try:
            found = get_unique_id()
        except Exception as error:
            reason, own = str(error) or type(error).__name__, error
    note = b"-" + reason.encode(errors="backslashreplace") if reason else b"+" + found
    notes = gather(note[:_NOTE_NBYTES].ljust(_NOTE_NBYTES, b"\0"))
    if own is not None:
        raise own
    for other, each in enumerate(notes):
        if not each.startswith(b"+"):
            raise EngineError(f"rank {other}: {printable(each[1:].rstrip(bytes(1)))}")
    return notes[0][1 : 1 + _ID_NBYTES]


def _broadcast_note(comm: Any, note: bytes, device: int, timeout: float) -> bytes:
    """Broadcast the note of rank 0; all ranks give notes of equal lengths."""
    gpu, nbytes = cuda_libraries(), len(note)

    def broadcast() -> bytes:
        cuda = gpu.cupy.cuda
        stream = cuda.Stream(non_blocking=True)
        with stream:
            memory = cuda.alloc(nbytes)
        host = cuda.alloc_pinned_memory(nbytes)
        ctypes.memmove(host.ptr, note, nbytes)
        gpu.runtime.memcpyAsync(memory.ptr, host.ptr, nbytes, HOST_TO_DEVICE, stream.ptr)
        comm.broadcast(memory.ptr, memory.ptr, nbytes, UINT8, 0, stream.ptr)
        gpu.runtime.memcpyAsync(host.ptr, memory.ptr, nbytes, DEVICE_TO_HOST, stream.ptr)
        stream.synchronize()
        return ctypes.string_at(host.ptr, nbytes)

    return set_up(device, timeout, "the broadcast on the given communicator", broadcast)
