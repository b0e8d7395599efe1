"""Calls the functions of Work.add_done_callback() on a thread of its own, so that a slow one delays no deadline."""

from __future__ import annotations

import threading
from collections import deque

from qccl import threads
from qccl.engine.callbacks import WithCallbacks
from qccl.errors import EngineError

__all__ = ["CallbackThread"]


class CallbackThread:
    """A thread that lives while there are functions to call."""

    def __init__(self, rank: int) -> None:
        self._name = f"qccl callbacks of rank {rank}"
        self._lock = threading.Lock()
        self._runs: deque[WithCallbacks] = deque()
        self._thread: threading.Thread | None = None

    def call(self, run: WithCallbacks) -> None:
        """Call the functions of a run that has ended or failed, after those of the runs before."""
        if not run.callbacks:  # one that is added from now on is called by the thread that adds it
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
