"""Runs processes, and ends them all, whatever happens."""

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
from pathlib import Path
from types import FrameType
from typing import TextIO

import click

from qccl.base.deadline import Deadline

__all__ = ["exit_status", "run_processes", "stoppable"]

_MARK = "QCCL_BENCH_RUN"
#: time for processes to end by themselves, and to disappear after they were killed
_GRACE_SECONDS, _KILLED_SECONDS = 5.0, 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: looked up before any fork: in a child of a process with threads the look-up could wait for a lock forever
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def run_processes(starts: Sequence[tuple[Sequence[str], Mapping[str, str]]], stdout: TextIO | None = None) -> int:
    """Run commands with their variables. Returns the exit status of the first process that failed.

    They print on ``stdout``, or on this process's output. When one fails, the others have a few seconds to end. However
    this function ends, no process continues to run, nor does any of their children.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, variables in starts:
            processes.append(_started(command, {**variables, _MARK: mark, "PYTHONUNBUFFERED": "1"}, stdout))
        return _first_failure(processes)
    finally:
        _end(processes, mark)


def _started(command: Sequence[str], variables: Mapping[str, str], stdout: TextIO | None) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def in_child() -> None:
        """Die with the parent, also if it died before this request."""
        for number in _SIGNALS:
            if callable(signal.getsignal(number)):  # Python's handler would swallow the signal until the exec
                signal.signal(number, signal.SIG_DFL)
        if _PRCTL is not None:
            _PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, on Linux
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,  # only this process gets Ctrl-C, and then ends the ranks
        preexec_fn=in_child,
    )


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or a while after one has failed. Returns its exit status, in a shell's form."""
    poller, running = select.poll(), {os.pidfd_open(each.pid): rank for rank, each in enumerate(processes)}
    status, grace = 0, Deadline(_GRACE_SECONDS, counts=False)
    try:
        for ended in running:
            poller.register(ended, select.POLLIN)
        while running and not grace.is_over:
            for ended, _ in poller.poll(1e3 * grace.remaining() if status else None):
                rank = running.pop(ended)
                poller.unregister(ended)
                os.close(ended)
                code = processes[rank].wait()
                if code < 0:  # nothing else reports it
                    print(f"qccl-bench: {signal.Signals(-code).name} ended rank {rank}", file=sys.stderr)
                if code and not status:
                    status = code if code > 0 else 128 - code
                    grace.start()
    finally:
        for ended in running:
            os.close(ended)
    return status


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Terminate the processes (mpiexec ends its ranks); then kill them, and all that have the run's mark."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    grace, killed = Deadline(_GRACE_SECONDS), Deadline(_KILLED_SECONDS, counts=False)
    for process in left:
        try:
            process.wait(grace.remaining())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the process leads a session, and so the group of its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECONDS)
    while (others := _marked(mark)) and not killed.is_over:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.start()  # counts from here: finding the processes may take long
        time.sleep(0.02)


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
    """Call ``run()``. Returns its exit status, or 130 if a signal stops it."""
    with stoppable():
        try:
            return run()
        except KeyboardInterrupt:
            click.echo("qccl-bench: stopped; its ranks and networks are gone", err=True)
            return 130


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
