"""Ranks that are forks of a program, which follows and ends them.

The program has loaded no UCX, and calls watch() all the time: UCX takes a process that has ended, but was not waited
for, to be alive.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import patience

__all__ = ["Forks"]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
#: between two looks at the processes
_PAUSE_SECONDS = 0.01


class Forks:
    """Processes, each with a number.

    Attributes:
        running: by number, those that have not ended.
        stopped: by number, those that are stopped, and since when (time.monotonic()).
        statuses, ends: by number, how a process has ended, as Popen.returncode, and when (time.time()).
    """

    def __init__(self, folder: Path | None = None) -> None:
        """In ``folder`` each process has a file for its stderr; without one they share that of the program."""
        self.folder = folder
        self.running: dict[int, int] = {}
        self.stopped: dict[int, float] = {}
        self.statuses: dict[int, int] = {}
        self.ends: dict[int, float] = {}
        self._program = os.getpid()

    def start(self, number: int, work: Callable[[], None]) -> None:
        """Start a process that does ``work`` and ends as Python ends any program."""
        if pid := os.fork():
            self.running[number] = pid
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would stay when the program is killed
        os.setpgid(0, 0)  # the end of the shell that started the program would continue a stopped process
        if self.folder is not None:
            os.dup2(os.open(self._errors(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        faulthandler.enable()
        work()
        sys.exit()

    def wait(self, limit: patience.Limit, *, unreaped: int | None = None) -> None:
        """Until all have ended; those that stay stopped are killed. The others come before ``unreaped``."""
        while self.running.keys() - self.stopped.keys() - {unreaped} and limit.left():
            time.sleep(_PAUSE_SECONDS)
            self.watch(unreaped)
        for number in self.stopped:
            self.signal(number, signal.SIGKILL)
        while self.running.keys() & {*self.stopped, unreaped} and limit.left():
            time.sleep(_PAUSE_SECONDS)
            self.watch()

    def watch(self, unreaped: int | None = None) -> list[int]:
        """The numbers of those that have ended since the last call; ``unreaped`` is not looked at."""
        ended = []
        for number, pid in list(self.running.items()):
            if number == unreaped:
                continue
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not found:
                continue
            self.stopped.pop(number, None)
            if os.WIFSTOPPED(status):
                self.stopped[number] = time.monotonic()
            elif not os.WIFCONTINUED(status):
                self._note_end(number, status)
                ended.append(number)
        return ended

    def signal(self, number: int, which: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        if number in self.running:
            os.kill(self.running[number], which)

    def end(self) -> None:
        """End all processes; their files of errors get tracebacks."""
        if os.getpid() != self._program:
            return  # a fork that ends by an exception passes through the program's frames
        for number in self.running:
            for which in (signal.SIGCONT, signal.SIGABRT):
                self.signal(number, which)
        if self.running:
            time.sleep(0.5)
        for number, pid in list(self.running.items()):
            os.kill(pid, signal.SIGKILL)
            self._note_end(number, os.waitpid(pid, 0)[1])

    def errors(self, number: int) -> str:
        """What the process has written to stderr."""
        path = self._errors(number)
        return path.read_text(errors="replace") if path.exists() else ""

    def _errors(self, number: int) -> Path:
        return self.folder / f"{number}.err"

    def _note_end(self, number: int, status: int) -> None:
        del self.running[number]
        self.statuses[number], self.ends[number] = os.waitstatus_to_exitcode(status), time.time()
