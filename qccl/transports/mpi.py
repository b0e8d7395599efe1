"""Ranks that are MPI processes, through mpi4py (the only module that imports it).

What happens when a rank fails:

- A rank that raises tells the others over the engine's control messages. They raise PeerLost at once.
- A rank that only stops answering is found by the others' deadlines.
- A rank that dies (a signal) ends the whole job under MPICH, and under Open MPI unless it runs with
  ``mpiexec --with-ft ulfm``; then the others get PeerLost.

After a failure the process can always exit. MPI_Finalize waits for the other ranks, and may wait for ever for one
that hangs; so from the interpreter's exit on, a process with a failed transport ends by SIGALRM after 10 s (mpiexec
then ends the rest of the job, a stopped process included).

A process that os.fork() makes must leave MPI alone, also when it ends: there all transports are given up, and MPI is
not finalized, unless the program has imported mpi4py.MPI before qccl (then mpi4py does it, and the child must end by
os._exit).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import mpi4py

#: whether mpi4py leaves it to us
_finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
if _finalizes:
    mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from qccl.errors import (  # noqa: E402
    ArgumentError,
    CollectiveTimeout,
    EngineError,
    MismatchError,
    PeerLost,
    QcclError,
)
from qccl.transports.base import numbered  # noqa: E402

__all__ = ["MpiTransport"]

#: polls in a row without news after which the processor is left for a nap, which slow links do not notice (Linux makes
#: it 50 us longer); until then it is kept if each rank of the machine has one, and yielded otherwise
_YIELDS = 200
_NAP_SECONDS = 20e-6
#: and after so many for a longer one
_NAPS = 1000
_LONG_NAP_SECONDS = 150e-6
_FINALIZE_SECONDS = 10
#: in place of the bytes of a receive: a send, and a receive that may get less than there is room for
_SEND, _ANY = -1, -2

_OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
_LOST = tuple(getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"))

#: what MPI may still work on, with the memory: transports and calls that failed, and transports that were closed before
#: the other ranks'
_abandoned: list[object] = []
_unfinished: list[MpiTransport] = []
#: all transports
_open: weakref.WeakSet[MpiTransport] = weakref.WeakSet()
_is_fork = False


def _network() -> int:
    """A number of the network that this process is in: ranks of one machine may be behind links of their own."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def _relax(idle: int) -> None:
    """Give the processor away: ranks may share it."""
    if idle < _YIELDS:
        os.sched_yield()
    else:
        time.sleep(_NAP_SECONDS if idle < _NAPS else _LONG_NAP_SECONDS)


def _mapped(error: MPI.Exception) -> QcclError:
    """The library's error as one of ours."""
    kind = error.Get_error_class()
    text = f"MPI: {error.Get_error_string()}"
    if kind in _LOST:
        return PeerLost(f"a rank was lost ({text})")
    if kind == MPI.ERR_TRUNCATE:
        return MismatchError(f"a rank sent more than this rank expected ({text})")
    return EngineError(f"{text}; see the MPI library's documentation of this error class", code=error.Get_error_code())


@atexit.register
def _end() -> None:
    if _is_fork or MPI.Is_finalized():
        return
    if _abandoned:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(_FINALIZE_SECONDS)
    if _finalizes and MPI.Is_initialized():
        MPI.Finalize()


def _forked() -> None:
    """In the child of os.fork(): MPI belongs to the parent."""
    global _is_fork
    _is_fork = True
    for transport in _open:
        transport._gone = True


os.register_at_fork(after_in_child=_forked)


class MpiTransport:
    """The ranks of an MPI communicator (interface: Transport).

    Every wait is a test in a loop with a deadline, except ``allreduce`` (the yardstick, which is MPI's own blocking
    call) and the moment in which MPI makes or frees a communicator after all ranks have come to do so.
    """

    name = "mpi"
    eager_nbytes = 8 << 10

    def __init__(self, comm: MPI.Intracomm, timeout: float, attend: Callable[[], object] = lambda: None) -> None:
        """Take ``comm`` over; from_mpi() and world() make one."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self.attend = attend
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._requests: list[MPI.Request] = []
        self._posted: list[tuple[Hashable, int]] = []  # token and bytes (or as below) of each request
        self._statuses: list[MPI.Status] = []  # of what the last poll found
        self._late: list[Hashable] = []  # completed in a poll that raised
        self._gone = False
        _open.add(self)
        self.is_threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        places = self.allgather(f"{socket.gethostname()}\n{_network()}".encode(), timeout)
        self.nodes = numbered(places)
        self.shares_memory = len(set(places)) == 1
        hosts = [place.split(b"\n")[0] for place in places]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_size = hosts.count(hosts[self.rank])
        self._spins = _YIELDS if self.local_size <= len(os.sched_getaffinity(0)) else 0

    @classmethod
    def from_mpi(cls, comm: Any, timeout: float = 60.0) -> MpiTransport:
        """Collective: the ranks of an mpi4py intracommunicator, which is duplicated and left as it was."""
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"comm must be an mpi4py intracommunicator, e.g. MPI.COMM_WORLD, not {comm!r}")
        if _is_fork:
            raise EngineError("this process was forked by one that uses MPI, and cannot use it; start it by mpiexec")
        try:
            duplicate, request = comm.Idup()
            _wait(request, timeout, "the duplication of the communicator", duplicate)
        except MPI.Exception as error:
            raise _mapped(error) from error
        return cls(duplicate, timeout)

    @classmethod
    def world(cls, timeout: float = 60.0) -> MpiTransport:
        """Collective: all ranks of the job."""
        if not MPI.Is_initialized():
            MPI.Init_thread()
        return cls.from_mpi(MPI.COMM_WORLD, timeout)

    def buffer(self, address: int, nbytes: int) -> list[Any]:
        return [MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE]

    def send(self, peer: int, tag: int, buffer: list[Any], token: Hashable) -> None:
        if self._gone or MPI.Is_finalized():
            self._check_alive()
        try:
            self._requests.append(self._comm.Isend(buffer, peer, tag))
        except MPI.Exception as error:
            raise _mapped(error) from error
        self._posted.append((token, _SEND))

    def receive(self, peer: int, tag: int, buffer: list[Any], token: Hashable, *, at_most: bool = False) -> None:
        if self._gone or MPI.Is_finalized():
            self._check_alive()
        try:
            self._requests.append(self._comm.Irecv(buffer, peer, tag))
        except MPI.Exception as error:
            raise _mapped(error) from error
        self._posted.append((token, _ANY if at_most else buffer[1]))

    def poll(self, *, idle: int) -> Sequence[Hashable]:
        if idle > self._spins:
            _relax(idle)
        if self._late:
            late, self._late = self._late, []
            return late
        if not self._requests:
            return ()
        self._statuses = []
        try:
            done = MPI.Request.Testsome(self._requests, self._statuses)
        except MPI.Exception as error:
            raise self._fault(error) from error
        return self._retire(done) if done else ()

    def split(self, color: int | None, key: int, timeout: float) -> MpiTransport | None:
        # All have come, so Split, which has no deadline, has nobody to wait for. One byte each, because the second half
        # of an all-gather of nothing also ends without those who have given up.
        self.allgather(b"\0", timeout)
        try:
            comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            raise _mapped(error) from error
        return None if comm == MPI.COMM_NULL else MpiTransport(cast(MPI.Intracomm, comm), timeout, self.attend)

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        self._check_alive()
        lengths = [0] * self.size
        counts = memoryview(bytearray(8 * self.size)).cast("q")
        try:
            mine = memoryview(bytearray(len(item).to_bytes(8, "little")))
            request = self._comm.Iallgather([mine, 8, MPI.BYTE], [counts, 8, MPI.BYTE])
            _wait(request, timeout, "an all-gather", (mine, counts), self.attend)
            lengths = list(counts)
            joined = bytearray(sum(lengths))
            request = self._comm.Iallgatherv([item, len(item), MPI.BYTE], [joined, lengths, MPI.BYTE])
            _wait(request, timeout, "an all-gather", (item, joined, lengths), self.attend)
        except MPI.Exception as error:
            raise _mapped(error) from error
        ends = [sum(lengths[: r + 1]) for r in range(self.size)]
        return [bytes(joined[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str) -> None:
        """MPI_Allreduce, blocking, as programs call it; it has no deadline."""
        self._check_alive()
        datatype = _datatype(dtype)
        if op not in _OPS:
            raise ArgumentError(f"MPI's all-reduce is compared for ops {', '.join(_OPS)}, not {op!r}")
        nbytes = count * datatype.Get_size()
        given = MPI.IN_PLACE if source == target else [MPI.memory.fromaddress(source, nbytes), count, datatype]
        try:
            self._comm.Allreduce(given, [MPI.memory.fromaddress(target, nbytes), count, datatype], _OPS[op])
        except MPI.Exception as error:
            raise _mapped(error) from error

    def abort(self, reason: str) -> None:
        if self._gone:
            return
        self._gone = True
        _abandoned.append(self)
        if MPI.Is_finalized():
            return
        with contextlib.suppress(MPI.Exception):
            for request, (_, expected) in zip(self._requests, self._posted, strict=True):
                if expected != _SEND and request != MPI.REQUEST_NULL:
                    request.Cancel()
            MPI.Request.Testsome(self._requests)

    def close(self) -> None:
        if self._gone:
            return
        self._gone = True
        if self._requests:  # a rank has not closed yet, and what it sends would come to another communicator
            _unfinished.append(self)
        elif not MPI.Is_finalized():
            with contextlib.suppress(MPI.Exception):
                self._comm.Free()

    def _check_alive(self) -> None:
        if self._gone or MPI.Is_finalized():
            what = "MPI was finalized" if MPI.Is_finalized() else "this transport was closed or given up"
            raise EngineError(f"{what}; make communicators while MPI runs, and close them before it ends")

    def _retire(self, done: list[int]) -> list[Hashable]:
        """Forget completed requests; returns their tokens. Raises MismatchError for a message that was too short."""
        requests, posted = self._requests, self._posted
        tokens: list[Hashable] = []
        fault = None
        for k, i in enumerate(done):
            token, expected = posted[i]
            if expected >= 0 and (got := self._statuses[k].Get_count(MPI.BYTE)) != expected:
                peer = self._statuses[k].Get_source()
                fault = MismatchError(f"rank {peer} sent {got} bytes to rank {self.rank}, which expected {expected}")
            else:
                tokens.append(token)
        for i in done if len(done) == 1 else sorted(done, reverse=True):
            last, entry = requests.pop(), posted.pop()
            if i < len(requests):
                requests[i], posted[i] = last, entry
        if fault is not None:
            self._late = tokens
            raise fault
        return tokens

    def _fault(self, error: MPI.Exception) -> QcclError:
        """The error of a failed Testsome. What completed in it is told by the next poll.

        The library says which requests have ended only by clearing their handles, so the one that failed counts as
        completed, too; after an error nobody may use its data.
        """
        if error.Get_error_class() == MPI.ERR_IN_STATUS:
            codes = [status.Get_error() for status in self._statuses]
            bad = [code for code in codes if MPI.Get_error_class(code) not in (MPI.SUCCESS, MPI.ERR_PENDING)]
            error = MPI.Exception(bad[0]) if bad else error
        ended = [request == MPI.REQUEST_NULL for request in self._requests]
        self._late = [token for (token, _), end in zip(self._posted, ended, strict=True) if end]
        self._posted = [entry for entry, end in zip(self._posted, ended, strict=True) if not end]
        self._requests = [request for request, end in zip(self._requests, ended, strict=True) if not end]
        return _mapped(error)


def _wait(
    request: MPI.Request, timeout: float, what: str, memory: object, attend: Callable[[], object] = lambda: None
) -> None:
    """Test until ``request``, which works on ``memory``, has completed, or raise CollectiveTimeout."""
    deadline = time.monotonic() + timeout
    idle = 0
    try:
        while not request.Test():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"not every rank came to {what} within {timeout} s")
            attend()
            idle += 1
            _relax(idle)
    except BaseException:
        _abandoned.append((request, memory))
        raise


def _datatype(name: str) -> MPI.Datatype:
    for code, known in (("float32", MPI.FLOAT), ("float16", MPI.FLOAT16_T), ("bfloat16", MPI.BFLOAT16_T)):
        if name == code and known != MPI.DATATYPE_NULL:
            return known
    raise ArgumentError(f"this MPI library has no all-reduce of {name}; compare with float32")
