"""The lab with delay and loss: its forwarder's network is what was asked for, is counted, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import patience
import pytest
from bench_runs import ROOT, bench, traces, within

from qccl.bench import lab, start, switch
from qccl.bench.lab import LabError
from qccl.bench.lab_check import check_network
from qccl.bench.namespaces import inside
from qccl.bench.network import Network
from qccl.bench.network import Path as Way
from qccl.bench.network_options import NetworkOptions
from qccl.bench.tcp import congestion_control

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}"),
    pytest.mark.starts_first,
]
MPI = pytest.mark.skipif(bool(start.obstacle("mpi")), reason=start.obstacle("mpi"))
#: traces() of such a lab of two ranks: the switch's namespace, the launcher's interface, and for each rank a namespace
#: and its files
OF_TWO_RANKS = 6


def sockets(network: lab.Lab, kind: int) -> list[socket.socket]:
    """A socket of each rank, bound to its address at port 9000."""

    def bound(address: str) -> socket.socket:
        made = socket.socket(socket.AF_INET, kind)
        made.bind((address, 9000))
        made.settimeout(20)
        return made

    subnet = network.first_address.rpartition(".")[0]
    return [inside(f"{network.name}{node}", partial(bound, f"{subnet}.{node + 1}")) for node in range(network.links)]


def test_bytes_arrive_in_order_through_delay_jitter_and_loss_and_are_counted() -> None:
    sent = os.urandom(300_000)
    with NetworkOptions(link="50mbit", delay=0.01, jitter=0.005, loss=0.02, seed=3).lab(2) as network:
        assert len(traces(os.getpid())) == OF_TWO_RANKS
        counters, (first, second) = network.switch.counters, sockets(network, socket.SOCK_STREAM)
        assert counters.total().packets == 0  # those of the lab's check are not counted
        with first, second:
            first.listen()
            second.connect((network.first_address, 9000))
            other, _ = first.accept()
            sender = threading.Thread(target=lambda: (second.sendall(sent), second.shutdown(socket.SHUT_WR)))
            sender.start()
            with other, other.makefile("rb") as file:
                assert file.read() == sent
            sender.join()
        found = counters.path(1, 0)
        assert found.packets >= 200 and 300_000 < found.nbytes < 400_000 and found.lost > 0
        assert network.shaped_nbytes()[1] == network.arrived_nbytes()[1] >= found.nbytes
        assert counters.path(0, 1).packets > 0 and counters.lapses().overrun == 0
    assert traces(os.getpid()) == []


def test_datagrams_wait_in_the_queue_and_what_is_too_much_is_dropped() -> None:
    """200 packets at once: the first 100 ms of them are sent, in order, and the others are dropped."""
    with NetworkOptions(link="10mbit", delay=0.001, queue=0.1).lab(2) as network:
        first, second = sockets(network, socket.SOCK_DGRAM)
        with first, second:
            for number in range(200):
                second.sendto(number.to_bytes(4, "little").ljust(1472), (network.first_address, 9000))
            counters = network.switch.counters
            assert within(20, lambda: counters.path(1, 0).delivered_packets == counters.path(1, 0).packets > 80)
            found = counters.path(1, 0)
            assert found.packets + found.dropped_up == 200 and 82 <= found.packets <= 120, found
            numbers = [int.from_bytes(first.recv(2000)[:4], "little") for _ in range(found.packets)]
    assert numbers == sorted(numbers) and numbers[:82] == list(range(82))


def test_a_cut_path_loses_all_until_it_is_joined() -> None:
    with NetworkOptions(link="100mbit", delay=0.001).lab(2) as network:
        first, second = sockets(network, socket.SOCK_DGRAM)
        with first, second:
            counters = network.switch.counters
            counters.cut(1, 0, is_cut=True)
            second.sendto(b"lost", (network.first_address, 9000))
            assert within(20, lambda: counters.path(1, 0).cut == 1)
            counters.cut(1, 0, is_cut=False)
            second.sendto(b"come", (network.first_address, 9000))
            assert first.recv(10) == b"come"


def test_the_lab_measures_what_it_is() -> None:
    with NetworkOptions(up="20mbit", down="40mbit", delay=0.02).lab(3) as network:
        checked = network.checked
        assert len(checked.delays) == 6 and len(checked.rates) == 3 and checked.lost == 0
        assert min(checked.delays) > 0.019 and max(checked.rates) < 1.1 * 20e6 / 8


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"delay": 0.05}, r"packets from node0 to node1 took \d+\.\d+ ms or more, not 50 to 50\.\d+ ms"),
        ({"up": "40mbit"}, r"\d+ packets from node0 to node1 arrived at \d+\.\d+ Mbit/s, not at 40\.00"),
        ({"loss": 0.5}, r"0 of \d+ packets were lost, not about \d+"),
    ],
)
def test_a_network_that_is_not_what_was_asked_for(
    asked: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network of a lab is compared with another one."""
    with NetworkOptions(link="40mbit", up="20mbit", delay=0.01).lab(2) as network:
        monkeypatch.setattr("qccl.bench.lab_check._ATTEMPTS", 2)  # all of them find it
        other = NetworkOptions(**{"link": "40mbit", "up": "20mbit", "delay": 0.01} | asked).network(2)
        names = [f"{network.name}{node}" for node in range(2)]
        subnet = network.first_address.rpartition(".")[0]
        limit, found = patience.Limit(60), ""
        while not re.search(reason, found) and limit.left():  # on a busy machine the rate may be too low, too
            with pytest.raises(LabError, match="the lab's network is not what was asked for") as caught:
                check_network(other, names, [f"{subnet}.1", f"{subnet}.2"], network.switch.counters)
            found = str(caught.value)
        assert re.search(reason, found)


def test_a_forwarder_that_has_ended_is_told_of() -> None:
    ended = pytest.raises(LabError, match="the lab's forwarder has ended with status -9")
    with ended, NetworkOptions(link="100mbit", delay=0.001).lab(2) as network:
        network.switch.process.send_signal(signal.SIGKILL)
        network.switch.process.wait(20)
    assert traces(os.getpid()) == []


def test_a_forwarder_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch.Network, "grain", property(lambda self: "no number"))
    with pytest.raises(LabError, match=r"the lab's forwarder did not start: Traceback"):
        NetworkOptions(link="100mbit", delay=0.001).lab(2).__enter__()
    assert traces(os.getpid()) == []


KILLED = (
    "import os, sys; from qccl.bench.network_options import NetworkOptions\n"
    "with NetworkOptions(link='100mbit', delay=0.001).lab(2) as lab:\n"
    "    print(lab.switch.process.pid, flush=True); sys.stdin.readline()"
)


def test_the_forwarder_ends_with_a_process_that_is_killed_and_the_next_lab_removes_the_rest() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        forwarder = int(other.stdout.readline())
        assert len(traces(other.pid)) == OF_TWO_RANKS
    finally:
        other.kill()
        other.communicate(timeout=20)
    assert within(20, lambda: not Path(f"/proc/{forwarder}").exists())
    lab.remove_stale()
    assert traces(other.pid) == []


# -- the commands ------------------------------------------------------------------------------------------------------

FLAGS = ["--link=100mbit", "--delay=5ms", "--loss=0.5%"]


@pytest.mark.parametrize("transport", ["ucx", pytest.param("mpi", marks=MPI)])
def test_an_allreduce_behind_delay_and_loss(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--ranks=2", "-b1M", "-e1M", "-n2", f"--transport={transport}", *FLAGS]
    done = bench("allreduce", *flags, f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "link: 100mbit per rank, delay 5 ms, loss 0.5%, queue 200 ms, TCP " in done.stdout
    assert "qccl-bench: the lab's network, measured: one way " in done.stderr
    found = json.loads(path.read_text())
    settings = {"up": "100mbit", "down": "100mbit", "delay": 0.005, "jitter": 0.0, "loss": 0.005, "queue": 0.2}
    assert settings.items() <= found["config"]["link"].items() and found["config"]["link"]["name"] == "100mbit"
    assert found["out_of_bounds"]["count"] == 0 and found["crossed_link"] > 0.999
    # two rounds, each of which needs half of the bytes and a delay
    (result,) = found["results"]
    assert result["out_of_place"]["time"] > 0.9 * (result["floor"] + 1e4)


SITES = """
[sites.here]
ranks = [0, 1]
link = "200mbit"

[sites.there]
ranks = [2]
up = "50mbit"
down = "100mbit"

[[between]]
sites = ["here", "there"]
delay = "10ms"
"""


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    return path


def test_an_allreduce_between_sites(sites: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    done = bench("allreduce", f"--sites={sites}", "-b256K", "-e256K", "-n2", "--transport=ucx", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "# ranks 3 " in done.stdout and "link: each site's (here, there), TCP " in done.stdout
    found = json.loads(path.read_text())
    assert found["config"]["link"]["sites"] == SITES and found["config"]["link"]["name"] == "50mbit"
    assert found["out_of_bounds"]["count"] == 0 and found["crossed_link"] > 0.999


def test_ranks_of_a_site_share_its_address(sites: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    done = bench("run", f"--sites={sites}", f"--json={path}", "--", "ip", "-brief", "address", "show", "eth0")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    addresses = [lines[f"[{rank}]"].split()[2] for rank in range(3)]
    assert addresses[0] == addresses[1] != addresses[2]
    found = json.loads(path.read_text())
    assert found["ranks"] == 3 and found["sites"] == SITES and len(found["sent"]) == 2
    assert [line.split()[1] for line in done.stderr.splitlines()[-2:]] == ["here", "there"]


def test_the_congestion_control_of_the_lab_alone(tmp_path: Path) -> None:
    before = congestion_control()
    done = bench("run", "--link=100mbit", "--tcp=reno", "--", "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    assert sorted(done.stdout.splitlines()) == ["[0] reno", "[1] reno"] and "TCP reno" in done.stderr, done.stderr
    assert congestion_control() == before
    done = bench("run", "--link=100mbit", "--tcp=none-such", "--", "true")
    assert done.returncode == 1 and "--tcp none-such: this kernel has no such congestion control" in done.stderr
    assert before in done.stderr.partition("it has ")[2]


def test_many_sites() -> None:
    """More paths than an argument of a command has room for."""
    with NetworkOptions(link="100mbit", delay=0.001).lab(70) as network:
        assert len(network.checked.rates) == 8 and network.switch.counters.total().packets == 0


@MPI
def test_mpich_cannot_group_ranks_as_these_sites_do(sites: Path) -> None:
    done = bench("allreduce", f"--sites={sites}", "-b256K", "-e256K", "--transport=mpi")
    assert done.returncode != 0 and "number the sites' ranks in turns" in " ".join(done.stderr.split())


def test_a_network_has_as_many_sites_as_the_lab_has_links() -> None:
    network = Network.uniform(4, 2, *[lab.Link("1gbit", 125e6, 1)] * 2, Way())
    with pytest.raises(LabError, match="a lab of 4 ranks behind 4 links cannot be a network of other numbers"):
        lab.Lab(4, lab.Link("1gbit", 125e6, 1), network=network)
