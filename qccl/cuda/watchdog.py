"""The watchdog: a thread that watches an engine while runs are pending, because NCCL has no deadlines."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from qccl import threads
from qccl.cuda.libraries import cuda_libraries

__all__ = ["Watchdog", "Watched"]

#: interval between checks, and the longest sleep while no run is pending
_WATCH_SECONDS = 0.01
_IDLE_SECONDS = 1.0


class Watched(Protocol):
    """An engine that a watchdog watches."""

    def watch(self) -> bool:
        """Check for ended runs, failures and deadlines; False if there is nothing to watch any more."""

    def has_pending_runs(self) -> bool:
        """Whether a run is pending. While one is, the thread keeps the engine, which keeps the memory of the runs."""

    def on_watchdog_end(self) -> None:
        """Called by the thread just before it ends."""


class Watchdog:
    """The thread of one engine. It starts with the first run, and does not keep an idle engine alive."""

    def __init__(self, engine: Watched, device: int, rank: int) -> None:
        self._engine = weakref.ref(engine)
        self._device, self._name = device, f"qccl watchdog of rank {rank}"
        self._wakeup = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    def wake(self) -> None:
        """Watch now: a run was started, or the engine was closed."""
        self._wakeup.set()

    def start(self) -> None:
        """Start the thread if there is none, and watch now."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch, args=(self._engine, self._device, self._wakeup), name=self._name, daemon=True
            )
            threads.start(self._thread)
        if not self._wakeup.is_set():
            self.wake()

    def sleep(self) -> None:
        """Check rarely until the next wake(): no run is pending."""
        self._wakeup.clear()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None and self._thread.ident is not None:  # an exception may have ended its start
            self._thread.join(timeout)


def _watch(reference: weakref.ref[Watched], device: int, wakeup: threading.Event) -> None:
    """The thread. Its relaxed capture mode leaves captures of other threads intact."""
    gpu = cuda_libraries()
    gpu.runtime.setDevice(device)
    gpu.bindings.cuThreadExchangeStreamCaptureMode(gpu.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    engine = reference()
    while engine is not None and engine.watch():
        if not engine.has_pending_runs():
            del engine
        wakeup.wait(_IDLE_SECONDS)
        time.sleep(_WATCH_SECONDS)
        engine = reference()
    if engine is not None:
        engine.on_watchdog_end()
