"""The lab's delay and loss: netem's command line, or the delay line, whose packets are late and lost as asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import patience
import pytest
from bench_runs import ROOT, bench, traces

from qccl.bench.lab import lab
from qccl.bench.lab.lab import LabError
from qccl.bench.lab.namespaces import congestion_control, inside
from qccl.bench.lab.network import NetworkOptions
from qccl.bench.params import parse_loss
from qccl.bench.start import start

LAB = [
    pytest.mark.lab,
    pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}"),
]
MPI = pytest.mark.skipif(bool(start.obstacle("mpi")), reason=start.obstacle("mpi"))


def marked(test: Callable[..., None]) -> Callable[..., None]:
    """A test that makes a lab."""
    for mark in LAB:
        test = mark(test)
    return test


def test_losses() -> None:
    assert [parse_loss(text) for text in ("0%", "0.1%", "1 %", "99.9%")] == pytest.approx([0, 0.001, 0.01, 0.999])
    for text in ("", "1", "0.01", "-1%", "100%", "150%"):
        with pytest.raises(ValueError, match="is not a loss; give a percentage of packets from 0% to below 100%"):
            parse_loss(text)


def test_the_network_in_words_and_in_results() -> None:
    far = NetworkOptions("100mbit", delay=0.025, loss=0.001)
    assert far.describe("rank") == "100mbit per rank, delay 25 ms, loss 0.1%" and far.flag == "--link 100mbit"
    assert far.to_json() == {"delay": 0.025, "loss": 0.001} and far.is_far
    near = NetworkOptions("1gbit")
    assert near.describe("node") == "1gbit per node" and near.to_json() == {} and NetworkOptions().flag == ""


@pytest.fixture
def netem(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands for netem, which seem to succeed."""
    real, given = lab._run, []

    def run(*command: str, check: bool = True) -> str:
        if "netem" not in command:
            return real(*command, check=check)
        given.append(command)
        return ""

    monkeypatch.setattr(lab, "_run", run)
    return given


@pytest.fixture
def without_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lab._run

    def run(*command: str, check: bool = True) -> str:
        if "netem" in command:
            raise LabError("Specified qdisc kind is unknown")
        return real(*command, check=check)

    monkeypatch.setattr(lab, "_run", run)


@marked
def test_netem_is_at_each_port_of_the_bridge_behind_the_rate_limiter(netem: list[tuple[str, ...]]) -> None:
    """So a rank's packets are counted before they are lost, and wait for each other before they are delayed."""
    with NetworkOptions("100mbit", delay=0.025, loss=0.001).lab(2) as network:
        probe, *ports = netem
        assert probe[:6] == ("tc", "-n", f"{network.name}line", "qdisc", "add", "dev")
        how = ("root", "netem", "limit", "10000000", "delay", "25000us", "loss", "0.1%")
        assert ports == [("tc", "qdisc", "add", "dev", f"qv{os.getpid()}.{node}", *how) for node in range(2)]
        shown = subprocess.run(["tc", "-n", f"{network.name}1", "qdisc"], capture_output=True, text=True, check=True)
        assert "tbf" in shown.stdout and "rate 100Mbit" in shown.stdout
    assert traces(os.getpid()) == []


@marked
def test_where_there_is_neither_it_says_what_to_do(without_netem: None, monkeypatch: pytest.MonkeyPatch) -> None:
    too_fast = pytest.raises(LabError, match=r"10gbit is too fast for the delay line; .* at most 1gbit, or load")
    with too_fast, NetworkOptions("10gbit", loss=0.01).lab(2):
        pass
    monkeypatch.setattr(lab, "_DELAY_LINE", Path("/no/such/file"))
    with pytest.raises(LabError) as raised, NetworkOptions("100mbit", loss=0.01).lab(2):
        pass
    assert "modprobe sch_netem" in str(raised.value) and "pip install --no-binary qccl qccl" in str(raised.value)
    assert traces(os.getpid()) == []


def sockets(network: lab.Lab, kind: int) -> list[socket.socket]:
    """A socket of each rank, bound to its address at port 9000."""

    def bound(address: str) -> socket.socket:
        made = socket.socket(socket.AF_INET, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        made.bind((address, 9000))
        made.settimeout(20)
        return made

    subnet = network.first_address.rpartition(".")[0]
    return [inside(f"{network.name}{node}", partial(bound, f"{subnet}.{node + 1}")) for node in range(network.links)]


@marked
def test_bytes_arrive_in_order_through_delay_and_loss(without_netem: None) -> None:
    sent = os.urandom(300_000)
    with NetworkOptions("50mbit", delay=0.01, loss=0.02).lab(2) as network:
        first, second = sockets(network, socket.SOCK_STREAM)
        with first, second:
            first.listen()
            begin = time.monotonic()
            second.connect((network.first_address, 9000))
            assert time.monotonic() - begin > 0.0195
            other, _ = first.accept()
            sender = threading.Thread(target=lambda: (second.sendall(sent), second.shutdown(socket.SHUT_WR)))
            sender.start()
            with other, other.makefile("rb") as file:
                assert file.read() == sent
            sender.join()
        assert 300_000 < network.shaped_nbytes()[1] < 400_000
    assert traces(os.getpid()) == []


def received(one: socket.socket, most: int) -> Iterator[bytes]:
    """The packets that arrive with less than 0.2 s between them, until there are ``most``."""
    one.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        for _ in range(most):
            yield one.recv(100)


@marked
def test_packets_are_late_and_lost_as_asked(without_netem: None) -> None:
    with NetworkOptions("100mbit", delay=0.02, loss=0.1).lab(3) as network:
        first, second, third = sockets(network, socket.SOCK_DGRAM)
        with first, second, third:
            for number in range(2000):  # to two ranks, of which one listens
                for rank in (0, 2):
                    place = network.first_address[:-1] + str(rank + 1)
                    second.sendto(number.to_bytes(4, "little"), (place, 9000))
                time.sleep(1e-4)
            numbers = [int.from_bytes(each, "little") for each in received(first, 2000)]
            assert numbers == sorted(set(numbers)) and 1730 < len(numbers) < 1870  # 1800, and 5 deviations
            times = []
            while len(times) < 20:
                begin = time.monotonic()
                second.sendto(b"x", (network.first_address, 9000))
                times += [time.monotonic() - begin for _ in received(first, 1)]
            assert 0.0195 < min(times) < 0.03, times  # a busy machine only adds time


@marked
def test_a_delay_line_that_has_ended_is_told_of(without_netem: None) -> None:
    ended = pytest.raises(LabError, match="the lab's delay line has ended with status -9")
    with ended, NetworkOptions("100mbit", delay=0.001).lab(2) as network:
        network._line.send_signal(signal.SIGKILL)
        network._line.wait(20)
    assert traces(os.getpid()) == []


@marked
def test_a_delay_line_that_does_not_start(without_netem: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_DELAY_LINE", Path("/bin/false"))
    with pytest.raises(LabError, match="the lab's delay line did not start: it ended with status 1"):
        NetworkOptions("100mbit", delay=0.001).lab(2).__enter__()
    assert traces(os.getpid()) == []


KILLED = """
import sys; from qccl.bench.lab import lab; from qccl.bench.lab.network import NetworkOptions
lab.Lab._has_netem = lambda self: lab._run("ip", "netns", "add", f"{self.name}line") != ""
with NetworkOptions('100mbit', delay=0.001).lab(2) as made:
    print(made._line.pid, flush=True); sys.stdin.readline()
"""


@marked
def test_the_delay_line_ends_with_a_process_that_is_killed_and_the_next_lab_removes_the_rest() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        line = int(other.stdout.readline())
        assert len(traces(other.pid)) == 6  # two namespaces with their files, the line's, and the launcher's interface
    finally:
        other.kill()
        other.communicate(timeout=20)
    patience.wait_until(lambda: not Path(f"/proc/{line}").exists(), seconds=20)
    lab.remove_stale()
    assert traces(other.pid) == []


# -- the commands ------------------------------------------------------------------------------------------------------


@marked
@pytest.mark.parametrize("transport", ["ucx", pytest.param("mpi", marks=MPI)])
def test_an_allreduce_behind_delay_and_loss(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--link=100mbit", "--delay=5ms", "--loss=0.5%", f"--transport={transport}", f"--json={path}"]
    done = bench("allreduce", "--ranks=2", "-b1M", "-e1M", "-n2", *flags)
    assert done.returncode == 0, done.stderr
    assert "link: 100mbit per rank, delay 5 ms, loss 0.5%, TCP " in done.stdout
    found = json.loads(path.read_text())
    assert {"name": "100mbit", "delay": 0.005, "loss": 0.005}.items() <= found["config"]["link"].items()
    assert found["out_of_bounds"]["count"] == 0 and found["crossed_link"] > 0.999
    # two rounds, each of which needs half of the bytes and a delay
    (result,) = found["results"]
    assert result["out_of_place"]["time"] > 0.9 * (result["floor"] + 1e4)


@marked
def test_the_congestion_control_of_the_lab_alone() -> None:
    before = congestion_control()
    done = bench("run", "--link=100mbit", "--tcp=reno", "--", "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    assert sorted(done.stdout.splitlines()) == ["[0] reno", "[1] reno"] and "TCP reno" in done.stderr, done.stderr
    assert congestion_control() == before
    done = bench("run", "--link=100mbit", "--tcp=none-such", "--", "true")
    assert done.returncode == 1 and "--tcp none-such: this kernel has no such congestion control" in done.stderr
    assert before in done.stderr.partition("it has ")[2]
