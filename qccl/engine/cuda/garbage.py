"""A thread that frees what may block: NCCL's communicators, streams, events, and arrays of ended calls.

NCCL and CUDA may wait in such calls until the GPU has ended its work. Python's garbage collector runs in whichever
thread makes an object, also in the watchdog of another communicator. If it freed there, and waited for a call that
hangs, the watchdog could not end that call. So finalizers only pass objects on to this thread.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from qccl.base import threads
from qccl.engine.cuda.libraries import cuda_libraries

__all__ = ["Garbage"]


class Garbage:
    """Frees the objects of one GPU on the thread. Make it early: when objects are freed, the libraries may be gone."""

    def __init__(self, device: int) -> None:
        self._device, self._gpu = device, cuda_libraries()
        _start()

    def later(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the thread, where the GPU is the current one. Never blocks."""
        _queue.put((self, function, arguments))

    def drop_with(self, owner: object, *lists: list[Any]) -> None:
        """When nothing refers to ``owner`` any more, empty the lists. They must not refer to ``owner``.

        If the process ends before, nothing is done.
        """
        weakref.finalize(owner, self.later, _clear, *lists).atexit = False

    def make_current(self) -> None:
        """Prepare the thread, which leaves captures of other threads intact."""
        driver = self._gpu.bindings
        self._gpu.runtime.setDevice(self._device)
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


#: a SimpleQueue, because the garbage collector may put an item into it at any moment, also inside put()
_queue: SimpleQueue[tuple[Garbage, Callable[..., object], tuple[Any, ...]]] = SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="garbage of qccl", daemon=True)
            threads.start(_thread)


def _clear(*lists: list[Any]) -> None:
    for each in lists:
        each.clear()


def _work() -> None:
    while True:
        garbage, function, arguments = _queue.get()
        with contextlib.suppress(Exception):  # there is nobody to tell
            garbage.make_current()
            function(*arguments)
        del garbage, function, arguments  # keep no object alive while the thread waits
