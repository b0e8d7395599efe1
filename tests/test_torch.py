"""The ranks of a torch.distributed group over gloo, each a process: bytes, failures, and that processes end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@contextlib.contextmanager
def started(what: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks' processes, which are killed in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
        environment = os.environ | {k: str(v) for k, v in (variables | place).items()} | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "tests" / "torch_ranks.py"), what]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=10)


def run(what: str, size: int) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank."""
    found = []
    with started(what, size) as processes:
        for process in processes:
            out, err = process.communicate(timeout=60)
            found.append((process.returncode, out, err))
    return found


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("calls", 1),
        ("calls", 2),
        ("calls", 3),
        ("mismatch", 3),
        ("stays_away", 2),
        ("leaves", 3),
        ("keeps", 1),
        ("refused", 1),
    ],
)
def test_ranks(what, size):
    for rank, (status, out, err) in enumerate(run(what, size)):
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"


def test_a_rank_that_fails(what="raises"):
    ranks = run(what, 3)
    for rank, (status, out, err) in enumerate(ranks):
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"
    assert all("a reason of its own" in out for _, out, _ in ranks[1:])


@pytest.mark.parametrize("what", ["dies", "dies_in_setup"])
def test_a_rank_that_dies(what):
    for rank, (status, out, err) in list(enumerate(run(what, 3)))[1:]:
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"


@pytest.mark.parametrize("what", ["stops", "never_comes"])
def test_a_process_ends_soon_after_a_rank_has_stopped(what):
    with started(what, 3) as (process, *_):
        out, err = process.communicate(timeout=60)
        end = time.time()
    assert process.returncode == 0 and out.endswith("done\n"), f"exit status {process.returncode}\n{out}\n{err}"
    assert end - float(out.split()[0]) < 15


def test_ranks_that_are_killed_stopped_or_interrupted():
    """A few of the runs of lost_ranks.py, which says more."""
    command = [sys.executable, str(ROOT / "tests" / "lost_ranks.py"), "--runs", "6", "--grace", "30"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
