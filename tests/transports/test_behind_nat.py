"""README's first program on machines behind NAT, so that nobody can call them. Needs root and nft."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import patience
import pytest
import site_ranks
from namespaces import NEEDS_LAB, cable, inside, ip, namespaces, outputs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [*NEEDS_LAB, pytest.mark.skipif(not shutil.which("nft"), reason="nft was not found; install nftables")]

TOKEN = "a token for tests only"
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


def make_site(public: str, router: str, private: str, network: str) -> None:
    """A machine behind a router that masquerades; ``network``: of the router and the public machine, "198.51.100"."""
    cable(public, f"to-{network}", f"{network}.1/24", router, "outside", f"{network}.254/24")
    cable(private, "eth0", "192.168.7.2/24", router, "inside", "192.168.7.1/24")
    ip("-n", private, "route", "add", "default", "via", "192.168.7.1")
    ip("-n", router, "route", "add", "default", "via", f"{network}.1")
    subprocess.run(inside(router, "sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True, timeout=20)
    subprocess.run(inside(router, "nft", "-f", "-"), input=RULES, text=True, check=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """A public network namespace, and two that reach it through routers of their own, but nobody reaches them.

    The two have the same private address.
    """
    with namespaces("public", "router", "private", "router2", "private2") as names:
        public, router, private, router2, private2 = names
        make_site(public, router, private, "198.51.100")
        make_site(public, router2, private2, "203.0.113")
        yield [public, private, private2]


def test_the_first_program_of_the_readme(machines: list[str], tmp_path: Path) -> None:
    """One of the two ranks can be reached."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    path = tmp_path / "sum.py"
    path.write_text(found[1] + "\nprint(comm.size, comm.transport.name, comm.rank)\n")
    texts = outputs(machines[:2], str(path), MASTER_ADDR="198.51.100.1", QCCL_TOKEN=TOKEN)
    assert [text[-8:] for text in texts] == ["2 wan 0\n", "2 wan 1\n"], texts


#: of the public machine's sshd
SSHD = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
GatewayPorts clientspecified
PermitRootLogin prohibit-password
PidFile none
StrictModes no
UsePAM yes
"""
#: what processes of the private machines may not do
ORDINARY = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")


@contextmanager
def forwarded(public: str, places: dict[str, list[int]], folder: Path) -> Iterator[None]:
    """sshd on the public machine, 198.51.100.1, forwards these ports of it to private machines, by their own calls."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=20)
    (folder / "sshd").write_text(SSHD.format(folder=folder))
    (folder / "known").write_text(f"198.51.100.1 {(folder / 'host.pub').read_text()}")
    sshd = f"mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec /usr/sbin/sshd -D -e -f '{folder}/sshd'"
    options = ("-o", f"UserKnownHostsFile={folder}/known", "-o", "ExitOnForwardFailure=yes", "-F", "none")
    commands = [inside(public, "sh", "-c", sshd)]
    for machine, ports in places.items():
        ways = [word for port in ports for word in ("-R", f":{port}:localhost:{port}")]
        ssh = ("ssh", "-N", "-i", f"{folder}/user", *options, *ways, "root@198.51.100.1")
        commands.append(inside(machine, *ORDINARY, *ssh))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, ports in zip(commands, ([22], *places.values()), strict=True):
            processes.append(subprocess.Popen(command))
            wait_until(lambda ports=ports: set(ports) <= listening(public), processes[-1])
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    patience.wait_until(lambda: condition() or process.poll() is not None)
    assert process.poll() is None


def listening(machine: str) -> set[int]:
    """The TCP ports at which processes listen."""
    lines = subprocess.run(
        inside(machine, "ss", "-Hltn"), check=True, timeout=20, capture_output=True, text=True
    ).stdout
    return {int(line.split()[3].rpartition(":")[2]) for line in lines.splitlines()}


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="sshd was not found; install openssh-server")
def test_two_sites_behind_nat_by_ssh(machines: list[str], tmp_path: Path) -> None:
    """The commands of docs/howto/behind-nat.md. Nobody can call the sites, which have one private address."""
    public, *private = machines
    ports = {private[0]: [29517, *range(30000, 30016)], private[1]: [*range(30100, 30116)]}
    with forwarded(public, ports, tmp_path):
        advertised = [f"198.51.100.1:{each[-16]}-{each[-1]}" for each in ports.values()]
        place = {"MASTER_ADDR": "198.51.100.1", "QCCL_WAN_ADVERTISE": advertised, "QCCL_TOKEN": TOKEN}
        texts = outputs(private, site_ranks.__file__, "500000", str(tmp_path), **place)
    assert [text[-8:] for text in texts] == ["3 wan 0\n", "3 wan 1\n"], texts
