"""Ranks that are MPI processes, through mpi4py.

When a rank fails:

- A rank that raises sends the others a control message. They raise PeerLost at once.
- A rank that stops answering is detected by the deadlines of the others.
- A rank killed by a signal ends the whole job under MPICH, and under Open MPI unless it runs with
  ``mpiexec --with-ft ulfm``; then the others raise PeerLost.

After a failure the process can always exit. MPI_Finalize would wait for ever for a rank that hangs, so SIGALRM ends a
process with a failed transport 10 s after the interpreter starts to exit. mpiexec then ends the rest of the job,
stopped processes included.

If the program imported mpi4py.MPI before qccl, mpi4py finalizes MPI, after the end of the interpreter. The memory of
transfers that are then under way is never freed.

A child of os.fork() must not use MPI, not even at its end. There all transports are unusable, and MPI is not finalized,
unless the program imported mpi4py.MPI before qccl: then mpi4py finalizes it, and the child must end by os._exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mpi4py

#: whether this module finalizes MPI instead of mpi4py
_finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
if _finalizes:
    mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from qccl import _host  # noqa: E402
from qccl.base.deadline import Deadline  # noqa: E402
from qccl.base.errors import (  # noqa: E402
    ArgumentError,
    CollectiveTimeout,
    EngineError,
    MismatchError,
    PeerLost,
    QcclError,
)
from qccl.base.lifetime import Registry, Stage, at_exit, keep  # noqa: E402
from qccl.meeting.launchers import check_alone  # noqa: E402
from qccl.meeting.topology import machine  # noqa: E402
from qccl.transports.native import NativeTransport  # noqa: E402

__all__ = ["MpiTransport", "world_size"]

#: tests in a row after which a wait in set-up naps: latency does not matter there
_YIELDS = 200
_NAP_SECONDS = 150e-6
_FINALIZE_SECONDS = 10

_LOST = tuple(getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"))
_FINALIZED = "MPI was finalized; make communicators while MPI runs, and close them before it ends"

#: failed transports and requests, whose memory MPI may still use
_abandoned: list[object] = []
_process = os.getpid()


def _relax(idle: int) -> None:
    """Yield the processor, which ranks may share, or nap."""
    if idle < _YIELDS:
        os.sched_yield()
    else:
        time.sleep(_NAP_SECONDS)


def _mapped(error: MPI.Exception) -> QcclError:
    """The library's error as an error of qccl."""
    kind = error.Get_error_class()
    text = f"MPI: {error.Get_error_string()}"
    if kind in _LOST:
        return PeerLost(f"a rank was lost ({text})")
    if kind == MPI.ERR_TRUNCATE:
        return MismatchError(f"a rank sent more than this rank expected ({text})")
    return EngineError(f"{text}; see the MPI library's documentation of this error class", code=error.Get_error_code())


def _raise(rank: int, code: int, peer: int, got: int, expected: int) -> None:
    """Raise the error that native code found on ``rank``: the library's, or a message of the wrong size."""
    if code:
        error = MPI.Exception(code)
        if peer >= 0 and error.Get_error_class() == MPI.ERR_TRUNCATE:
            raise MismatchError(f"rank {peer} sent more bytes than rank {rank} expected") from error
        raise _mapped(error) from error
    if peer >= 0:
        raise MismatchError(f"rank {peer} sent {got} bytes to rank {rank}, which expected {expected}")
    raise EngineError(_FINALIZED)


def world_size() -> int:
    """The number of ranks that MPI knows; initializes MPI. Raises EngineError if MPI has ended."""
    if MPI.Is_finalized():
        raise EngineError(_FINALIZED)
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return int(MPI.COMM_WORLD.Get_size())


def _bytes_of(handle: Any) -> bytes:
    """The bytes of one of the library's handles."""
    return ctypes.string_at(MPI._addressof(handle), MPI._sizeof(handle))


def _wire(comm: MPI.Intracomm) -> _host.MpiWire:
    """The transfers of ``comm``, made by the library that mpi4py has loaded."""
    library = ctypes.CDLL(MPI.__file__)  # mpi4py's module is linked to the MPI library
    names = ("MPI_Isend", "MPI_Irecv", "MPI_Testsome", "MPI_Get_count", "MPI_Cancel", "MPI_Finalized")
    status, mark = MPI.Status(), 0x5A17C0D
    status.Set_error(mark)
    return _host.MpiWire(
        {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names},
        {"communicator": _bytes_of(comm), "byte": _bytes_of(MPI.BYTE), "null_request": _bytes_of(MPI.REQUEST_NULL)},
        {
            "status_nbytes": MPI._sizeof(status),
            "status_error": _bytes_of(status).index(mark.to_bytes(4, sys.byteorder)),
            "undefined": MPI.UNDEFINED,
            "in_status": MPI.ERR_IN_STATUS,
            "pending": MPI.ERR_PENDING,
        },
        partial(_raise, comm.Get_rank()),
    )


def _keep_forever(kept: object) -> None:
    """Never free an object, nor anything to which it refers, not even at the interpreter's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _end() -> None:
    if os.getpid() != _process or MPI.Is_finalized():
        return
    if _abandoned:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(_FINALIZE_SECONDS)
    if not MPI.Is_initialized():
        return
    if _finalizes:
        MPI.Finalize()
        return
    # MPI may be finalized after the interpreter has freed its objects. Until then MPI writes into the memory of
    # receives under way, when other ranks send their last messages.
    _keep_forever(_abandoned)
    for transport in _open:
        if transport.wire.under_way:
            _keep_forever(transport)  # its progress_hook keeps the engine, too


def _forked(transport: MpiTransport) -> None:
    """In a child of os.fork(): MPI belongs to the parent."""
    transport._gone = True


_open = Registry(at_fork=_forked)
at_exit(Stage.LIBRARIES, _end)  # registered once, so that later exit handlers of the program may use MPI


class MpiTransport(NativeTransport):
    """The ranks of an MPI communicator.

    Waits are loops of tests with a deadline, except while MPI makes or frees a communicator: then all ranks are known
    to have come.

    Attributes:
        comm: the mpi4py communicator, which belongs to the transport.
    """

    name = "mpi"
    wire: _host.MpiWire
    eager_nbytes = 8 << 10

    def __init__(self, comm: MPI.Intracomm, timeout: float, progress_hook: Callable[[], object] = lambda: None) -> None:
        """Collective: take ownership of ``comm``; from_mpi() and world() make one."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.progress_hook = progress_hook
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._own(_wire(comm))
        _open.add(self)
        self.is_threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._set_topology([each.decode() for each in self.allgather(machine().encode(), timeout)])

    @classmethod
    def from_mpi(cls, comm: Any, timeout: float = 60.0) -> MpiTransport:
        """Collective: the ranks of an mpi4py intracommunicator, which is duplicated and left as it was.

        Raises ArgumentError if MPI has one rank only although there are more (see launchers.py). A program that wants
        one rank passes MPI.COMM_SELF.
        """
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"comm must be an mpi4py intracommunicator, e.g. MPI.COMM_WORLD, not {comm!r}")
        if os.getpid() != _process:
            raise EngineError("this process was forked by one that uses MPI, and cannot use it; start it by mpiexec")
        if MPI.Is_finalized():
            raise EngineError(_FINALIZED)
        if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() == 1 and comm != MPI.COMM_SELF:
            check_alone()
        try:
            duplicate, request = comm.Idup()
            _wait(request, timeout, "the duplication of the communicator", duplicate)
        except MPI.Exception as error:
            raise _mapped(error) from error
        return cls(duplicate, timeout)

    @classmethod
    def world(cls, timeout: float = 60.0) -> MpiTransport:
        """Collective: all ranks of the job."""
        world_size()
        return cls.from_mpi(MPI.COMM_WORLD, timeout)

    def split(self, color: int | None, key: int, timeout: float) -> MpiTransport | None:
        """Collective: MPI_Comm_split, after an all-gather with ``timeout``, because the split has no deadline."""
        # one byte each, because an all-gather of nothing may end although a rank has aborted
        self.allgather(b"\0", timeout)
        try:
            comm = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            raise _mapped(error) from error
        return None if comm == MPI.COMM_NULL else MpiTransport(cast(MPI.Intracomm, comm), timeout, self.progress_hook)

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Do two non-blocking all-gathers of MPI: one of the items' lengths, one of the items."""
        self._check_alive()
        lengths = [0] * self.size
        counts = memoryview(bytearray(8 * self.size)).cast("q")
        try:
            mine = memoryview(bytearray(len(item).to_bytes(8, "little")))
            request = self.comm.Iallgather([mine, 8, MPI.BYTE], [counts, 8, MPI.BYTE])
            _wait(request, timeout, "an all-gather", (mine, counts), self.progress_hook)
            lengths = list(counts)
            joined = bytearray(sum(lengths))
            request = self.comm.Iallgatherv([item, len(item), MPI.BYTE], [joined, lengths, MPI.BYTE])
            _wait(request, timeout, "an all-gather", (item, joined, lengths), self.progress_hook)
        except MPI.Exception as error:
            raise _mapped(error) from error
        ends = [sum(lengths[: r + 1]) for r in range(self.size)]
        return [bytes(joined[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def abort(self, reason: str) -> None:
        """Cancel the transfers under way. The communicator is never freed, because messages may still arrive."""
        if self._gone:
            return
        self._gone = True
        _abandoned.append(self)
        if MPI.Is_finalized():
            return
        self.wire.cancel()

    def close(self) -> None:
        """Free the communicator, unless another rank has not closed yet: then the process keeps it until its end."""
        if self._gone:
            return
        self._gone = True
        if self.wire.under_way:  # another rank has not closed yet, and its messages would reach another communicator
            keep(self)
        elif not MPI.Is_finalized():
            with contextlib.suppress(MPI.Exception):
                self.comm.Free()

    def _check_alive(self) -> None:
        if MPI.Is_finalized():
            raise EngineError(_FINALIZED)
        super()._check_alive()


def _wait(
    request: MPI.Request, timeout: float, what: str, memory: object, progress_hook: Callable[[], object] = lambda: None
) -> None:
    """Test until ``request``, which works on ``memory``, has completed, or raise CollectiveTimeout."""
    deadline = Deadline(timeout)
    idle = 0
    try:
        while not request.Test():
            if deadline.is_over:
                raise CollectiveTimeout(f"not every rank came to {what} within {timeout} s")
            progress_hook()
            idle += 1
            _relax(idle)
    except BaseException:
        _abandoned.append((request, memory))
        raise
