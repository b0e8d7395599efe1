"""Starts threads so that an exception from another thread cannot make the start wait for ever.

PyThreadState_SetAsyncExc() finds its thread by a number. CPython 3.11 gives a thread that is being started the number
of its creator, so an exception for the creator may end the new thread before it runs. ``threading.Thread.start()``
then waits for ever. So start() lets a launcher call that method: a thread whose number nobody knows. If an exception
ends the launcher before it has begun, start() makes another one.
"""

from __future__ import annotations

import _thread
import threading

from qccl.base.deadline import Deadline
from qccl.base.errors import EngineError

__all__ = ["start"]

#: seconds until a second launcher is started; doubled for each further launcher
_LAUNCH_SECONDS = 0.05
#: most seconds for the start of a thread: a busy machine may need long
_MOST_SECONDS = 30.0


def start(thread: threading.Thread) -> None:
    """Start a thread, once, and return when it runs. Raises EngineError if the process gets no further thread."""
    claim, is_over = _thread.allocate_lock(), _thread.allocate_lock()
    is_over.acquire()
    failures: list[RuntimeError] = []

    def launch() -> None:
        if claim.acquire(False):
            try:
                thread.start()
            except RuntimeError as error:
                failures.append(error)
            is_over.release()

    wait, until = _LAUNCH_SECONDS, Deadline(_MOST_SECONDS)
    while not failures:
        try:
            _thread.start_new_thread(launch, ())
        except RuntimeError as error:
            failures.append(error)
        else:
            if is_over.acquire(timeout=wait) and not failures:
                return
            wait *= 2
            if not failures and until.is_over:
                failures.append(RuntimeError(f"the system did not run it within {_MOST_SECONDS} s"))
    raise EngineError(
        f"the thread {thread.name!r} cannot be started ({failures[0]}); allow the process more threads or memory: see "
        f"ulimit -u, ulimit -v, and the limits pids.max and memory.max of its container"
    ) from failures[0]
