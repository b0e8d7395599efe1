"""The ranks of a torch.distributed group over gloo, each a process: bytes, failures, and that processes end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def run(what: str, size: int) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank."""
    import socket

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
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=60)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    return found


@pytest.mark.parametrize(
    ("what", "size"),
    [("calls", 1), ("calls", 2), ("calls", 3), ("mismatch", 3), ("stays_away", 2), ("leaves", 3), ("refused", 1)],
)
def test_ranks(what, size):
    for rank, (status, out, err) in enumerate(run(what, size)):
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"


def test_a_rank_that_fails(what="raises"):
    ranks = run(what, 3)
    for rank, (status, out, err) in enumerate(ranks):
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"
    assert all("a reason of its own" in out for _, out, _ in ranks[1:])


def test_a_rank_that_dies():
    for rank, (status, out, err) in list(enumerate(run("dies", 3)))[1:]:
        assert status == 0 and out.endswith("done\n"), f"rank {rank}: exit status {status}\n{out}\n{err}"
