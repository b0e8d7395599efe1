"""The CUDA engine: puts the steps of schedules on streams, and watches over them.

The host never waits in a call. Work is put behind the caller's stream, on a lane of its own for computing and one for
communicating (streams.py says what waits for what), and the caller's stream goes on behind it. All runs of a
communicator share the two lanes, so that each is ordered behind the one before; a program may be started again at once.

NCCL has no deadlines, so a thread watches: it asks which runs are done, and whether NCCL has met an error. At the
deadline of a run it aborts the communicator; then that run and all later ones fail, and so does the next call.

Legs that go through host memory are on two lanes more, which wait for messages by themselves; a courier moves those.
When the engine fails, the courier lets go of the lanes first: a stream that waits for a message would wait for ever.

In a stream capture the same steps go on lanes of their own, which join the capture by the caller's event. Nothing is
allocated and nothing waits, so a call becomes part of a CUDA graph. Replays are not watched: Communicator.check() is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qccl.cuda import source as cuda_source
from qccl.cuda.program import CudaProgram
from qccl.cuda.proxy import HostProxy
from qccl.cuda.run import CudaRun
from qccl.cuda.runtime import NOT_READY, mapped, on_device, require, wait_for
from qccl.cuda.staging import try_out
from qccl.cuda.state import DeviceState
from qccl.engine.control import Header, disagreement
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, PeerLost, QcclError, gave_up
from qccl.schedule import Queue, Schedule
from qccl.transports.base import DeviceTransport

require()  # without CUDA, this module says so when it is imported

__all__ = ["CudaEngine"]

#: how often the watching thread looks
_WATCH_SECONDS = 0.01
_IDLE_SECONDS = 1.0
#: how long a failing rank waits for its own thread that is in the middle of a call
_GRACE_SECONDS = 1.0
#: how long a process that ends waits for what is under way
_EXIT_SECONDS = 10.0
_EVENTS = 32
_HOST_TO_DEVICE = 1
#: of cudaEventQuery, when a capture that is under way does not allow it
_IN_CAPTURE = range(900, 909)

_process = os.getpid()
#: engines that may have work under way when the process ends
_live: weakref.WeakSet[CudaEngine] = weakref.WeakSet()
#: engines that failed with work under way: what the device may still use stays until it is done
_failed: list[CudaEngine] = []


class CudaEngine:
    """Runs schedules on one GPU of a transport. One thread at a time may use it."""

    #: few large chunks: each costs launches and a group, some ten microseconds, and fills the GPU only when it is large
    chunk_elements: int | None = 4 << 20

    def __init__(self, transport: DeviceTransport) -> None:
        self.transport = transport
        self.device = transport.device
        self.rank, self.size = transport.rank, transport.size
        cuda = require().cupy.cuda
        with on_device(self.device):
            self._home, *spare = (cuda.Stream(non_blocking=True) for _ in range(3))
            self._free = [cuda.Event(disable_timing=True) for _ in range(_EVENTS)]
        self._capture = spare
        self.queues: dict[Queue, int] = {Queue.COMPUTE: self._home.ptr, Queue.COMM: transport.stream}
        self.capture_queues: Mapping[Queue, int] = {Queue.COMPUTE: spare[0].ptr, Queue.COMM: spare[1].ptr}
        self._enqueuing = threading.RLock()
        self._state = threading.Lock()  # of what follows; never held while anything blocks
        self._pending: deque[CudaRun] = deque()
        self._failure: QcclError | None = None
        self._closed = False
        self._agreed: set[str] = set()
        self._captured: list[CudaProgram] = []
        self._threads = threading.local()
        self._wake = threading.Event()
        self._watcher: threading.Thread | None = None
        self._releases = False
        self._courier: HostProxy | None = None
        self._staged: list[Any] = []  # the streams of what goes through host memory
        _failed[:] = [engine for engine in _failed if engine.is_busy()]
        if not _live:  # so that it comes before what the transport does at the end of the process
            atexit.unregister(_wait_for_the_last)
            atexit.register(_wait_for_the_last)
        _live.add(self)

    @property
    def failure(self) -> QcclError | None:
        """What ended the group, or None."""
        return self._failure

    def compile(self, schedule: Schedule) -> CudaProgram:
        """Prepare a schedule of this rank: compile its kernels, and take its workspace."""
        self._check_usable()
        cuda_source.check_codecs(schedule)
        proxy = self._make_proxy() if schedule.staged_peers else None
        with self._translated(), on_device(self.device):
            return CudaProgram(self, schedule, proxy)

    def persistent(self, nbytes: int) -> DeviceState:
        """Memory for what lasts from run to run."""
        self._check_usable()
        with self._translated(), on_device(self.device):
            return DeviceState(self, nbytes)

    @property
    def is_idle(self) -> bool:
        """False: to know it, and to read the caller's memory, the host would have to wait."""
        return False

    def settle(self, timeout: float) -> None:
        """Return when no run is under way, or the group has failed."""
        if self._failure is None:
            self.check(timeout)

    def meet(self, header: Header, timeout: float) -> None:
        """Collective: return when all ranks have made this call."""
        self._check_usable()
        mine = header.pack()
        for peer, theirs in enumerate(self.transport.allgather(mine, timeout) if self.size > 1 else ()):
            if theirs != mine:
                raise disagreement(mine, theirs, self.rank, peer)
        if header.pairs and self.size > 1:
            self._meet_by_pairs(header, timeout)

    def _meet_by_pairs(self, header: Header, timeout: float) -> None:
        """Every rank says what it has to say to each other one, and looks at what is for itself."""
        said = [header.pack(peer) for peer in range(self.size)]
        length = len(said[0])
        for peer, theirs in enumerate(self.transport.allgather(b"".join(said), timeout)):
            for_me = theirs[length * self.rank :][:length]
            if for_me != said[peer]:
                raise disagreement(said[peer], for_me, self.rank, peer)

    def agree(self, header: Header, timeout: float) -> None:
        """Collective, on the first use of a signature: whether all ranks mean the same call."""
        agreed = header.text + "".join(header.pairs)
        if self.size == 1 or agreed in self._agreed:
            return
        self.meet(header, timeout)
        self._agreed.add(agreed)

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Wait until all runs are done, and ``stream``; raise what went wrong."""
        deadline = time.monotonic() + timeout
        self._check_usable()
        if stream is not None:
            event = self.take_event()
            with self._translated(), on_device(self.device):
                require().runtime.eventRecord(event.ptr, stream)
                try:
                    wait_for(event.ptr, deadline, "the stream", self._check_usable)
                except CollectiveTimeout as error:
                    self.fail(error)
                    raise
            with self._state:
                self._free.append(event)
        self.wait_until(lambda: not self._pending, deadline, "a call")
        self._check_usable()
        self.transport.check()

    def abort(self, reason: str) -> None:
        """Give up: everything under way here fails with ``reason``; the other ranks reach their deadlines."""
        self.fail(PeerLost(reason))

    def close(self, timeout: float) -> None:
        """Wait until all runs are done (at the latest ``timeout`` seconds), and leave. Idempotent."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        if self._failure is None:
            with contextlib.suppress(QcclError):  # it is in the runs that failed
                self.wait_until(lambda: not self._pending, deadline, "a call")
        self._closed = True
        if self._courier is not None:
            self._courier.close(max(deadline - time.monotonic(), 0.0))
        self._wake.set()
        if self._watcher is not None:
            self._watcher.join(_GRACE_SECONDS)
        _live.discard(self)

    def leave(self) -> None:
        """At the end of the process: as close(), and release the transport.

        NCCL may never return from that. So it is left to the watching thread, which the process need not wait for.
        """
        self._releases = True
        self.close(_EXIT_SECONDS)
        if self._watcher is not None:
            self._watcher.join(_EXIT_SECONDS)
        elif not self._captured:
            self.transport.close()

    def is_busy(self) -> bool:
        """Whether the device has not done all that it was told."""
        query = require().runtime.streamQuery
        return any(query(queue) == NOT_READY for queue in self.queues.values())

    # -- used by programs and runs -----------------------------------------------------------------------------------

    @property
    def home(self) -> int:
        """The stream on which every run begins and ends."""
        return int(self._home.ptr)

    def allocate(self, nbytes: int) -> Any:
        """Memory from CuPy's pool, from the part of it that belongs to the computing lane.

        What is freed there is given again only to what runs on that lane later, and every run begins and ends on it: so
        memory is never used twice at once, whichever lanes use it.
        """
        with self._home:
            return require().cupy.cuda.alloc(nbytes)

    def write(self, contents: Mapping[int, bytes]) -> list[Any]:
        """Write into memory of allocate(), behind whatever used it before. What is returned must live until then."""
        copy = require().runtime.memcpyAsync
        sources = [(address, ctypes.create_string_buffer(each, len(each))) for address, each in contents.items()]
        for address, source in sources:
            copy(address, ctypes.addressof(source), len(source), _HOST_TO_DEVICE, self._home.ptr)
        return sources

    def _make_proxy(self) -> HostProxy:
        """Who carries what goes through host memory; and the lanes for it. Raises ArgumentError where nobody can."""
        host = self.transport.host
        if host is None:
            raise ArgumentError(
                "inter='host' sends codes from host memory, and this communicator was made without a way to do that; "
                'make it over MPI: by qccl.init() under mpiexec, or Communicator.from_mpi(comm, backend="cuda")'
            )
        if not host.is_threaded:
            raise ArgumentError(
                "inter='host' needs an MPI library that several threads may use at once (MPI_THREAD_MULTIPLE), and "
                "here it was initialised for less; leave inter out, or mpi4py.rc.thread_level as it is"
            )
        if self._courier is None:
            failed = weakref.WeakMethod(self.fail)
            with self._translated(), on_device(self.device):
                self._staged = [require().cupy.cuda.Stream(non_blocking=True, priority=-1) for _ in range(2)]
                try_out(self._staged[0].ptr)
            self.queues |= zip((Queue.OUT, Queue.IN), (stream.ptr for stream in self._staged), strict=True)
            self._courier = HostProxy(host, lambda error: (fail := failed()) and fail(error))
            weakref.finalize(self, self._courier.dismiss).atexit = False  # then leave() sees to it
        return self._courier

    def start(
        self,
        program: CudaProgram,
        run: CudaRun,
        arrive: Callable[[Mapping[Queue, int]], None],
        enqueue: Callable[[Mapping[Queue, int], int], None],
    ) -> None:
        """Put a run on the lanes: behind what ``arrive`` waits for, where errors have no consequences, ``enqueue``."""
        queues = self.capture_queues if run.captured else self.queues
        with self._enqueuing:
            self._check_usable()
            with self._translated(), self._on_device():
                arrive(queues)
            run.event = self.take_event()
            if run.captured:
                self._captured.append(program)  # the graph holds its addresses for as long as it lives
            else:
                run.program = program
                with self._state:
                    self._pending.append(run)
                self._watch()
            try:
                with self._on_device():
                    enqueue(queues, run.event.ptr)
            except BaseException as error:  # part of it may be on its way
                ours = error if isinstance(error, QcclError) else mapped(error)
                self.fail(ours or gave_up(self.rank, error))
                if ours is None or self._failure is error:
                    raise
                raise (self._failure or ours) from error  # the reason may be another, such as the deadline
            run.on_stream = True

    def is_capturing(self, stream: int) -> bool:
        """Whether what is put on ``stream`` becomes part of a graph."""
        if stream in (0, 1):  # the legacy default stream cannot be captured
            return False
        with self._translated():
            return bool(require().runtime.streamIsCapturing(stream))

    def take_event(self) -> Any:
        """An event that nobody uses."""
        with self._state:
            if self._free:
                return self._free.pop()
        with on_device(self.device):
            return require().cupy.cuda.Event(disable_timing=True)

    def order(self, run: CudaRun) -> None:
        """Let the caller's stream wait for the run (the default stream is one of the current device)."""
        with self._state, self._translated(), self._on_device():
            if not run.done and run.event is not None:
                require().runtime.streamWaitEvent(run.stream, run.event.ptr)

    def sweep(self) -> None:
        """Find out which runs are done. They end in the order in which they were started."""
        query = require().runtime.eventQuery
        over: list[CudaRun] = []
        status = 0
        with self._state:
            while self._pending and self._pending[0].on_stream:
                status = query(self._pending[0].event.ptr)
                if status:
                    break
                over.append(self._pending.popleft())
        for run in over:
            self._conclude(run)
        if status in _IN_CAPTURE:
            raise ArgumentError(
                f"whether calls are done cannot be asked while this thread captures a stream (CUDA's error {status}); "
                f"ask before or after"
            )
        if status not in (0, NOT_READY):
            error = require().runtime.CUDARuntimeError(status)
            self.fail(mapped(error) or EngineError(str(error)))

    def _conclude(self, run: CudaRun) -> None:
        """The end of a run."""
        try:
            if run.finish is not None:
                run.finish()
        except Exception as error:  # of a trace
            run.failure = mapped(error) or gave_up(self.rank, error)
        run.done = True
        with self._state:
            self._free.append(run.event)
            run.event = None
        run.kept = run.program = None

    def wait_until(self, condition: Callable[[], bool], deadline: float, what: str, limit: float | None = None) -> None:
        """Block until ``condition``, which runs that end make true, or ``limit``; at the deadline the engine fails."""
        nap = 10e-6
        while True:
            self.sweep()
            if condition() or self._failure is not None:
                return
            now = time.monotonic()
            if limit is not None and now > limit:
                return
            if now > deadline:
                self.fail(CollectiveTimeout(f"rank {self.rank} reached the deadline of {what}"))
                return
            time.sleep(nap)
            nap = min(2 * nap, 500e-6)

    # -- failure -----------------------------------------------------------------------------------------------------

    def fail(self, error: QcclError) -> None:
        """End everything; only the first reason counts."""
        with self._state:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            for run in self._pending:
                run.failure = error
            if self._pending:
                _failed.append(self)
        if self._courier is not None:
            self._courier.abort(str(error))
        patient = self._enqueuing.acquire(timeout=_GRACE_SECONDS)  # it may be held by a call that NCCL blocks
        try:
            self.transport.abort(str(error))
        finally:
            if patient:
                self._enqueuing.release()

    def _watch(self) -> None:
        """Have a thread look after what is pending."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch_over, args=(weakref.ref(self),), daemon=True)
            self._watcher.name = f"qccl watchdog of rank {self.rank}"
            self._watcher.start()
        self._wake.set()

    def look(self) -> bool:
        """One look of the watching thread; whether there is anything left to watch."""
        try:
            self.sweep()
            self.transport.check()
        except Exception as error:
            self.fail(mapped(error) or gave_up(self.rank, error))
        with self._state:
            pending = list(self._pending)
        now = time.monotonic()
        late = next((run for run in pending if run.deadline < now), None)
        if late is not None:
            self.fail(CollectiveTimeout(f"rank {self.rank} reached the deadline of {late.what}; it was aborted"))
        if not pending:
            self._wake.clear()
            with self._state:
                if self._pending:  # started between the two
                    self._wake.set()
        return not self._closed and self._failure is None

    def _check_usable(self) -> None:
        if self._closed:
            raise ArgumentError("this engine is closed")
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the GPU the thread's current one, as the driver's launches need, if it is not."""
        before = require().runtime.getDevice()
        if before == self.device and getattr(self._threads, "ready", False):
            yield
        else:
            with on_device(self.device):
                self._threads.ready = True
                yield

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            ours = mapped(error)
            if ours is None:
                raise
            raise ours from error


def _watch_over(reference: weakref.ref[CudaEngine]) -> None:
    """The watching thread. It must not disturb captures of other threads.

    It keeps the engine, and so what the device uses, until all runs are done, even if nobody else does.
    """
    engine = reference()
    if engine is None:
        return
    gpu = require()
    gpu.runtime.setDevice(engine.device)
    gpu.bindings.cuThreadExchangeStreamCaptureMode(gpu.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    wake = engine._wake
    while engine is not None and engine.look():
        if not engine._pending:
            del engine
        wake.wait(_IDLE_SECONDS)
        time.sleep(_WATCH_SECONDS)
        engine = reference()
    if engine is not None and engine._releases:
        engine.transport.close()


def _wait_for_the_last() -> None:
    """A rank that ends its process must not take away what others still wait for."""
    for engine in list(_live) if os.getpid() == _process else ():  # a forked child cannot use CUDA
        engine.leave()
