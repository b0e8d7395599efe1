"""The progress thread, which advances calls while their caller computes.

The first call that needs the thread starts it. The thread that holds the engine's lock drives, so a caller that waits
for a call drives it without a change of threads. The progress thread drives

- calls with ``async_op=True``, as soon as the program makes no further call;
- runs that plan.start() began, if nobody waits for them within a nap: most callers wait immediately.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from typing import Protocol

from qccl.base import threads

__all__ = ["Driven", "ProgressThread"]

#: usual pause between two checks for runs to drive
_NAP_SECONDS = 1e-3
#: shortest pause while a run of wake_at_once() is under way. The pause doubles, up to the usual one, while the thread
#: drives for less time than it paused: in a burst of calls each change of threads costs more than it gains
_LEAST_NAP_SECONDS = 1e-4
#: a call that follows another within _BURST_SECONDS belongs to a burst. In a burst each call advances the calls before
#: it, so the thread drives only after _QUIET_SECONDS without a call
_BURST_SECONDS, _QUIET_SECONDS = 1e-3, 2e-4
#: without such runs the pause grows by _GROWTH at each check that finds a new run, up to _LONG_NAP_SECONDS, and doubles
#: at each check that finds the caller driving, up to _LONGEST_NAP_SECONDS: the caller will probably wait for its next
#: run, too. If ranks share processors, a check beside a caller that drives costs up to a millisecond
_GROWTH = 1.1
_LONG_NAP_SECONDS = 4e-3
_LONGEST_NAP_SECONDS = 32e-3
#: checks without a new run after which the thread sleeps until wake()
_CHECKS = 20
#: Python's switch interval while the thread drives. It needs the interpreter at the end of a run and for each poll of
#: a transport in Python: the default, 5 ms, would delay calls beside a caller that computes in Python
_SWITCH_SECONDS = 10e-6


class Driven(Protocol):
    """An engine that the thread drives.

    Attributes:
        detached: runs under way that progress without their caller.
    """

    detached: int

    def drive(self) -> bool:
        """Advance the detached runs until none is left, or another thread wants to drive. Never raises.

        Returns False if another thread was driving.
        """


class ProgressThread:
    """The progress thread of one engine. Only the thread that uses the engine wakes and joins it."""

    def __init__(self, engine: Driven) -> None:
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._wakeup = threading.Lock()  # a binary semaphore: releasing it wakes the thread
        self._wakeup.acquire()
        self._asleep = False
        self._ended = False
        self._begun = 0
        self._urgent = False
        self._last = -math.inf  # when a run to be driven at once was detached
        self._in_burst = False

    def wake(self) -> None:
        """Drive a run that was detached, if nobody waits for it."""
        self._begun += 1
        if self._urgent:
            self._urgent = self._engine.detached > 1  # another run is urgent
        if self._asleep or self._thread is None:
            self._notify()

    def wake_at_once(self) -> None:
        """Drive a run that was detached now.

        In a burst of such runs the thread is not woken for each: it takes short naps.
        """
        self._begun += 1
        self._urgent = True
        now = time.monotonic()
        self._in_burst, self._last = now - self._last < _BURST_SECONDS, now
        if self._asleep or not self._in_burst or self._thread is None:
            self._notify()

    def stop(self) -> None:
        """Let the thread end, without waiting for it. Any thread may call this. Idempotent."""
        self._ended = True
        self._notify()

    def join(self) -> None:
        """Let the thread end, and wait for it. Idempotent."""
        self.stop()
        if self._thread is not None and self._thread.ident is not None:  # an exception may have ended its start
            self._thread.join()

    def _notify(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._loop, name="qccl progress", daemon=True)
            threads.start(self._thread)
            return
        with contextlib.suppress(RuntimeError):  # it was released already
            self._wakeup.release()

    def _is_quiet(self) -> bool:
        """Whether the program probably makes no calls at the moment."""
        return not self._in_burst or time.monotonic() - self._last > _QUIET_SECONDS

    def _loop(self) -> None:
        engine, seen, checks, nap, urgent_nap = self._engine, 0, 0, _NAP_SECONDS, _NAP_SECONDS
        while not self._ended:
            is_due = self._begun == seen  # all detached runs are at least one nap old
            seen = self._begun
            if engine.detached and (is_due or (self._urgent and self._is_quiet())):
                begin = time.monotonic()
                with _quick_switches:
                    drove = engine.drive()
                nap = _NAP_SECONDS if drove else min(2 * nap, _LONGEST_NAP_SECONDS)
                was_short = time.monotonic() - begin < urgent_nap
                urgent_nap = min(2 * urgent_nap, _NAP_SECONDS) if was_short else _LEAST_NAP_SECONDS
            elif not is_due:
                nap = max(nap, min(_GROWTH * nap, _LONG_NAP_SECONDS))
                urgent_nap = min(2 * urgent_nap, _NAP_SECONDS)
            if self._urgent:
                nap = _NAP_SECONDS  # the next call of a burst does not wake the thread
            if not engine.detached:
                self._urgent = False
            checks = 0 if engine.detached or not is_due else checks + 1
            if checks < _CHECKS:
                self._wakeup.acquire(timeout=urgent_nap if self._urgent else nap)
                continue
            self._asleep = True  # before the last check: after it wake() notifies this thread
            if not engine.detached and not self._ended:
                self._wakeup.acquire()
            self._asleep = False
            checks = 0


class _QuickSwitches:
    """Makes the interpreter's switch interval short while any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0
        self._short = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and sys.getswitchinterval() > _SWITCH_SECONDS:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
                self._short = sys.getswitchinterval()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._usual:
                if sys.getswitchinterval() == self._short:  # nobody else has set it since
                    sys.setswitchinterval(self._usual)
                self._usual = 0.0


_quick_switches = _QuickSwitches()
