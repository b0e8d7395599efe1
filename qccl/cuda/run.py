"""The runs of an engine on CUDA: which are pending, which have ended, and the failure that ends them all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from qccl.cuda.device import Device
from qccl.cuda.libraries import NOT_READY, as_qccl_error, cuda_libraries, translated
from qccl.engine.callbacks import WithCallbacks
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, QcclError, gave_up

__all__ = ["CudaRun", "PendingRuns"]

#: status of cudaEventQuery while a capture forbids the query
_IN_CAPTURE = range(900, 909)


class CudaRun(WithCallbacks):
    """One run of a program (interface: Execution).

    Attributes:
        call_text: the call with its number, for messages.
        call: the number that keys its random numbers.
        deadline: in time.monotonic() seconds.
        stream: the caller's.
        captured: the run became part of a graph, which has not been launched.
        event: complete when the run is.
        kept: objects that must live until the run has ended.
        program: kept because the device reads its tables until the run has ended.
        on_stream: all of the run is on its streams.
        finish: called when the run has ended.
    """

    is_stream_ordered = True

    def __init__(
        self, pending: PendingRuns, call_text: str, call: int, deadline: float, stream: int, *, captured: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self._pending = pending
        self.call_text, self.call, self.deadline = call_text, call, deadline
        self.stream, self.captured = stream, captured
        self.event: Any = None
        self.kept: object = None
        self.program: object = None
        self.on_stream = False
        self.finish: Callable[[], None] | None = None

    def step(self) -> bool:
        self._check()
        self._pending.sweep()
        self._check()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        if self.captured:
            raise ArgumentError(f"{self.call_text} was put into a graph and has not run; synchronize after a replay")
        text = f"reached the deadline of {self.call_text}"
        self._pending.wait_until(lambda: self.done or self.failure is not None, self.deadline, text, limit)
        self._check()
        return self.done

    def make_stream_wait(self) -> None:
        self._check()
        self._pending.make_stream_wait(self)

    def waits_for(self) -> str:
        return f"{self.call_text} has not ended"

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class PendingRuns:
    """The runs that have not ended, in the order in which they were started.

    Attributes:
        failure: the first one; it has failed all runs that were pending.
        closed: set by CudaEngine.close(); later failures are ignored.
    """

    def __init__(self, device: Device, rank: int, fail: Callable[[QcclError], None]) -> None:
        """``fail`` is called with failures that are found here; it calls fail_all()."""
        self._device, self._rank, self._fail = device, rank, fail
        self._lock = threading.Lock()  # never held while anything blocks
        self._runs: deque[CudaRun] = deque()
        self.failure: QcclError | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: CudaRun) -> None:
        """Add a run that is about to be put on its streams."""
        with self._lock:
            self._runs.append(run)

    def fail_all(self, error: QcclError) -> bool:
        """Fail all pending runs. False if there was a failure before, or after close."""
        with self._lock:
            if self.failure is not None or self.closed:
                return False
            self.failure = error
            failed = list(self._runs)
            for run in failed:
                run.failure = error
        for run in failed:
            run.call_back()
        return True

    def overdue(self) -> CudaRun | None:
        """A run that is past its deadline, or None."""
        with self._lock:
            pending = list(self._runs)
        now = time.monotonic()
        return next((run for run in pending if run.deadline < now), None)

    def make_stream_wait(self, run: CudaRun) -> None:
        """Make the caller's stream wait for the run."""
        with self._lock, translated(), self._device.current():  # stream 0 is the current device's default stream
            if not run.done and run.event is not None:
                cuda_libraries().runtime.streamWaitEvent(run.stream, run.event.ptr)

    def sweep(self) -> None:
        """Find the runs that have ended. Runs end in the order in which they were started."""
        query = cuda_libraries().runtime.eventQuery
        ended: list[CudaRun] = []
        status = 0
        with self._lock:
            while self._runs and self._runs[0].on_stream:
                status = query(self._runs[0].event.ptr)
                if status:
                    break
                ended.append(self._runs.popleft())
        for run in ended:
            self._end(run)
        if status in _IN_CAPTURE:
            raise ArgumentError(
                f"CUDA cannot say whether calls are done while this thread captures a stream (error {status}); ask "
                f"before or after the capture"
            )
        if status not in (0, NOT_READY):
            error = cuda_libraries().runtime.CUDARuntimeError(status)
            self._fail(as_qccl_error(error) or EngineError(str(error)))

    def _end(self, run: CudaRun) -> None:
        try:
            if run.finish is not None:
                run.finish()
        except Exception as error:  # while it computes the times of a trace
            run.failure = as_qccl_error(error) or gave_up(self._rank, error)
        run.done = True
        with self._lock:
            event, run.event = run.event, None
        self._device.give_back(event)
        run.kept = run.program = None
        run.call_back()

    def wait_until(self, condition: Callable[[], bool], deadline: float, text: str, limit: float | None = None) -> None:
        """Block until ``condition`` is true or ``limit`` is reached. All pending runs fail at ``deadline``."""
        nap = 10e-6
        while True:
            self.sweep()
            if condition() or self.failure is not None:
                return
            now = time.monotonic()
            if limit is not None and now > limit:
                return
            if now > deadline:
                self._fail(CollectiveTimeout(f"rank {self._rank} {text}"))
                return
            time.sleep(nap)
            nap = min(2 * nap, 500e-6)
