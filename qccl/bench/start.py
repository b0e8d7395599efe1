"""Starting ranks by mpiexec, reading their output, and ending them all."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from qccl.bench.lab import INTERFACE, Lab
from qccl.errors import QcclError

__all__ = ["Mpiexec", "StartError", "find_mpiexec", "run_ranks_by_mpiexec", "stoppable"]

_MARK = "QCCL_BENCH_RUN"
_GRACE_SECONDS = 5.0
_INSTALL = "install qccl[mpi], or mpi4py alone where the machine has its own MPI"


class StartError(QcclError):
    """The ranks could not be started, or printed nothing for too long."""


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """The command that starts ranks.

    Attributes:
        path: of mpiexec.
        name: "MPICH" (also for its derivatives) or "Open MPI".
        version: for example "5.0.2".
    """

    path: str
    name: str
    version: str

    @property
    def rank_variable(self) -> str:
        """The environment variable with a rank's number."""
        return "OMPI_COMM_WORLD_RANK" if self.name == "Open MPI" else "PMI_RANK"

    def options(self, lab: Lab | None) -> list[str]:
        """Options for all runs: allow more ranks than cores, and keep traffic on the lab's links."""
        if self.name != "Open MPI":
            return []
        if lab and lab.nodes < lab.ranks:
            raise StartError(
                "Open MPI treats all ranks of this machine as one node; use MPICH (qccl[mpi]) with --nodes"
            )
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", INTERFACE]
        return ["--oversubscribe", "--bind-to", "none", *(tcp if lab else [])]

    def environment(self, ranks: int, lab: Lab | None, smallest: int) -> dict[str, str]:
        """Default variables for the ranks' environment, for calls of ``smallest`` bytes and more.

        The library's own all-reduce is the baseline, so it gets its best known settings, measured with MPICH 5.0 and
        Open MPI 5.0 on 2 cores. Waiting ranks must yield if ranks share cores (MPICH, 4 ranks behind 1 Gbit/s, 1 KiB:
        0.2 ms instead of 4.7). MPICH's automatic choice of algorithm is then within 3% of the best at every size, and
        less easily disturbed than its ring. The same holds for Open MPI in shared memory, but behind a slow link its
        ring is faster from 64 KiB on (16 MiB: 221 ms instead of 386).
        """
        yields = ranks > len(os.sched_getaffinity(0))
        ring = lab is not None and smallest >= 64 << 10
        settings = _open_mpi(lab, yields, ring) if self.name == "Open MPI" else _mpich(lab, yields)
        return {key: value for key, value in settings.items() if value}


def _threads(ranks: int) -> dict[str, str]:
    """Threads of each rank: its share of the processors for codecs, and one for NumPy's libraries.

    NumPy checks the results. With more threads its libraries would spin on every core for a while after each use, and
    slow down the timed calls.
    """
    mine = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(mine), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _mpich(lab: Lab | None, yields: bool) -> dict[str, str]:
    """MPICH's settings; empty ones are left out. Without NOLOCAL and a netmod over TCP, traffic bypasses the links.

    NUM_CLIQUES puts rank r on node r modulo the number of nodes, as the lab does.
    """
    shared = lab is not None and lab.nodes < lab.ranks
    return {
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "10" if yields else "",
        "MPIR_CVAR_NOLOCAL": "1" if lab and not shared else "",
        "MPIR_CVAR_NUM_CLIQUES": str(lab.nodes) if lab and shared else "",
        "MPIR_CVAR_CH4_NETMOD": "ofi" if lab else "",
        "FI_PROVIDER": "tcp" if lab else "",
        "FI_TCP_IFACE": INTERFACE if lab else "",
    }


def _open_mpi(lab: Lab | None, yields: bool, ring: bool) -> dict[str, str]:
    """Open MPI's settings; empty ones are left out. The ranks reach mpiexec through the bridge's address."""
    root = "1" if os.geteuid() == 0 else ""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": root,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": root,
        "OMPI_MCA_mpi_yield_when_idle": "1" if yields else "",
        "PMIX_MCA_ptl_base_if_include": lab.bridge if lab else "",
        "PMIX_MCA_ptl_base_remote_connections": "1" if lab else "",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1" if ring else "",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4" if ring else "",  # 4 is the ring
    }


def find_mpiexec() -> Mpiexec:
    """The mpiexec in this Python's folder (where the wheels of MPICH and Open MPI have it), or the first in PATH.

    Raises StartError if there is none, or mpi4py is missing.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise StartError(f"MPI starts the ranks, but mpi4py is not installed; {_INSTALL}")
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if path is None:
        raise StartError(f"mpiexec starts the ranks, but there is none beside {sys.executable} or in PATH; {_INSTALL}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{path} --version failed: {error}") from error
    text = done.stdout + done.stderr
    name = "Open MPI" if "Open MPI" in text or "PRRTE" in text or "OpenRTE" in text else "MPICH"
    number = re.search(r"\d+\.\d+(?:\.\w+)*", text)
    return Mpiexec(path, name, number[0] if number else "of unknown version")


def run_ranks_by_mpiexec(
    ranks: int,
    command: Sequence[str],
    *,
    lab: Lab | None,
    smallest: int,
    silence: float,
    on_line: Callable[[str], None],
) -> int:
    """Run ``command`` as ``ranks`` ranks (inside ``lab``, if given) and return mpiexec's exit status.

    ``on_line`` gets the lines that the ranks print; their stderr is not redirected. Raises StartError after ``silence``
    seconds without a line. However this function ends, no rank keeps running.
    """
    mpi = find_mpiexec()
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    inner = [*(lab.enter(mpi.rank_variable) if lab else []), *command]
    process = subprocess.Popen(
        [mpi.path, *mpi.options(lab), "-n", str(ranks), *inner],
        env=_threads(ranks)
        | mpi.environment(ranks, lab, smallest)
        | os.environ
        | {_MARK: mark, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # only this process gets Ctrl-C, and then ends the ranks
        preexec_fn=_die_with_parent,
    )
    try:
        for line in _lines(process, silence):
            on_line(line)
        return process.wait(timeout=30)
    except subprocess.TimeoutExpired as error:
        raise StartError("the ranks closed their output but did not end within 30 s") from error
    finally:
        _end(process, mark)


def _die_with_parent() -> None:
    """In the child, on Linux: request SIGTERM for when the parent is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _lines(process: subprocess.Popen[bytes], silence: float) -> Iterator[str]:
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    rest = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], silence)
        if not ready:
            raise StartError(f"the ranks printed nothing for {silence:.0f} s; the run was ended")
        data = os.read(pipe, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if not data:
            if rest:
                yield rest.decode(errors="replace")
            return


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Terminate mpiexec, which ends its ranks; then kill all processes that have the run's mark."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        process.wait(_GRACE_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


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
