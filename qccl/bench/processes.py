"""Running processes: passing on their lines, and ending them all, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from qccl.bench.mpiexec import StartError

__all__ = ["LinePipe", "Start", "run_processes", "stoppable"]

_MARK = "QCCL_BENCH_RUN"
_GRACE_SECONDS = 5.0


class LinePipe:
    """A pipe for the output of processes, which hands ``on_line`` each line; a context manager.

    ``path`` makes it a named pipe, which processes open themselves.

    Attributes:
        reader, writer: the descriptors of its two ends.
    """

    def __init__(self, on_line: Callable[[str], None], path: Path | None = None) -> None:
        if path is None:
            self.reader, self.writer = os.pipe()
        else:
            os.mkfifo(path)
            self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for a writer
            self.writer = os.open(path, os.O_WRONLY)
            os.set_blocking(self.reader, True)
        self._on_line = on_line
        self._rest = b""
        self._is_open = True

    def __enter__(self) -> LinePipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close_writer()
        os.close(self.reader)

    def close_writer(self) -> None:
        """Close this process's writing end: the pipe ends when no other process has it open."""
        if self._is_open:
            os.close(self.writer)
            self._is_open = False

    def read(self) -> bool:
        """Wait for output, and pass on its lines; False at the end."""
        data = os.read(self.reader, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.decode(errors="replace"))
        return bool(data)

    def flush(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
            self._rest = b""


@dataclass(frozen=True)
class Start:
    """A process to start; without a pipe it writes where this process writes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    stdout: LinePipe | None = None


def run_processes(starts: Sequence[Start], pipes: Sequence[LinePipe], *, silence: float | None) -> int:
    """Run processes, passing on the lines of ``pipes``; the exit status of the first process that failed.

    Raises StartError after ``silence`` seconds without a line (None: no limit). When one process fails, the others have
    a few seconds to end. However this function ends, no process keeps running, nor any that they started.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for start in starts:
            processes.append(_started(start, mark))
        return _followed(processes, pipes, silence)
    finally:
        _end(processes, mark)


def _started(start: Start, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        start.command,
        env={**start.environment, _MARK: mark, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=None if start.stdout is None else start.stdout.writer,
        start_new_session=True,  # only this process gets Ctrl-C, and then ends the ranks
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """In the child, on Linux: request SIGTERM for when the parent is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _followed(processes: Sequence[subprocess.Popen[bytes]], pipes: Sequence[LinePipe], silence: float | None) -> int:
    """Pass on the lines until all processes have ended, or a while after one has failed; returns the exit status.

    A process that outlives the one that started it may keep a pipe open; it gets the same while.
    """
    running = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    descriptors, readers = [*running], {pipe.reader: pipe for pipe in pipes}
    status, deadline = 0, _after(silence)
    try:
        while running or readers:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([*readers, *running], [], [], wait)
            if not ready and running and not status:
                raise StartError(f"the ranks printed nothing for {silence:.0f} s; the run was ended")
            if not ready:
                break
            for reader in readers.keys() & ready:
                if not readers[reader].read():
                    del readers[reader]
                if running and not status:
                    deadline = _after(silence)
            for ended in running.keys() & ready:
                rank = running.pop(ended)
                failed = _exit_status(rank, processes[rank])
                if (failed and not status) or not running:
                    status, deadline = status or failed, _after(_GRACE_SECONDS)
            if not running:
                for pipe in pipes:
                    pipe.close_writer()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    for pipe in pipes:
        pipe.flush()
    return status


def _after(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _exit_status(rank: int, process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process that has ended, as a shell shows it. Reports a signal, because nothing else does."""
    status = process.wait()
    if status < 0:
        print(f"qccl-bench: {signal.Signals(-status).name} ended rank {rank}", file=sys.stderr)
    return status if status >= 0 else 128 - status


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Terminate the processes (mpiexec ends its ranks); then kill all that have the run's mark."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait(_GRACE_SECONDS)


def _marked(mark: str) -> list[int]:
    """The processes whose environment has the run's mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt or SystemExit.

    Further signals are ignored, so that they do not interrupt the clean-up, which takes a limited time.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(each, unwind) for each in handled]
    try:
        yield
    finally:
        for each, handler in zip(handled, before, strict=True):
            signal.signal(each, handler)
