"""Running processes: passing on their lines, and ending them all, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import click

from qccl.bench.mpiexec import StartError
from qccl.errors import QcclError

__all__ = ["LinePipe", "Start", "allow_descriptors", "exit_status", "run_processes", "stoppable"]

_MARK = "QCCL_BENCH_RUN"
#: for processes to end by themselves, and after they were killed
_GRACE_SECONDS, _KILLED_SECONDS = 5.0, 10.0
#: of one wait of epoll, which takes no more than 24 days
_LONGEST_SECONDS = 86400.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: found before any fork: in the child of a process with threads looking it up could wait for a lock forever
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


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
            with _signals_held() as mask:  # or one could be started that is not in the list
                processes.append(_started(start, mark, mask))
        return _followed(processes, pipes, silence)
    finally:
        _end(processes, mark)


def allow_descriptors(number: int) -> None:
    """Let this process have ``number`` open files. Raises StartError if the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and number > hard:
        raise StartError(f"the run needs {number} open files, and {hard} are allowed (ulimit -Hn); start fewer ranks")
    if soft != resource.RLIM_INFINITY and number > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


@contextlib.contextmanager
def _signals_held() -> Iterator[set[signal.Signals]]:
    """Inside, the signals of stoppable() wait; gives the mask before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(start: Start, mark: str, mask: set[signal.Signals]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def in_child() -> None:
        """Die with the parent, also with one that died before this request; signals that were held arrive then."""
        for number in _SIGNALS:
            if callable(signal.getsignal(number)):  # Python's handler would swallow the signal until the exec
                signal.signal(number, signal.SIG_DFL)
        if _PRCTL is not None:
            _PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, on Linux
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return subprocess.Popen(
        start.command,
        env={**start.environment, _MARK: mark, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=None if start.stdout is None else start.stdout.writer,
        start_new_session=True,  # only this process gets Ctrl-C, and then ends the ranks
        preexec_fn=in_child,
    )


def _followed(processes: Sequence[subprocess.Popen[bytes]], pipes: Sequence[LinePipe], silence: float | None) -> int:
    """Pass on the lines until all processes have ended, or a while after one has failed; returns the exit status.

    A process that outlives the one that started it may keep a pipe open; it gets the same while.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())  # select() takes no descriptor above 1023
        for pipe in pipes:
            selector.register(pipe.reader, selectors.EVENT_READ, pipe)
        for rank, process in enumerate(processes):
            ended = os.pidfd_open(process.pid)
            stack.callback(os.close, ended)
            selector.register(ended, selectors.EVENT_READ, rank)
        status = _select(selector, processes, pipes, silence)
    for pipe in pipes:
        pipe.flush()
    return status


def _select(
    selector: selectors.BaseSelector,
    processes: Sequence[subprocess.Popen[bytes]],
    pipes: Sequence[LinePipe],
    silence: float | None,
) -> int:
    """The loop of _followed(); ``selector`` knows the pipes, and the number of each process by a descriptor."""
    running, status, deadline = set(range(len(processes))), 0, _after(silence)
    while selector.get_map():
        wait = _LONGEST_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [key for key, _ in selector.select(min(wait, _LONGEST_SECONDS))]
        if not ready and wait >= _LONGEST_SECONDS:
            continue
        if not ready and running and not status:
            raise StartError(f"the ranks printed nothing for {silence:.0f} s; the run was ended")
        if not ready:
            break
        for key in ready:
            if isinstance(key.data, LinePipe):
                if not key.data.read():
                    selector.unregister(key.fileobj)
                if running and not status:
                    deadline = _after(silence)
        for key in ready:
            if isinstance(key.data, int):
                selector.unregister(key.fileobj)
                running.remove(key.data)
                failed = _exit_status(key.data, processes[key.data])
                if (failed and not status) or not running:
                    status, deadline = status or failed, _after(_GRACE_SECONDS)
        if not running:
            for pipe in pipes:
                pipe.close_writer()
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
    """Terminate the processes (mpiexec ends its ranks); then kill them, and all that have the run's mark."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    _wait(left, _GRACE_SECONDS)
    for process in left:
        if process.poll() is None:  # it leads a session, and so a group of what it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    _wait(left, _KILLED_SECONDS)
    deadline = None
    while (others := _marked(mark)) and (deadline is None or time.monotonic() < deadline):
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = deadline or time.monotonic() + _KILLED_SECONDS  # finding them may have taken longer than that
        time.sleep(0.02)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, or so many seconds have passed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _marked(mark: str) -> list[int]:
    """The processes whose environment has the run's mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def exit_status(run: Callable[[], int]) -> int:
    """What ``run()`` returns, or 130 if a signal stops it. A QcclError becomes the command's error."""
    with stoppable():
        try:
            return run()
        except KeyboardInterrupt:
            click.echo("qccl-bench: stopped; its ranks and networks are gone", err=True)
            return 130
        except QcclError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt or SystemExit.

    Further signals are ignored, so that they do not interrupt the clean-up, which takes a limited time.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    before = [signal.signal(each, unwind) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(each, handler)
