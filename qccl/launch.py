"""qccl.init(): the communicator of the ranks that the launcher started (see launchers.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qccl.cuda.libraries import device_count, pick_device
from qccl.errors import ArgumentError, EngineError, MismatchError, QcclError
from qccl.launchers import Launcher, check_alone, check_size, detect, remedy

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.transports.base import Transport

__all__ = ["init"]

#: decisions: all ranks have GPUs; some rank has none; the ranks passed different arguments
_YES, _NO, _MIXED = b"+", b"-", b"x"
_REASON_NBYTES = 220


def init(backend: str = "auto", timeout: float = 60.0, device: int | None = None) -> Communicator:
    """The communicator of all ranks that the launcher started (one rank without a launcher).

    Args:
        backend: "host", "cuda", or "auto": CUDA if it can be used and each machine has a GPU for each of its ranks, or
            if a ``device`` is given; otherwise the host. The ranks decide together.
        timeout: seconds until a collective that does not finish raises CollectiveTimeout.
        device: GPU of this rank; None means the GPU whose number is the rank's number on its machine.

    Raises:
        ArgumentError: a value is not allowed; MPI has another number of ranks than the launcher; or this is a single
            rank although the environment, torch.distributed, jax.distributed or mpi4py says that there are more.
        MismatchError: the ranks passed different backends.
        CollectiveTimeout: not every rank called init() in time.
        EngineError: the backend cannot be used on this machine; the message says why.
    """
    from qccl.arguments import integer, timeout_of
    from qccl.communicator import Communicator

    timeout = timeout_of(timeout)
    if backend not in ("auto", "host", "cuda"):
        raise ArgumentError(f'backend {backend!r} does not exist; there are "auto", "host" and "cuda"')
    if backend == "host" and device is not None:
        raise ArgumentError(f"device={device!r} was given, but the host backend has no devices; leave it out")
    device = None if device is None else integer(device, "device")
    launcher = detect()
    if launcher is None or launcher.size == 1:
        check_alone()
    must = backend == "cuda" or device is not None
    if backend != "host" and (launcher is None or _meets_by_tcp(launcher)):
        comm = _by_tcp(launcher or Launcher("", 0, 1, 0, 1), device, timeout, must=must)
        if comm is not None:
            return comm
    transport = _host_transport(launcher, timeout)
    if launcher is not None and backend != "host" and not _meets_by_tcp(launcher):
        reason = "" if must else _too_few(transport.local_size)
        kind, text = _verdict(transport.allgather(_note(must, reason), timeout))
        if kind == _MIXED:
            transport.close()
            raise MismatchError(text)
        if kind == _YES:
            return _over(transport, device, timeout)
    return Communicator._from_transport(transport, timeout=timeout)


def _by_tcp(launcher: Launcher, device: int | None, timeout: float, *, must: bool) -> Communicator | None:
    """A communicator on GPUs of ranks that meet over TCP, or of one rank; None if the ranks use the host.

    The ranks exchange their requests and why they cannot use a GPU, and so make the same decision.
    """
    from qccl.communicator import Communicator
    from qccl.transports.rendezvous import meet, meeting_place

    chosen, reason = None, ""
    try:
        reason = "" if must else _too_few(launcher.local_size or launcher.local_rank + 1)
        if not reason:
            chosen = pick_device(device, launcher.local_rank if launcher.name else None)
    except QcclError as error:
        if launcher.size == 1:
            raise
        reason = str(error)
    note = _note(must, reason)
    if launcher.size == 1:
        answer = _decide([note])
    else:
        job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
        answer = meet(note, _decide, launcher.rank, launcher.size, meeting_place(), timeout, job)
    kind, content = answer[:1], answer[1:]
    if kind == _YES:
        return Communicator(content, launcher.rank, launcher.size, timeout=timeout, device=chosen)
    if kind == _MIXED:
        raise MismatchError(content.decode(errors="replace"))
    if must:
        raise EngineError(content.decode(errors="replace"))
    return None


def _too_few(ranks: int) -> str:
    """Why this machine has no GPU for each of its ranks, or ""."""
    count = device_count()
    return "" if count >= ranks else f"its machine has {count} usable GPUs for {ranks} ranks"


def _note(must: bool, reason: str) -> bytes:
    """The message of a rank: whether it must use a GPU, and why it cannot."""
    return (b"!" if must else b"?") + reason.encode()[:_REASON_NBYTES]


def _verdict(notes: Sequence[bytes]) -> tuple[bytes, str]:
    """The decision from all ranks' messages, and its reason."""
    must = [rank for rank, note in enumerate(notes) if note[:1] == b"!"]
    if 0 < len(must) < len(notes):
        other = next(rank for rank in range(len(notes)) if rank not in must)
        return _MIXED, (
            f'rank {must[0]} called init() with backend="cuda" or a device, and rank {other} with backend="auto"; all '
            f"ranks must be given the same"
        )
    for rank, note in enumerate(notes):
        if note[1:]:
            return _NO, f"rank {rank}: {note[1:].decode(errors='replace')}"
    return _YES, ""


def _decide(notes: Sequence[bytes]) -> bytes:
    """Rank 0's answer to all ranks: the decision, and NCCL's unique id or the reason."""
    kind, text = _verdict(notes)
    if kind != _YES:
        return kind + text.encode()
    from qccl.cuda.nccl import get_unique_id

    return kind + get_unique_id()


def _over(group: Transport, device: int | None, timeout: float) -> Communicator:
    """A communicator of a host group's ranks on their GPUs. It owns the group; on failure the group is closed."""
    from qccl.communicator import Communicator
    from qccl.cuda import CudaBackend
    from qccl.cuda.nccl import NcclTransport

    try:
        transport = NcclTransport.from_group(group, device, timeout)
    except BaseException:
        group.close()
        raise
    return Communicator._from_transport(transport, timeout, CudaBackend)


def _meets_by_tcp(launcher: Launcher) -> bool:
    """Whether the ranks find each other at MASTER_ADDR (torchrun; srun where it is set) and not through MPI."""
    return launcher.name == "torchrun" or (launcher.name == "srun" and "MASTER_ADDR" in os.environ)


def _host_transport(launcher: Launcher | None, timeout: float) -> Transport:
    if launcher is None:
        return _alone()
    try:
        from qccl.transports.mpi import MpiTransport
    except ImportError as error:
        if launcher.size == 1:
            return _alone()
        if launcher.name == "torchrun":  # MPI would not help
            raise EngineError(f"torchrun started {launcher.size} ranks: {remedy(launcher)}") from error
        raise EngineError(
            f"{launcher.name} started {launcher.size} ranks, but MPI cannot be used here ({error}); "
            f"install qccl[mpi], or mpi4py alone where the machine has its own MPI, or take the ranks of a torch "
            f"group with gloo by Communicator.from_torch()"
        ) from error
    transport = MpiTransport.world(timeout)
    check_size(launcher, transport.size)
    return transport


def _alone() -> Transport:
    from qccl.transports.loopback import LoopbackGroup

    return LoopbackGroup(1).transport(0)
