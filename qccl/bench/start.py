"""Starting ranks, by mpiexec or as plain processes, reading their output, and ending them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from qccl import meetings
from qccl.bench.lab import INTERFACE, Lab
from qccl.bench.mpiexec import Mpiexec, StartError, find_mpiexec

__all__ = ["Way", "choose_way", "obstacle", "run_ranks", "stoppable"]

_MARK = "QCCL_BENCH_RUN"
_GRACE_SECONDS = 5.0
#: the transports of processes, the first choice first
_TRANSPORTS = ("ucx", "mpi", "gloo")


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks of a run are started.

    Attributes:
        transport: carries the bytes: a value of QCCL_TRANSPORT, or "loopback"; None on GPUs.
        mpi: the mpiexec that starts the ranks. Without one they are processes that meet over TCP, or, for "loopback",
            threads of one process.
    """

    transport: str | None
    mpi: Mpiexec | None = None


def choose_way(transport: str | None, plain: str | None = None, backend: str = "host") -> Way:
    """How to start ranks that use ``transport`` (None: QCCL_TRANSPORT, or the first that this machine has).

    mpiexec starts them if MPI carries the bytes or is the baseline ``plain``. Raises StartError with the reason if a
    transport cannot be used.
    """
    if backend != "host":
        return Way(None, None if obstacle("mpi") else find_mpiexec())
    reasons: dict[str, str] = {}
    wanted = transport or meetings.wanted_transport()
    for name in (wanted,) if wanted else _TRANSPORTS:
        reasons[name] = obstacle(name)
        if not reasons[name]:
            return Way(name, find_mpiexec() if "mpi" in (name, plain) else None)
    raise StartError("no transport can be used here. " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def obstacle(transport: str) -> str:
    """Why this machine cannot start ranks that use ``transport``; nothing if it can."""
    if transport in ("ucx", "gloo"):
        return meetings.obstacle(transport)
    try:
        if transport == "mpi":
            find_mpiexec()
    except StartError as error:
        return str(error)
    return ""


def run_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    way: Way,
    lab: Lab | None,
    smallest: int,
    silence: float,
    on_line: Callable[[str], None],
) -> int:
    """Run ``command`` as ``ranks`` ranks (inside ``lab``, if given); the exit status of the first that failed.

    ``on_line`` gets the lines that the ranks print; their stderr is not redirected. ``smallest`` is the smallest call
    in bytes, for MPI's settings. Raises StartError after ``silence`` seconds without a line. When one rank fails, the
    others have a few seconds to end. However this function ends, no rank keeps running.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = _environment(way, ranks, lab, smallest) | {_MARK: mark, "PYTHONUNBUFFERED": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    output, theirs = os.pipe()
    try:
        try:
            for arguments, own in _commands(way, ranks, command, lab):
                processes.append(_started(arguments, environment | own, theirs))
        finally:
            os.close(theirs)
        return _followed(processes, output, silence, on_line)
    finally:
        _end(processes, mark)
        os.close(output)


def _commands(
    way: Way, ranks: int, command: Sequence[str], lab: Lab | None
) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """The processes to start: each one's command, and its own variables."""
    if way.mpi is not None:
        inside = lab.enter(way.mpi.rank_variable) if lab else []
        yield [way.mpi.path, *way.mpi.options(lab), "-n", str(ranks), *inside, *command], {}
        return
    inside = lab.enter("RANK") if lab else []
    for rank in range(1 if way.transport == "loopback" else ranks):
        yield [*inside, *command], {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _environment(way: Way, ranks: int, lab: Lab | None, smallest: int) -> dict[str, str]:
    """The variables of all ranks. What the user has set is left alone, except the ranks' numbers and address."""
    settings = _threads(ranks) | _network(way.transport, lab)
    if way.mpi is not None:
        settings |= way.mpi.environment(ranks, lab, smallest)
    place = {"MASTER_ADDR": lab.first_address if lab else "127.0.0.1", "QCCL_PORT": str(_free_port())}
    if way.transport is not None:
        place["QCCL_TRANSPORT"] = way.transport
    if way.mpi is None:
        size = "1" if way.transport == "loopback" else str(ranks)
        place |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return settings | os.environ | place


def _threads(ranks: int) -> dict[str, str]:
    """Threads of each rank: its share of the processors for codecs, and one for NumPy's libraries.

    NumPy checks the results. With more threads its libraries would spin on every core for a while after each use, and
    slow down the timed calls.
    """
    mine = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(mine), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _network(transport: str | None, lab: Lab | None) -> dict[str, str]:
    """Settings that keep the traffic on the lab's links, or without a lab on this machine."""
    match transport:
        case "ucx" if lab:
            return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
        case "gloo":
            return {"GLOO_SOCKET_IFNAME": INTERFACE if lab else "lo"}
    return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _started(command: Sequence[str], environment: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        start_new_session=True,  # only this process gets Ctrl-C, and then ends the ranks
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """In the child, on Linux: request SIGTERM for when the parent is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _followed(
    processes: Sequence[subprocess.Popen[bytes]], output: int, silence: float, on_line: Callable[[str], None]
) -> int:
    """Pass on the lines until all processes have ended, or a while after one has failed; returns the exit status."""
    ranks = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    sources, rest, status = [output, *ranks], b"", 0
    deadline = time.monotonic() + silence
    try:
        while sources:
            ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
            if not ready and status:
                break
            if not ready:
                raise StartError(f"the ranks printed nothing for {silence:.0f} s; the run was ended")
            if output in ready:
                data = os.read(output, 1 << 16)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_line(line.decode(errors="replace"))
                if not data:
                    sources.remove(output)
                if not status:
                    deadline = time.monotonic() + silence
            for ended in ranks.keys() & ready:
                sources.remove(ended)
                failed = _exit_status(ranks[ended], processes[ranks[ended]])
                if failed and not status:
                    status, deadline = failed, time.monotonic() + _GRACE_SECONDS
    finally:
        for descriptor in ranks:
            os.close(descriptor)
    if rest:
        on_line(rest.decode(errors="replace"))
    return status


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
