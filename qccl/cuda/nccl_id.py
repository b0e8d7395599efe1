"""How ranks agree on the id of a new NCCL communicator, which one of them makes.

NCCL waits for all ranks of an id, so a rank that cannot take part says so before any of them calls NCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from qccl.cuda.libraries import DEVICE_TO_HOST, HOST_TO_DEVICE, as_qccl_error, cuda_libraries
from qccl.cuda.nccl_library import UINT8, set_up, with_reason
from qccl.errors import EngineError
from qccl.transports.strangers import printable

__all__ = ["ID_NBYTES", "agreed_id", "broadcast_note", "get_unique_id"]

#: of a group's id
ID_NBYTES = 128
#: of what a rank says before there is an id: the id, or a reason
_NOTE_NBYTES = 1024


def get_unique_id() -> bytes:
    """A new group's id: 128 bytes. One rank makes it and sends it to the others; all give it to Communicator().

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
    """Collective: a new group's id, which rank 0 makes. No rank waits for one that cannot take part.

    ``gather`` returns the notes of all ranks, or of rank 0 alone; all notes have one length. ``reason`` says why this
    rank cannot take part, if so. Then, and if rank 0 can make no id, all raise EngineError.
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
    return notes[0][1 : 1 + ID_NBYTES]


def broadcast_note(comm: Any, note: bytes, device: int, timeout: float) -> bytes:
    """The note of rank 0, which must have the same length on all ranks."""
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
