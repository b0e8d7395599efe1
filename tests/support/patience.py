"""Limits of time that follow the machine's load, so that a busy machine fails no test.

A limit of a test only ends what would wait for ever. What takes a second on an idle machine takes ten times as long
beside twenty busy processes on two processors; every limit is therefore multiplied by factor(). conftest.py does that
for all tests and for the processes that they wait for (subprocess.run, communicate and wait); a test with a limit of
its own asks Limit or factor().
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Limit", "environment", "factor", "wait_until", "with_patient_processes"]

#: given to ranks that are processes, so that all of them have the same limits
_VARIABLE = "QCCL_TEST_PATIENCE"
#: a limit grows no further: an error in a test must still end
_MOST = 20.0


def factor() -> float:
    """How many times as long as alone on the machine a process takes now, at least 1: busy tasks per processor."""
    if _VARIABLE in os.environ:
        return float(os.environ[_VARIABLE])
    running = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    busy = max(running, *os.getloadavg()[:2])  # now, in the last minute, in the last five
    return min(max(1.0, busy / len(os.sched_getaffinity(0))), _MOST)


def environment() -> dict[str, str]:
    """The variable by which processes get this one's factor()."""
    return {_VARIABLE: f"{factor():.2f}"}


class Limit:
    """``seconds`` from now on an idle machine; longer if the machine is, or becomes, busy."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._seconds, self._factor = time.monotonic(), seconds, factor()

    def left(self) -> float:
        """The seconds that are left, at least 0."""
        left = self._begin + self._seconds * self._factor - time.monotonic()
        if left <= 0:
            self._factor = max(self._factor, factor())
            left = self._begin + self._seconds * self._factor - time.monotonic()
        return max(0.0, left)


def wait_until(
    condition: Callable[[], Any],
    meanwhile: Callable[[], object] = lambda: time.sleep(0.002),
    *,
    seconds: float = 60.0,
    what: str = "",
) -> Any:
    """The first value of ``condition()`` that is true. AssertionError after so many ``seconds`` of a Limit."""
    limit = Limit(seconds)
    while not (found := condition()):
        assert limit.left(), f"this did not happen: {what}"
        meanwhile()
    return found


def with_patient_processes(monkeypatch: Any) -> None:
    """Make the timeouts of this process's subprocess.run, communicate() and wait() Limits."""
    communicate, wait = subprocess.Popen.communicate, subprocess.Popen.wait

    def patient_communicate(self: Any, input: Any = None, timeout: float | None = None) -> Any:
        limit = None if timeout is None else Limit(timeout)
        while True:
            try:
                return communicate(self, input, None if limit is None else limit.left())
            except subprocess.TimeoutExpired:
                if limit is None or not limit.left():
                    raise
                input = None  # it is under way

    def patient_wait(self: Any, timeout: float | None = None) -> Any:
        limit = None if timeout is None else Limit(timeout)
        while True:
            try:
                return wait(self, None if limit is None else limit.left())
            except subprocess.TimeoutExpired:
                if limit is None or not limit.left():
                    raise

    monkeypatch.setattr(subprocess.Popen, "communicate", patient_communicate)
    monkeypatch.setattr(subprocess.Popen, "wait", patient_wait)
