"""A machine whose address changes during calls, in network namespaces: the calls go on with the right bits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import patience
import pytest
from namespaces import NEEDS_LAB, inside, ip, linked, started

pytestmark = NEEDS_LAB

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


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """An address of them stays where an older one of its network goes."""
    with linked() as names:
        for number, name in enumerate(names):
            stays = f"net.ipv4.conf.qccl-veth{number}.promote_secondaries=1"
            subprocess.run(inside(name, "sysctl", "-qw", stays), check=True, timeout=20)
        yield names


@pytest.mark.parametrize("moving", [0, 1], ids=["of the rank that is called", "of the rank that calls"])
def test_an_address_changes_during_calls(machines: list[str], tmp_path: Path, moving: int) -> None:
    """The old connections break after the four seconds that TCP waits for an answer.

    Rank 1 calls rank 0. Where rank 0's address is another one, rank 0 calls rank 1 instead.
    """
    stop, place = tmp_path / "stop", {"WORLD_SIZE": "2", "MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29500"}
    place |= {"QCCL_TRANSPORT": "wan", "QCCL_TOKEN": "a token for tests only"}
    old, new = f"10.99.7.{moving + 1}", f"10.99.7.{moving + 11}"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(machine, "-c", PROGRAM, str(patience.factor()), str(stop), **place, RANK=rank))
            for rank, machine in zip("01", machines, strict=True)
        ]
        heard = ranks[0].stdout
        assert heard is not None
        assert heard.readline() == "10\n"
        ip("-n", machines[moving], "address", "add", f"{new}/24", "dev", f"qccl-veth{moving}")
        ip("-n", machines[moving], "address", "del", f"{old}/24", "dev", f"qccl-veth{moving}")
        while not connections(machines[moving], new):  # its lines may be of calls before the change
            line = heard.readline()
            assert line.strip().isdecimal(), line + heard.read()
        stop.touch()
        for rank in ranks:
            text = rank.communicate(timeout=60 * patience.factor())[0]
            assert rank.returncode == 0 and text.endswith("done\n"), text


def connections(machine: str, address: str) -> int:
    """Connections over which something has come, from ``address``."""
    command = inside(machine, "ss", "-Htn", "state", "established", "src", address)
    found = subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout
    return len(found.splitlines())
