"""The watchdog: a thread that watches an engine while runs are pending, because NCCL has no deadlines."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from qccl.base import threads
from qccl.engine.cuda.libraries import cuda_libraries

__all__ = ["Watchdog"]

#: interval between checks, and the longest sleep while no run is pending
_WATCH_SECONDS = 0.01
_IDLE_SECONDS = 1.0


class _Watched(Protocol):
    """The methods of CudaEngine that the watchdog calls."""

    def watch(self) -> bool: ...
    def has_pending_runs(self) -> bool: ...
    def on_watchdog_end(self) -> None: ...


class Watchdog:
    """The thread of one engine. It starts with the first run, and does not keep an idle engine alive."""

    def __init__(self, engine: _Watched, device: int, rank: int) -> None:
        self._engine = weakref.ref(engine)
        self._device, self._name = device, f"qccl watchdog of rank {rank}"
        self._wakeup = threading.Event()
        self._kept: list[_Watched | None] = []  # the engine, from the start of a run until the thread keeps it
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Watch now: a run was started, or the engine was closed."""
        self._wakeup.set()

    def start(self) -> None:
        """Start the thread if there is none, and watch now: a run was added, until whose end the engine must live."""
        self._kept[:] = [self._engine()]
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch,
                args=(self._engine, self._kept, self._device, self._wakeup),
                name=self._name,
                daemon=True,
            )
            threads.start(self._thread)
        if not self._wakeup.is_set():
            self.wake()

    def sleep(self) -> None:
        """Check rarely until the next wake(): no run is pending."""
        self._wakeup.clear()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False if there was none."""
        if self._thread is not None and self._thread.ident is not None:  # an exception may have ended its start
            self._thread.join(timeout)
        return self._thread is not None


def _watch(reference: weakref.ref[_Watched], kept: list[_Watched | None], device: int, wakeup: threading.Event) -> None:
    """Run the thread. Its relaxed capture mode leaves captures of other threads intact."""
    gpu = cuda_libraries()
    gpu.runtime.setDevice(device)
    gpu.bindings.cuThreadExchangeStreamCaptureMode(gpu.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    engine = reference()
    while engine is not None:
        kept.clear()  # before has_pending_runs(), which finds the runs that kept the engine so far
        if not engine.watch():
            break
        if not engine.has_pending_runs():  # otherwise the thread keeps the engine, which keeps the runs' memory
            del engine
        wakeup.wait(_IDLE_SECONDS)
        time.sleep(_WATCH_SECONDS)
        engine = reference()
    if engine is not None:
        engine.on_watchdog_end()
