"""A machine whose address changes during calls, in network namespaces: the calls go on with the right bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest

from qccl.bench import lab

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(lab.obstacle() is not None, reason=lab.obstacle() or "there is a lab"),
]

#: all-reduces of two ranks, each compared bit by bit, until rank 0 finds the file "stop"; a line after every tenth one
PROGRAM = """
import pathlib, sys

import numpy as np

import qccl

place = np.arange(100_000) % 17
with qccl.init("host", timeout=40.0 * float(sys.argv[1])) as comm:
    calls = 0
    while comm.allgather(b"" if pathlib.Path(sys.argv[2]).exists() else b"go")[0]:
        x = (place * (calls % 100) + comm.rank).astype(np.float32)
        comm.quantized_allreduce(x, codec="none")
        assert (x == place * (calls % 100) * 2 + 1).all()
        calls += 1
        if calls % 10 == 0:
            print(calls, flush=True)
print("done", flush=True)
"""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True, text=True).stdout


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.99.7.1 and 10.99.7.2."""
    names = [f"qccl-moves-{os.getpid()}-{which}" for which in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.99.7.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            stays = "net.ipv4.conf.eth0.promote_secondaries=1"  # an address, where an older one of its network goes
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", stays], check=True, timeout=20)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


def start(machine: str, rank: int, stop: Path) -> subprocess.Popen[str]:
    place = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29500"}
    settings = {"QCCL_TRANSPORT": "wan", "QCCL_TOKEN": "a token for tests only", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, "-c", PROGRAM, str(patience.factor()), str(stop)],
        env=os.environ | place | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("moving", [0, 1], ids=["of the rank that is called", "of the rank that calls"])
def test_an_address_changes_during_calls(machines: list[str], tmp_path: Path, moving: int) -> None:
    """The old connections break after the four seconds that TCP waits for an answer.

    Rank 1 calls rank 0. Where rank 0's address is another one, rank 0 calls rank 1 instead.
    """
    stop = tmp_path / "stop"
    ranks = [start(machine, rank, stop) for rank, machine in enumerate(machines)]
    old, new = f"10.99.7.{moving + 1}", f"10.99.7.{moving + 11}"
    try:
        heard = ranks[0].stdout
        assert heard is not None
        assert heard.readline() == "10\n"
        ip("-n", machines[moving], "address", "add", f"{new}/24", "dev", "eth0")
        ip("-n", machines[moving], "address", "del", f"{old}/24", "dev", "eth0")
        while not connections(machines[moving], new):  # its lines may be of calls before the change
            line = heard.readline()
            assert line.strip().isdecimal(), line + heard.read()
        stop.touch()
        for rank in ranks:
            text = rank.communicate(timeout=60 * patience.factor())[0]
            assert rank.returncode == 0 and text.endswith("done\n"), text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def connections(machine: str, address: str) -> int:
    """Connections over which something has come, from ``address``."""
    command = ["ip", "netns", "exec", machine, "ss", "-Htn", "state", "established", "src", address]
    found = subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout
    return len(found.splitlines())
