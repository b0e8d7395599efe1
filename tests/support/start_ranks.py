"""Starts ranks in tests, with a deadline after which all are ended: by mpiexec, or as plain processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import patience
import pytest
import rank_forks
from machines import RANKS_EACH
from plain_ranks import COMMAND, ROOT, be_a_rank, free_ports

from qccl.bench.start.mpiexec import StartError, find_mpiexec
from qccl.bench.start.start import obstacle


def checks(*names: str) -> tuple[str, ...]:
    """The arguments by which ranks run checks of tests/ranks in step: check_NAME.py, or all.

    Without other packages' plugins for pytest: it warns of one that the process that forks has imported.
    """
    files = [f"tests/ranks/check_{name}.py" for name in names] or ["tests/ranks"]
    return (
        "-m",
        "pytest",
        *files,
        "-o",
        "python_files=check_*.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "--disable-plugin-autoload",
        "--tb=short",
    )


_WAN = {"QCCL_TRANSPORT": "wan", "QCCL_TOKEN": "a token for tests only"}
#: UCX's networks, all (shared memory on one machine) or TCP alone; the transport between sites, encrypted; and the same
#: where each two ranks are on a machine, and share memory
NETWORKS = {
    "shared memory": {},
    "tcp": {"UCX_TLS": "tcp,self"},
    "wan": {**_WAN, "UCX_TLS": "tcp"},
    "mixed": {**_WAN, RANKS_EACH: "2"},
}
needs_ucx = pytest.mark.skipif(bool(obstacle("ucx")), reason=obstacle("ucx") or "UCX is there")


@dataclass(frozen=True)
class Ended:
    """The end of a run: the launcher's exit status, the output of launcher and ranks, and the seconds it took."""

    status: int
    output: str
    seconds: float


def assert_passed(ended: Ended, n: int) -> None:
    """The checks passed on every rank, and each rank made the same number of them."""
    assert ended.status == 0, f"on {n} ranks:\n{ended.output}"
    passed = re.findall(r"(\d+) passed", ended.output)
    assert len(passed) == n and len(set(passed)) == 1, ended.output


def start(n: int, *arguments: str, limit: float, **environment: str) -> Ended:
    """Run Python with ``arguments`` on ``n`` ranks of mpiexec; pytest.fail after ``limit`` seconds."""
    try:
        mpi = find_mpiexec()
    except StartError as error:
        pytest.skip(str(error))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # MPI opens every interface, and those of other tests' networks come and go: then it ends with "No such device"
    alone = {"UCX_NET_DEVICES": "lo"}
    command = [mpi.path, *mpi.options(None), "-n", str(n), sys.executable]
    return _run(command, n, arguments, limit, root | alone | environment)


def start_plain(n: int, *arguments: str, limit: float, imported: str = "", **environment: str) -> Ended:
    """The same on ``n`` processes that have torchrun's variables, and UCX.

    With ``imported``, names with commas between them, they are forks of a process that has imported these modules: the
    import of PyTorch takes longer than many a run. Such ranks have the same seed for the hashes of texts, so a program
    whose ranks must not depend on the order of a set needs ranks that are no forks.
    """
    begin = time.monotonic()
    given = {"QCCL_TRANSPORT": "ucx", "PYTHONPATH": _python_path()} | environment
    given[COMMAND] = json.dumps([arguments, bool(imported), free_ports(1)[0]])
    modules = imported.split(",") if imported else []
    ends = rank_forks.run(n, be_a_rank, seconds=limit, imported=modules, **given)
    output = "".join(f"{each.out}{each.err}" for each in ends)
    return Ended(next((each.status for each in ends if each.status), 0), output, time.monotonic() - begin)


def _python_path() -> str:
    places = (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "ranks")
    return os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])


def _run(command: list[str], n: int, arguments: tuple[str, ...], limit: float, environment: dict[str, str]) -> Ended:
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | patience.environment() | {"PYTHONPATH": _python_path()} | environment,
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
