"""The runs of an engine on CUDA: which are pending, which have ended, and the failure that ends them all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from qccl.cuda.device import Device
from qccl.cuda.libraries import NOT_READY, mapped, require, translated
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, QcclError, gave_up

__all__ = ["CudaRun", "PendingRuns"]

#: status of cudaEventQuery while a capture forbids the query
_IN_CAPTURE = range(900, 909)


class CudaRun:
    """One run of a program (interface: Execution).

    Attributes:
        what: the call, for messages.
        call: its number.
        deadline: in time.monotonic() seconds.
        stream: the caller's.
        captured: the run became part of a graph, which has not been launched.
        event: complete when the run is.
        program: kept because the device reads its tables until the run has ended.
        on_stream: all of the run is on its streams.
        finish: called when the run has ended.
        done, failure: the outcome.
    """

    is_ordered = True

    def __init__(
        self, pending: PendingRuns, what: str, call: int, deadline: float, stream: int, *, captured: bool
    ) -> None:  # fmt: skip
        self._pending = pending
        self.what, self.call, self.deadline, self.stream, self.captured = what, call, deadline, stream, captured
        self.event: Any = None
        self.kept: object = None
        self.program: object = None
        self.on_stream = False
        self.done = False
        self.failure: QcclError | None = None
        self.finish: Callable[[], None] | None = None

    def step(self) -> bool:
        self._check()
        self._pending.sweep()
        self._check()
        return self.done

    def run(self, limit: float | None = None) -> bool:
        if self.captured:
            raise ArgumentError(f"{self.what} was put into a graph and has not run; synchronize after a replay")
        self._pending.wait_until(lambda: self.done or self.failure is not None, self.deadline, self.what, limit)
        self._check()
        return self.done

    def detach(self, *, at_once: bool) -> None:
        """Nothing: the run needs no thread."""

    def order(self) -> None:
        self._check()
        self._pending.order(self)

    def waits_for(self) -> str:
        return f"{self.what} has not ended"

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class PendingRuns:
    """The runs that have not ended, in the order in which they were started.

    Attributes:
        failure: the first one; it has failed all runs that were pending.
        closed: no failure counts any more.
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
            for run in self._runs:
                run.failure = error
        return True

    def late(self) -> CudaRun | None:
        """A run that is past its deadline, or None."""
        with self._lock:
            pending = list(self._runs)
        now = time.monotonic()
        return next((run for run in pending if run.deadline < now), None)

    def order(self, run: CudaRun) -> None:
        """Make the caller's stream wait for the run (the default stream is one of the current device)."""
        with self._lock, translated(), self._device.current():
            if not run.done and run.event is not None:
                require().runtime.streamWaitEvent(run.stream, run.event.ptr)

    def sweep(self) -> None:
        """Find the runs that have ended. Runs end in the order in which they were started."""
        query = require().runtime.eventQuery
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
            error = require().runtime.CUDARuntimeError(status)
            self._fail(mapped(error) or EngineError(str(error)))

    def _end(self, run: CudaRun) -> None:
        try:
            if run.finish is not None:
                run.finish()
        except Exception as error:  # while it computes the times of a trace
            run.failure = mapped(error) or gave_up(self._rank, error)
        run.done = True
        with self._lock:
            event, run.event = run.event, None
        self._device.give_back(event)
        run.kept = run.program = None

    def wait_until(self, condition: Callable[[], bool], deadline: float, what: str, limit: float | None = None) -> None:
        """Block until ``condition``, which ended runs make true, or ``limit``; all runs fail at the deadline."""
        nap = 10e-6
        while True:
            self.sweep()
            if condition() or self.failure is not None:
                return
            now = time.monotonic()
            if limit is not None and now > limit:
                return
            if now > deadline:
                self._fail(CollectiveTimeout(f"rank {self._rank} reached the deadline of {what}"))
                return
            time.sleep(nap)
            nap = min(2 * nap, 500e-6)
