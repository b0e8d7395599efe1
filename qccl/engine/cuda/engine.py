"""The CUDA engine: puts the tasks of schedules on streams, and makes failures and deadlines end all runs.

The host waits in a call only if the runs under way fill a stream's queue. A run's work is ordered behind the
caller's stream, on one stream for computation and one for communication (streams.py derives the events between them),
and the caller's stream then waits for the run. All runs of a communicator share these streams, so each is ordered
behind the one before, and a program may be started again at once.

NCCL has no deadlines. So a watchdog thread (watchdog.py) checks for ended runs, errors of NCCL and deadlines, and
aborts the communicator. Then all pending runs fail, their results become NaN on the device, and every later call raises
the error. The watchdog makes no call into CUDA that could block: flags in pinned memory (flags.py) tell it how far the
runs are.

Transfers through host memory use two more streams, which wait for messages without the host; a host proxy
(proxy.py) moves the messages. On failure the proxy releases these streams first, or they would wait for ever.

In a stream capture the same tasks go on streams of their own, which join the capture by the caller's event. A captured
call allocates nothing and waits for nothing, so it becomes part of a CUDA graph. The watchdog does not see replays:
Communicator.check() does.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, QcclError, as_failure
from qccl.base.lifetime import Registry, Stage
from qccl.collectives.chunks import GPU
from qccl.collectives.schedule import Queue, Schedule
from qccl.engine.base import Bound, Numbers, Progress, Request, check_addresses
from qccl.engine.control import ControlKind, Header
from qccl.engine.cuda.consistency import Consistency
from qccl.engine.cuda.device import Device, DeviceState
from qccl.engine.cuda.libraries import as_qccl_error, cuda_libraries, on_device, translated, wait_for
from qccl.engine.cuda.program import CudaProgram
from qccl.engine.cuda.proxy import HostProxy
from qccl.engine.cuda.rig import CudaRig
from qccl.engine.cuda.run import CudaRun, PendingRuns
from qccl.engine.cuda.source import check_codecs
from qccl.engine.cuda.staging import check_stream_flags
from qccl.engine.cuda.watchdog import Watchdog
from qccl.engine.cuda.workspace import Workspace
from qccl.engine.end import End
from qccl.observe.call_records import CallRecord
from qccl.observe.tallies import Counted, Tallies
from qccl.transports.base import DeviceTransport

cuda_libraries()  # importing this module without CUDA raises its error

__all__ = ["CudaEngine"]

#: calls in the records, the same number as on the host (kernels/engine/recorder.h)
_CALLS = 1024
#: how long fail() waits for this rank's thread that is in the middle of a call
_GRACE_SECONDS = 1.0
#: how long the end of the process waits for pending runs
_EXIT_SECONDS = 10.0

#: engines that failed with pending runs: they keep memory that the device may still use
_failed: list[CudaEngine] = []


class CudaEngine:
    """Runs schedules on one GPU of a transport (interface: engine.base.Engine). One thread at a time may use it."""

    def __init__(self, transport: DeviceTransport, timeout: float) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.end, self.numbers = End(self.rank), Numbers()
        self.timeout = timeout
        self.chunking = GPU[transport.link]
        self.tallies = Tallies(are_timed=False)  # events with times would cost the device time
        self.device = Device(transport.device, transport.stream)
        fail = weakref.WeakMethod(self.fail)
        self._fail_weakly = lambda error: (method := fail()) and method(error)
        self._pending = PendingRuns(self.device, self.end, self._fail_weakly)
        self._consistency = Consistency(transport)
        self._watchdog = Watchdog(self, transport.device, self.rank)
        self._enqueuing = threading.RLock()  # held while a run is put on its streams
        self._workspace = Workspace(self.device, self.size)
        self._captured: list[CudaProgram] = []
        self._log = deque[CudaRun](maxlen=_CALLS)  # any thread may copy it at any time, also a handler of a signal
        self._releases = False
        self._proxy: HostProxy | None = None
        _failed[:] = [engine for engine in _failed if engine.device.is_busy()]
        _live.add(self)

    @property
    def is_idle(self) -> bool:
        """Always False: without waiting the host can neither know it nor read the caller's memory."""
        return False

    def compile(self, schedule: Schedule, counted: Counted | None = None) -> CudaProgram:
        """Prepare a schedule of this rank: compile its kernels, write its tables, and make room in the workspace."""
        self.end.check()
        schedule.check_rank(self.rank, self.size)
        check_codecs(schedule)
        proxy = self._make_proxy() if schedule.staged_peers else None
        with translated, on_device(self.device.number):
            return CudaProgram(self.device, self.transport, schedule, self._workspace, proxy, counted)

    def persistent(self, nbytes: int) -> DeviceState:
        """Allocate memory that keeps its contents from run to run."""
        self.end.check()
        with translated, on_device(self.device.number):
            return DeviceState(self.device, nbytes)

    def start(
        self, program: CudaProgram, bound: Bound, request: Request, kept: object = None, streams: Sequence[int] = ()
    ) -> CudaRun:
        """Put a run on its streams; see engine.base.Engine."""
        streams, numbers = tuple(streams) or (0,), self.numbers
        captured, trace, progress = self.device.is_capturing(streams[0]), request.trace, request.progress
        header = Header(ControlKind.CALL, numbers.sequence, bound.text, bound.pairs)
        if captured and progress is Progress.SYNCHRONOUS:
            raise ArgumentError(
                f'nonfinite="error" waits for the result of {header.call_text}, and a call in a stream capture has '
                f"none yet; leave it out, and check the result after a replay"
            )
        check_addresses(bound.addresses, program.callers)
        if captured:
            program.check_capture(traced=trace is not None)
        # counts from the run's first task
        limit = Deadline(self.timeout if request.timeout is None else request.timeout, counts=False)
        run = CudaRun(self._pending, header, numbers.calls, limit, streams[0], captured=captured)
        queues = self.device.capture_queues if captured else self.device.queues
        if not captured:
            run.entries = program.entries
            self._pending.wait_for_room(run)
        with self._enqueuing, translated, self.device.current():
            self.end.check()
            # an error here has no consequences for the group
            program.wait_for_streams(streams[:1] if captured else streams, queues)
            run.event = self.device.take_event()
            run.kept = kept
            numbers.take()
            if captured:
                self._captured.append(program)  # the graph uses its memory for as long as it lives
            else:
                run.program = program
                self._log.append(run)
                self._pending.add(run)
                self._watchdog.start()
            try:
                lr = 1.0 if request.lr is None else request.lr
                program.enqueue(run, queues, bound.addresses, lr=lr, trace=trace)
            except BaseException as error:  # part of the run may be on its streams
                ours = error if isinstance(error, QcclError) else as_qccl_error(error)
                self.fail(ours or as_failure(self.rank, error))
                if ours is None or self.end.failure is error:
                    raise
                raise (self.end.failure or ours) from error  # an earlier failure, such as the deadline, is the reason
            run.on_stream = True
            if not captured:
                program.count_run()
        if progress is Progress.CALLER:
            run.make_stream_wait()
        elif progress is Progress.SYNCHRONOUS:
            run.run()
        return run

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no run is pending; see engine.base.Engine."""
        if not self.end.is_over:
            self.check(timeout)

    def barrier(self, text: str) -> None:
        """Collective: return when all ranks have made this call."""
        self.end.check()
        sequence, call = self.numbers.take()
        self.numbers.go_back(call)
        header = Header(ControlKind.CALL, sequence, text)
        waiting = self._log_waiting(header)
        if refused := self._consistency.compare(header, self.timeout):
            raise EngineError(refused)
        waiting.ended = time.monotonic()

    def check_consistent(self, text: str, pairs: tuple[str, ...], refusal: str = "", *, again: bool = False) -> str:
        """Collective until the ranks have agreed on a text; see engine.base.Engine."""
        self.end.check()
        header = Header(ControlKind.CALL, self.numbers.sequence, text, pairs)
        self._log_waiting(header)
        compare = self._consistency.compare if again else self._consistency.compare_once
        refused = compare(header, self.timeout, refusal)
        self._log.pop()  # the call itself begins now, and has an entry of its own
        return refused

    def _log_waiting(self, header: Header) -> CudaRun:
        """Log a call in which the host waits for the other ranks."""
        run = CudaRun(self._pending, header, self.numbers.calls, Deadline(self.timeout))
        self._log.append(run)
        return run

    def check(self, timeout: float, stream: int | None = None) -> None:
        """Wait for all pending runs, and for ``stream``; raise their failures."""
        self.end.check()
        if stream is not None:
            self._wait_for_stream(stream, Deadline(timeout))
        self._wait_for_runs(Deadline(timeout))
        self.end.check()
        self.transport.check()

    def records(self) -> list[CallRecord]:
        """The last calls, without those in graphs, as far as the watchdog has seen."""
        return [run.record() for run in self._log.copy()]

    def rig(self) -> CudaRig:
        """See engine.base.Engine. Waits for the work of the legacy default stream, which would slow the calls."""
        self.check(self.timeout, 0)
        return CudaRig(self.device, lambda stream: self.check(self.timeout, stream))

    def _wait_for_stream(self, stream: int, deadline: Deadline) -> None:
        event = self.device.take_event()
        with translated, on_device(self.device.number):
            cuda_libraries().runtime.eventRecord(event.ptr, stream)
            try:
                wait_for(event.ptr, deadline, "the stream", self.end.check)
            except CollectiveTimeout as error:
                self.fail(error)
                raise
        self.device.give_back(event)

    def _wait_for_runs(self, deadline: Deadline) -> None:
        text = f"has pending calls that did not end within {deadline.seconds} s"
        self._pending.wait_until(lambda: not self._pending, deadline, text)

    def _make_proxy(self) -> HostProxy:
        """The proxy for transfers through host memory. Raises ArgumentError if the transport cannot carry them."""
        host = self.transport.host
        if host is None:
            raise ArgumentError(
                "inter='host' sends codes from host memory, which this communicator has no transport for; "
                'make it over MPI: by qccl.init() under mpiexec, or Communicator.from_mpi(comm, backend="cuda")'
            )
        if not host.is_threaded:
            raise ArgumentError(
                "inter='host' needs MPI_THREAD_MULTIPLE, and MPI was initialised for less; leave inter out, or leave "
                "mpi4py.rc.thread_level at its default"
            )
        if self._proxy is None:
            with translated, on_device(self.device.number):
                self.device.add_staged_queues()
                check_stream_flags(self.device.queues[Queue.OUT])
            self._proxy = HostProxy(host, self._fail_weakly)
            weakref.finalize(self, self._proxy.stop).atexit = False  # leave() stops it at the end of the process
        return self._proxy

    # -- failure and end ---------------------------------------------------------------------------------------------

    def fail(self, error: QcclError) -> None:
        """Fail all pending runs, and abort the transport; the other ranks reach their deadlines."""
        if not self._pending.fail_all(error):
            return
        if self._pending:
            _failed.append(self)
        if self._proxy is not None:
            self._proxy.abort(str(error))
        acquired = self._enqueuing.acquire(timeout=_GRACE_SECONDS)  # a call that NCCL blocks may hold it
        try:
            self.transport.abort(str(error))
        finally:
            if acquired:
                self._enqueuing.release()

    def retire(self, error: QcclError) -> None:
        """Do fail(): no transport of device memory makes another group."""
        self.fail(error)

    def recover(self) -> None:
        """Do nothing: a ``with`` releases each lock, also if a signal handler raises."""

    def close(self, timeout: float) -> None:
        """Wait until no run is pending (at most ``timeout`` seconds), and leave. Idempotent."""
        if self.end.has_left:
            return
        deadline = Deadline(timeout)
        if self.end.failure is None:
            with contextlib.suppress(QcclError):  # the failed runs have the error
                self._wait_for_runs(deadline)
        self.end.close()
        if self._proxy is not None:
            self._proxy.close(deadline)
        self._watchdog.wake()
        self._watchdog.join(_GRACE_SECONDS)
        self._pending.callbacks.join(_GRACE_SECONDS)
        if self.end.failure is None:  # after a failure the device may still use the transport
            self._workspace.release()
        self.end.has_left = True
        _live.discard(self)

    def leave(self) -> None:
        """At the end of the process: wait for pending runs, and release the transport.

        NCCL may never return from the release, so the watchdog's thread does it: the process need not wait for it.
        """
        self._releases = True
        self.close(_EXIT_SECONDS)
        if not self._watchdog.join(_EXIT_SECONDS) and not self._captured:
            self.transport.close()

    # -- used by the watchdog ----------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """Check for ended runs, failures and deadlines; False if there is nothing to watch any more."""
        try:
            self._pending.sweep(apart=True)
            self.transport.check()
        except Exception as error:
            self.fail(as_qccl_error(error) or as_failure(self.rank, error))
        if run := self._pending.overdue():
            self.fail(CollectiveTimeout(f"rank {self.rank} reached the deadline of {run.call_text}; it was aborted"))
        if not self._pending:
            self._watchdog.sleep()
            if self._pending:  # a run was started in between
                self._watchdog.wake()
        return not self.end.is_over

    def has_pending_runs(self) -> bool:
        """Whether a run has not ended on its streams. Until then the watchdog keeps the engine alive."""
        return bool(self._pending)

    def on_watchdog_end(self) -> None:
        """Release the transport at the end of the process, on the watchdog's thread."""
        if self._releases:
            self.transport.close()


#: engines that may have pending runs when the process ends, for which other ranks wait
_live = Registry((CudaEngine.leave,), Stage.ENGINES)
