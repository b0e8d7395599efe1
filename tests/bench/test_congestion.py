"""bench/congestion.py: its plain sockets, and a short run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import congestion_rank
import pytest

from qccl.bench.lab import lab
from qccl.bench.lab.namespaces import congestion_control

SCRIPT = Path(__file__).parents[2] / "bench" / "congestion.py"


def test_both_ends_get_the_bytes_of_every_connection() -> None:
    """More than the sockets' buffers hold."""
    pairs = [socket.socketpair() for _ in range(3)]
    for each in (end for pair in pairs for end in pair):
        each.setblocking(False)
    given = [[bytes([end, index]) * 500_000 for index in range(3)] for end in range(2)]
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(congestion_rank._exchange, [p[end] for p in pairs], given[end]) for end in range(2)]
        assert [end.result(60) for end in ends] == given[::-1]
    for each in (end for pair in pairs for end in pair):
        each.close()


def test_a_connection_that_ends_is_an_error() -> None:
    one, other = socket.socketpair()
    with one:
        other.close()
        with pytest.raises(OSError):
            congestion_rank._exchange([one], [bytes(10)])


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}")
def test_a_short_run() -> None:
    flags = ["--losses=0%,1%", "--rounds=1", "--calls=1", "--size=64K", "--delay=1ms", "--connections=2"]
    flags += ["--transports=ucx,wan", "--in-flight=2"]
    command = [sys.executable, str(SCRIPT), *flags, f"--tcp={congestion_control()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    assert [len(line) for line in lines] == [4] * 4 and [line[0] for line in lines[2:]] == ["| none", "| 1%"]
    assert all(float(cell.strip(" |").split()[0]) > 0 for line in lines[2:] for cell in line[1:])
    assert "The bytes alone need 3 ms, two delays 2 ms." in done.stdout, json.dumps(done.stdout)
