"""README's first program on machines behind NAT, so that nobody can call them. Needs root and nft."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def make_site(public: str, router: str, private: str, network: str) -> None:
    """A machine behind a router that masquerades; ``network``: of the router and the public machine, "198.51.100"."""
    for name in (router, private):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    cable(public, f"to-{network}", f"{network}.1/24", router, "outside", f"{network}.254/24")
    cable(private, "eth0", "192.168.7.2/24", router, "inside", "192.168.7.1/24")
    ip("-n", private, "route", "add", "default", "via", "192.168.7.1")
    ip("-n", router, "route", "add", "default", "via", f"{network}.1")
    inside_router = ["ip", "netns", "exec", router]
    subprocess.run([*inside_router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True, timeout=20)
    subprocess.run([*inside_router, "nft", "-f", "-"], input=RULES, text=True, check=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """A public network namespace, and two that reach it through routers of their own, but nobody reaches them.

    The two have the same private address.
    """
    names = [f"qccl-nat-{os.getpid()}-{which}" for which in ("public", "router", "private", "router2", "private2")]
    public, router, private, router2, private2 = names
    try:
        ip("netns", "add", public)
        ip("-n", public, "link", "set", "lo", "up")
        make_site(public, router, private, "198.51.100")
        make_site(public, router2, private2, "203.0.113")
        yield [public, private, private2]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


@contextmanager
def started(machine: str, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Python in a network namespace."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, *command],
        env=os.environ | {"QCCL_TOKEN": "a token for tests only", "PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outputs(machines: list[str], path: str, **environment: str) -> list[str]:
    """What two ranks write, one on each machine."""
    place = {"WORLD_SIZE": "2", "MASTER_PORT": "29500"} | environment
    with (
        started(machines[0], path, RANK="0", **place) as first,
        started(machines[1], path, RANK="1", **place) as second,
    ):
        return [each.communicate(timeout=90)[0] for each in (first, second)]


def test_the_first_program_of_the_readme(machines: list[str], tmp_path: Path) -> None:
    """One of the two ranks can be reached."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    path = tmp_path / "sum.py"
    path.write_text(found[1] + "\nprint(comm.size, comm.transport.name, comm.rank)\n")
    texts = outputs(machines[:2], str(path), MASTER_ADDR="198.51.100.1")
    assert [text[-8:] for text in texts] == ["2 wan 0\n", "2 wan 1\n"], texts


#: Two ranks call, then a third process joins from the second site, and all call again. Then the third one is killed.
#: Rank 1 makes no call until rank 0 has heard of it, so the relay alone can have told rank 0.
GROWS = """
import pathlib, subprocess, sys, time

import numpy as np

import qccl


def check(comm):
    x = np.arange(500_000, dtype=np.float32) % 17
    comm.quantized_allreduce(x, codec="none")
    assert (x == np.arange(500_000) % 17 * comm.size).all()


place = pathlib.Path(__file__).with_name("address")
if sys.argv[1:] == ["joins"]:
    comm = qccl.join(place.read_text(), timeout=40)
    check(comm)
    sys.exit(time.sleep(60))
comm = qccl.init(backend="host", timeout=40)
check(comm)
if comm.rank == 0:
    place.with_name("part").write_text(comm.address)
    place.with_name("part").rename(place)
else:
    while not place.exists():
        time.sleep(0.05)
    third = subprocess.Popen([sys.executable, __file__, "joins"], stdout=subprocess.DEVNULL)
comm = comm.grow(3, timeout=40)
check(comm)
print(comm.size, comm.transport.wire.relayed(), comm.rank)
told = place.with_name("told")
if comm.rank == 1:
    third.kill()
    while not told.exists():
        time.sleep(0.05)
else:
    comm.timeout = 20.0
    try:
        check(comm)
    except qccl.PeerLost as error:
        print(error)
    told.touch()
comm = comm.shrink(timeout=40)
check(comm)
print("left:", comm.size)
"""


def test_two_sites_behind_nat_with_a_relay(machines: list[str], tmp_path: Path) -> None:
    """Neither rank can be reached, and rank 0's address is also rank 1's own; so only the relay is left."""
    path = tmp_path / "grows.py"
    path.write_text(GROWS)
    public, *private = machines
    with started(public, "-m", "qccl.relay", "--listen", "0.0.0.0:29600") as relay:
        assert relay.stdout is not None
        assert "listens" in relay.stdout.readline()
        texts = outputs(private, str(path), MASTER_ADDR="192.168.7.2", QCCL_RELAY="198.51.100.1:29600")
        lost = "rank 2 was lost: rank 0 has no connection to rank 2 any more (its process has ended)"
        assert texts[0].endswith(f"3 [1, 2] 0\n{lost}\nleft: 2\n"), texts
        assert texts[1].endswith("3 [0] 1\nleft: 2\n"), texts
        relay.terminate()
        assert "0 callers refused" in relay.communicate(timeout=20)[0]
