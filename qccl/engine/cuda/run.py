"""The runs of an engine on CUDA: which are pending, which have ended, and the failure that ends them all.

Flags in pinned memory (flags.py) tell the host how far a run is, and the watchdog reads them every 10 ms: the run is
queued until its first kernel has run, and under way until its last kernel has run. The progress of its transfers is
unknown, because NCCL does not report it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from qccl.base import threads
from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, QcclError, as_failure
from qccl.engine.callbacks import WithCallbacks
from qccl.engine.control import Header
from qccl.engine.cuda.device import Device
from qccl.engine.cuda.libraries import NOT_READY, as_qccl_error, cuda_libraries, event_status, translated
from qccl.engine.end import End
from qccl.observe.call_records import CallRecord, State

__all__ = ["CudaRun", "PendingRuns"]

#: most entries of pending runs in the queues of their streams, which may share a queue of the hardware. That queue has
#: room for about 1,000 entries, some of them the caller's, and a launch blocks while it is full
_QUEUE_ENTRIES = 896
#: a waiting thread sleeps for this part of the time so far, and so notices the end at most 6%, or 0.5 ms, late
_NAPS = 16
_LEAST_NAP, _LONGEST_NAP = 10e-6, 500e-6


class CudaRun(WithCallbacks):
    """One run of a program (interface: Execution), or a call without a program, such as a barrier.

    Attributes:
        header: the contents of the message that the ranks compare.
        call: the number that keys the run's random numbers.
        deadline: the run's deadline, which counts from its first task on the device.
        stream: the caller's stream.
        captured: the run became part of a graph, which has not been launched.
        number: the run's number among the runs of its engine, as in the flags; 0 if it is captured.
        entries: the entries that the run has in the queues of its streams.
        event: an event that is complete when the run is.
        kept: objects that must live until the run has ended.
        program: kept because the device reads its tables until the run has ended.
        on_stream: all of the run is on its streams.
        finish: a function that is called when the run has ended.
        ended: time.monotonic() at the run's good end; None before.
    """

    is_stream_ordered = True

    def __init__(
        self, pending: PendingRuns, header: Header, call: int, limit: Deadline, stream: int = 0, captured: bool = False
    ) -> None:
        super().__init__()
        self._pending = pending
        self.header, self.call, self.deadline = header, call, limit
        self.stream, self.captured = stream, captured
        self.number = self.entries = 0
        self.event: Any = None
        self.kept: object = None
        self.program: object = None
        self.on_stream = False
        self.finish: Callable[[], None] | None = None
        self.ended: float | None = None

    @property
    def call_text(self) -> str:
        """The call with its number, for messages."""
        return self.header.call_text

    def record(self) -> CallRecord:
        """Make the run's record, as far as it is known now."""
        begun = self.deadline.begun
        state: State = "ended" if self.ended is not None else "queued" if begun is None else "under way"
        return CallRecord(self.header.sequence, self.call, self.header.text, state, begun, self.ended)

    def step(self) -> bool:
        """Look at the flags and ask CUDA for errors; the GPU makes progress by itself."""
        self._check()
        self._pending.sweep()
        if not self.done:
            self._pending.check_device()
        self._check()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        """Block until the run has ended on the GPU. Raises ArgumentError for a captured run, which has not begun."""
        if self.captured:
            raise ArgumentError(f"{self.call_text} was put into a graph and has not run; synchronize after a replay")
        text = f"reached the deadline of {self.call_text}"
        self._pending.wait_until(lambda: self.done or self.failure is not None, self.deadline, text, limit)
        self._check()
        return self.done

    def make_stream_wait(self) -> None:
        """Let the caller's stream wait for the run's event; the host goes on."""
        self._check()
        self._pending.make_stream_wait(self)

    def waits_for(self) -> str:
        """Say that the call has not ended: the host does not know which task the GPU is at."""
        return f"{self.call_text} has not ended"

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class PendingRuns:
    """The runs that have not ended, in the order in which they were started.

    Attributes:
        callbacks: calls the functions of the runs that have ended or failed.
        end: the end of the communicator; its failure has failed all pending runs.
    """

    def __init__(self, device: Device, end: End, fail: Callable[[QcclError], None]) -> None:
        """``fail`` is called with failures that are found here, and calls fail_all()."""
        self._device, self.end, self._rank, self._fail = device, end, end.rank, fail
        self._flags, self._started = device.flags, 0
        self._lock = threading.Lock()  # never held while anything blocks
        self._runs: deque[CudaRun] = deque()
        self._entries = 0  # the sum over the pending runs
        self.callbacks = CallbackThread(end.rank)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: CudaRun) -> None:
        """Add a run that is about to be put on its streams, and number it. Raises the failure if there was one."""
        with self._lock:
            self.end.check()  # after a failure nothing would fail this run later
            self._started += 1
            run.number = self._started % (1 << 32)
            self._runs.append(run)
            self._entries += run.entries

    def wait_for_room(self, run: CudaRun) -> None:
        """Block until ``run`` fits into the queues of the streams, or there was a failure.

        All runs fail if the first pending one does not begin within the timeout of ``run``. Once it has begun, its own
        deadline counts.
        """
        text = f"waited {run.deadline.seconds:.3g} s for an earlier call to begin, to make room for {run.call_text}"

        def wait_for(first: CudaRun) -> None:
            begins = Deadline(run.deadline.seconds)
            self.wait_until(lambda: first.deadline.counts or first.done, begins, text)
            self.wait_until(lambda: first.done, first.deadline, f"reached the deadline of {first.call_text}")

        while not self.end.is_over and (first := self._in_the_way_of(run)) is not None:
            wait_for(first)

    def _in_the_way_of(self, run: CudaRun) -> CudaRun | None:
        """The first pending run, if ``run`` does not fit into the queues beside the pending ones."""
        with self._lock:
            fits = run.entries + self._entries <= _QUEUE_ENTRIES
            return None if fits or not self._runs else self._runs[0]

    def fail_all(self, error: QcclError) -> bool:
        """Fail all runs that have not ended. False if there was a failure before, or after close."""
        self.sweep(apart=True)
        with self._lock:
            if self.end.is_over:
                return False
            self.end.fail(error)
            self._flags.set_failed()  # before the transfers end, or streams would continue with garbage
            failed = list(self._runs)
            for run in failed:
                run.failure = error
        for run in failed:
            self.callbacks.call(run)
        return True

    def overdue(self) -> CudaRun | None:
        """Find a run that is past its deadline."""
        with self._lock:
            pending = list(self._runs)
        return next((run for run in pending if run.deadline.is_over), None)

    def make_stream_wait(self, run: CudaRun) -> None:
        """Make the caller's stream wait for the run. Blocks while the stream's queue is full."""
        event = run.event  # None once the run has ended; without the lock, because the watchdog must not wait for it
        if event is not None:
            with translated, self._device.current():  # stream 0 is the current device's default stream
                cuda_libraries().runtime.streamWaitEvent(run.stream, event.ptr)

    def sweep(self, *, apart: bool = False) -> None:
        """Find the runs that have begun and ended, by their flags, in the order in which they were started.

        With ``apart`` this makes no call into CUDA that could block: a thread frees the objects that ended runs kept.
        """
        ended: list[CudaRun] = []
        with self._lock:
            while self._runs and self._runs[0].on_stream and self._flags.has_ended(self._runs[0].number):
                ended.append(self._runs.popleft())
                self._entries -= ended[-1].entries
            if self._runs and self._flags.has_begun(self._runs[0].number):
                self._runs[0].deadline.start()
        for run in ended:
            kept = self._end(run)
            if apart:
                self._device.garbage.later(kept.clear)

    def check_device(self) -> None:
        """Ask CUDA for errors of the pending runs, which the flags do not show, and fail all runs if there is one."""
        with self._lock:
            event = self._runs[0].event if self._runs and self._runs[0].on_stream else None
        with self._device.current():
            status = event_status(event.ptr) if event is not None else 0
        if status not in (0, NOT_READY):
            error = cuda_libraries().runtime.CUDARuntimeError(status)
            self._fail(as_qccl_error(error) or EngineError(str(error)))

    def _end(self, run: CudaRun) -> list[object]:
        """End a run well. Returns the objects that it has kept."""
        try:
            if run.finish is not None:
                run.finish()
        except Exception as error:  # while it computes the times of a trace
            run.failure = as_qccl_error(error) or as_failure(self._rank, error)
        run.deadline.start()  # for messages that are still under way
        if run.failure is None:
            run.ended = time.monotonic()
        run.done = True
        with self._lock:
            event, run.event = run.event, None
        self._device.give_back(event)
        kept = [run.kept, run.program, run.finish]
        run.kept = run.program = run.finish = None
        self.callbacks.call(run)
        return kept

    def wait_until(
        self, condition: Callable[[], bool], deadline: Deadline, text: str, limit: float | None = None
    ) -> None:  # fmt: skip
        """Block until ``condition`` is true or ``limit`` is reached. All pending runs fail at ``deadline``."""
        begin = time.monotonic()
        while True:
            self.sweep()
            if condition() or self.end.failure is not None:
                return
            self.check_device()
            if limit is not None and time.monotonic() > limit:
                return
            if deadline.is_over:
                self._fail(CollectiveTimeout(f"rank {self._rank} {text}"))
                return
            waited = time.monotonic() - begin
            time.sleep(min(max(_LEAST_NAP, waited / _NAPS), _LONGEST_NAP))


class CallbackThread:
    """Calls the functions of Work.add_done_callback() on a thread of its own, so that a slow one delays no deadline.

    The thread lives while there are functions to call.
    """

    def __init__(self, rank: int) -> None:
        self._name = f"qccl callbacks of rank {rank}"
        self._lock = threading.Lock()
        self._runs: deque[WithCallbacks] = deque()
        self._thread: threading.Thread | None = None

    def call(self, run: WithCallbacks) -> None:
        """Call the functions of a run that has ended or failed, after those of the runs before."""
        if not run.callbacks:  # a thread that adds a function from now on calls it itself
            return
        with self._lock:
            self._runs.append(run)
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            threads.start(thread)
        except EngineError:  # the interpreter is ending
            self._work()

    def join(self, timeout: float) -> None:
        """Wait until all functions have returned, at most ``timeout`` seconds."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._runs:
                    self._thread = None
                    return
                run = self._runs.popleft()
            run.call_back()
