"""The thread that makes calls progress while their caller is elsewhere.

It is started by the first call that needs it. Whoever holds the engine's lock drives, so a caller that waits for a call
drives it by itself, without a change of threads, and the thread only looks in from time to time. It drives

- calls with ``async_op=True`` at once;
- runs that plan.start() began when nobody has waited for them within a nap, because most callers wait immediately.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Protocol

__all__ = ["Driven", "ProgressThread"]

#: between two looks at what is under way
_NAP_SECONDS = 1e-3
#: the same when the caller has waited for the last runs himself, so often: he will wait for the next, too
_LONG_NAP_SECONDS = 4e-3
_USUAL = 20
#: looks at nothing new after which the thread sleeps until it is called
_LOOKS = 20
#: how long other Python threads may keep the interpreter from this one, while it drives: the end of a run waits for it,
#: and each poll of a transport that is written in Python. Python's own 5 ms would stretch calls beside a caller that
#: computes in Python
_SWITCH_SECONDS = 10e-6


class Driven(Protocol):
    """What the thread needs of an engine.

    Attributes:
        detached: runs under way that nobody has promised to wait for.
    """

    detached: int

    def drive(self) -> None:
        """Advance the detached runs until none is left, or somebody else wants to. Never raises."""


class ProgressThread:
    """The thread of one engine. Methods are for the engine's user, if they do not say otherwise."""

    def __init__(self, engine: Driven) -> None:
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._bell = threading.Lock()  # a binary semaphore: released to ring
        self._bell.acquire()
        self._asleep = False
        self._ended = False
        self._begun = 0
        self._urgent = False

    def attend(self, *, at_once: bool) -> None:
        """A run was detached: drive it, at once or when it is not waited for."""
        self._begun += 1
        if self._thread is None:
            self._urgent = at_once
            self._thread = threading.Thread(target=self._live, name="qccl progress", daemon=True)
            self._thread.start()
        elif at_once:
            self._urgent = True
            self._ring()
        elif self._asleep:
            self._ring()

    def dismiss(self) -> None:
        """Let the thread end, without waiting for it. Any thread may call this. Idempotent."""
        self._ended = True
        self._ring()

    def end(self) -> None:
        """Let the thread end, and wait for it. Idempotent."""
        self.dismiss()
        if self._thread is not None:
            self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def _live(self) -> None:
        engine, seen, looks, attended = self._engine, 0, 0, 0
        while not self._ended:
            waited = self._begun == seen  # what is detached now was so a nap ago
            seen = self._begun
            if engine.detached and (self._urgent or waited):
                attended = 0
                with _quick_switches:
                    engine.drive()
            elif not waited:
                attended += 1
            if not engine.detached:
                self._urgent = False
            looks = 0 if engine.detached or not waited else looks + 1
            if looks < _LOOKS:
                self._bell.acquire(timeout=_NAP_SECONDS if attended < _USUAL else _LONG_NAP_SECONDS)
                continue
            self._asleep = True  # before the last look: whoever detaches a run after it rings
            if not engine.detached and not self._ended:
                self._bell.acquire()
            self._asleep = False
            looks = 0


class _QuickSwitches:
    """While any thread is inside, the interpreter's switch interval is short."""

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
