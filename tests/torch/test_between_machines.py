"""Ranks over gloo in two network namespaces, as on two machines: the network that they choose, and its deadline."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from namespaces import NEEDS_LAB, linked, start

pytestmark = NEEDS_LAB

PLACE = {"MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29533", "WORLD_SIZE": "2"}

GLOO = """
import time
import numpy as np
import qccl
begin = time.monotonic()
try:
    with qccl.init("host", {timeout}, transport="gloo") as comm, comm.split(0, 0) as part:
        print(comm.nodes, [float(each.quantized_allreduce(np.ones(9, np.float32))[0]) for each in (comm, part)])
except qccl.CollectiveTimeout as error:
    print(error, time.monotonic() - begin < {limit})
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    with linked() as names:
        yield names


@pytest.fixture
def named(machines: list[str]) -> Iterator[None]:
    """The name of each machine is an address of its loopback interface, as in Debian."""
    folders = [Path("/etc/netns") / machine for machine in machines]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def over_gloo(machines: list[str], timeout: float, *settings: dict[str, str]) -> list[list[str]]:
    """The lines of two ranks, without the warnings of PyTorch and gloo."""
    program = GLOO.format(timeout=timeout, limit=3 * timeout * patience.factor())
    processes = [
        start(machine, "-c", program, **PLACE, **own, RANK=str(rank))
        for rank, (machine, own) in enumerate(zip(machines, settings, strict=True))
    ]
    outs = [process.communicate(timeout=100)[0].strip() for process in processes]
    return [[line for line in out.splitlines() if not line.startswith("[")] for out in outs]


@pytest.mark.parametrize("chosen", [{}, {"QCCL_NET": "qccl-veth{}"}, {"GLOO_SOCKET_IFNAME": "qccl-veth{}"}])
def test_gloo_takes_the_network_that_leads_to_rank_0(machines, named, chosen):
    settings = [{name: text.format(rank) for name, text in chosen.items()} for rank in range(2)]
    assert over_gloo(machines, 60.0, *settings) == [["(0, 1) [2.0, 2.0]"]] * 2


def test_gloo_gives_up_in_time(machines, named):
    timeout = round(8.0 * patience.factor(), 1)
    for rank, lines in enumerate(over_gloo(machines, timeout, *[{"GLOO_SOCKET_IFNAME": "lo"}] * 2)):
        assert len(lines) == 1, lines
        line = lines[0]
        assert line.startswith(f"gloo did not connect rank {rank} with the 2 ranks within {timeout} s"), line
        assert "QCCL_NET or GLOO_SOCKET_IFNAME" in line and line.endswith(" True"), line
