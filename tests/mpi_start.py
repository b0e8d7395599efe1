"""Starts MPI ranks in tests, with a deadline after which all are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from qccl.bench.start import StartError, find_mpiexec

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    """The end of a run: mpiexec's exit status, the output of mpiexec and ranks, and the seconds it took."""

    status: int
    output: str
    seconds: float


def start(n: int, *arguments: str, limit: float, **environment: str) -> Ended:
    """Run Python with ``arguments`` on ``n`` ranks; pytest.fail after ``limit`` seconds."""
    try:
        mpi = find_mpiexec()
    except StartError as error:
        pytest.skip(str(error))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        [mpi.path, *mpi.options(None), "-n", str(n), sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | root | {"PYTHONPATH": path} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # mpiexec ends its ranks
        try:
            output, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=5)
        pytest.fail(f"{n} ranks of {' '.join(arguments)} did not end within {limit} s:\n{output}", pytrace=False)
    return Ended(process.returncode, output, time.monotonic() - begin)
