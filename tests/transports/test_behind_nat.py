"""README's first program on two machines of which one is behind NAT, so that nobody can call it. Needs root and nft."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qccl.bench import lab

ROOT = Path(__file__).resolve().parents[2]
obstacle = lab.obstacle() or (None if shutil.which("nft") else "nft was not found; install nftables")
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(obstacle is not None, reason=obstacle or "there is NAT"),
]

#: what the router between the two does: masquerade, and no connections to the inside
RULES = """
add table ip nat
add chain ip nat leaving { type nat hook postrouting priority 100 ; }
add rule ip nat leaving oifname "outside" masquerade
add table ip filter
add chain ip filter passing { type filter hook forward priority 0 ; policy drop ; }
add rule ip filter passing iifname "inside" accept
add rule ip filter passing ct state established,related accept
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


def cable(one: str, name: str, address: str, other: str, other_name: str, other_address: str) -> None:
    ip("link", "add", name, "netns", one, "type", "veth", "peer", "name", other_name, "netns", other)
    for namespace, link, place in ((one, name, address), (other, other_name, other_address)):
        ip("-n", namespace, "address", "add", place, "dev", link)
        ip("-n", namespace, "link", "set", link, "up")


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces; the second reaches the first through a router, and not the other way round."""
    public, router, private = (f"qccl-nat-{os.getpid()}-{which}" for which in ("public", "router", "private"))
    try:
        for name in (public, router, private):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        cable(public, "eth0", "198.51.100.1/24", router, "outside", "198.51.100.254/24")
        cable(private, "eth0", "192.168.7.2/24", router, "inside", "192.168.7.1/24")
        ip("-n", private, "route", "add", "default", "via", "192.168.7.1")
        inside_router = ["ip", "netns", "exec", router]
        subprocess.run([*inside_router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True, timeout=20)
        subprocess.run([*inside_router, "nft", "-f", "-"], input=RULES, text=True, check=True, timeout=20)
        yield [public, private]
    finally:
        for name in (public, router, private):
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


def test_the_first_program_of_the_readme(machines: list[str], tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    checks = "\nprint(comm.size, comm.transport.name, comm.rank)\n"
    (tmp_path / "sum.py").write_text(program[1] + checks)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "198.51.100.1", "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, str(tmp_path / "sum.py")],
            env=os.environ
            | place
            | {"RANK": str(rank), "QCCL_TOKEN": "a token for tests only", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in enumerate(texts):
        assert text.endswith(f"2 wan {rank}\n"), texts
