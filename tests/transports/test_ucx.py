"""Ranks connected by UCX, each a process, over shared memory and over TCP: bits, failures, and that processes end."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from plain_ranks import free_ports
from start_ranks import NETWORKS, needs_ucx

import qccl
from qccl.transports import network, ucx
from qccl.transports.network import Network

ROOT = Path(__file__).resolve().parents[2]


pytestmark = [pytest.mark.starts_first, needs_ucx]


def run(size: int, name: str, *, zombie: int | None = None, **environment: str) -> list[tuple[int, str, str, float]]:
    """Status, output, errors and time of the end of each rank that runs a function of ucx_ranks.py.

    Ranks that are stopped are killed when the others have ended. Until then the rank ``zombie`` is not reaped.
    """
    address = f"127.0.0.1:{free_ports(1)[0]}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "ucx_ranks.py"), name, str(rank), str(size), address],
            env=os.environ | patience.environment() | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ends = [0.0] * size
    limit = patience.Limit(60)
    try:
        others = [process for rank, process in enumerate(processes) if rank != zombie]
        while limit.left() and any(p.poll() is None for p in others):
            for rank, process in enumerate(processes):  # poll() also reaps it: until then UCX takes it to be alive
                if rank != zombie and not ends[rank] and process.poll() is not None:
                    ends[rank] = time.monotonic()
            if name == "stops" and all(p.poll() is not None for r, p in enumerate(processes) if r != 1):
                break
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
    texts = [process.communicate(timeout=10) for process in processes]
    return [(p.returncode, *text, end) for p, text, end in zip(processes, texts, ends, strict=True)]


def check(name: str, found: list[tuple[int, str, str, float]], *, but: int | None = None) -> None:
    for rank, (status, out, errors, _) in enumerate(found):
        if rank != but:
            assert status == 0 and out.endswith(f"done {name}\n"), f"rank {rank}: {status}\n{out}\n{errors}"


@pytest.mark.parametrize("over", NETWORKS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_bits_of_other_transports(size, over):
    check("calls", run(size, "calls", **NETWORKS[over]))


@pytest.mark.parametrize("name", ["closed", "closes_in_turn", "leaves", "mismatch", "raises"])
@pytest.mark.parametrize("over", NETWORKS)
def test_ends(name, over):
    check(name, run(3, name, **NETWORKS[over]))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"QCCL_NET": "eth77"}, "ArgumentError: QCCL_NET='eth77'"),
        ({"UCX_TLS": "nonsense"}, "EngineError: UCX .* did not start"),
        ({"UCX_TLS": "self"}, "EngineError: UCX has no network from rank 1 to rank"),
    ],
)
def test_a_rank_that_cannot_start(environment, message):
    """The others do not wait for it."""
    found = run(2, "cannot_start", QCCL_TEST_ENVIRONMENT=json.dumps(environment))
    check("cannot_start", found)
    assert re.search(message, found[1][1]), found


@pytest.mark.parametrize("name", ["raises_its_limit", "has_too_few_descriptors"])
def test_limits_of_descriptors(name):
    check(name, run(6, name, UCX_TLS="tcp,self"))


@pytest.mark.parametrize("over", NETWORKS)
def test_ranks_of_one_machine_listen_on_its_loopback_interface(over):
    check("listens_on_loopback", run(2, "listens_on_loopback", **NETWORKS[over]))


def test_chaos():
    """Some events of chaos_ucx.py, which --minutes 10 goes on with."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "chaos_ucx.py"), "--minutes", "0.15", "--seed", "4"]
    ended = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110 * patience.factor(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["other_size", "shrinks_in_a_fork", "stays_away"])
def test_set_up_and_sizes(name):
    check(name, run(2, name))


@pytest.mark.parametrize("over", NETWORKS)
def test_a_rank_that_is_killed_is_named(over):
    found = run(3, "dies", **NETWORKS[over])
    check("dies", found, but=1)
    assert found[1][0] == -signal.SIGKILL
    assert max(end for *_, end in found) - found[1][3] < 8, "the survivors have a keepalive of a second"


@pytest.mark.parametrize("name", ["dies", "dies_in_a_transfer"])
def test_a_rank_that_is_killed_and_not_reaped_is_named(name):
    """UCX's keepalive takes it to be alive, and the others would wait for their deadline of 30 s."""
    found = run(3, name, zombie=1)
    check(name, found, but=1)
    assert found[1][0] == -signal.SIGKILL


@pytest.mark.parametrize("over", NETWORKS)
def test_a_rank_that_stops_meets_the_deadline(over):
    check("stops", run(3, "stops", **NETWORKS[over]), but=1)


def connections() -> set[str]:
    """The TCP connections that this process has, by their inodes."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    established = {fields[9] for line in lines if (fields := line.split())[3] == "01"}
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return established & {name[len("socket:[") : -1] for name in names if name.startswith("socket:[")}


def test_a_forked_child_does_not_keep_its_parents_connections():
    """Otherwise the other ranks would not notice the parent's end as long as the child lives."""
    before = connections()
    wires = [ucx._wire([("TLS", "tcp")], None) for _ in range(2)]
    addresses = [wire.address() for wire in wires]
    for rank, wire in enumerate(wires):
        wire.connect(rank, addresses, lambda _: [])
    memory = ctypes.create_string_buffer(2)
    wires[0].receive(1, 1, ctypes.addressof(memory), 1, 1, 0)
    wires[1].send(0, 1, ctypes.addressof(memory) + 1, 1, 2)
    limit = patience.Limit(10)
    while 1 not in wires[0].poll(0):
        wires[1].poll(0)
        assert limit.left()
    made = connections() - before
    assert len(made) >= 2  # both ends are here
    if (child := os.fork()) == 0:
        for wire in wires:
            wire.close(0)
        os._exit(len(connections() & made))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connections() >= made
    for wire in wires:
        wire.close(0)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGSEGV])
def test_signals_stay_the_programs(number):
    """UCX would otherwise show a debugger's prompt at SIGHUP, and the process would go on."""
    program = (  # begins with the default action, which nohup changes
        "import os, signal, sys; from qccl.transports import ucx; number = int(sys.argv[1]); "
        "signal.signal(number, signal.SIG_DFL); ucx.load_library(); os.kill(os.getpid(), number)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], capture_output=True, stdin=subprocess.DEVNULL, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, b"", b"")


@pytest.mark.parametrize("over", NETWORKS)
@pytest.mark.parametrize("name", ["stops_for_good", "shrinks_often", "keeps_residuals", "grows_with_calls_under_way"])
def test_next_groups(name, over):
    check(name, run(3, name, **NETWORKS[over]))


def test_settings_of_the_environment_come_first(monkeypatch):
    monkeypatch.delenv("UCX_KEEPALIVE_INTERVAL", raising=False)
    assert dict(ucx._config(Network.towards(None)))["KEEPALIVE_INTERVAL"] == "1s"
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "3s")
    monkeypatch.setenv("QCCL_NET", "lo")
    config = dict(ucx._config(Network.towards("127.0.0.1")))
    assert "KEEPALIVE_INTERVAL" not in config and config["NET_DEVICES"] == "lo"
    monkeypatch.setenv("QCCL_NET", "lo,eth77")
    with pytest.raises(qccl.ArgumentError, match=r"no network interface 'eth77'; it has .*lo"):
        ucx._config(Network.towards(None))


def test_the_interface_to_this_machine_is_none():
    """UCX has no route over the loopback interface alone."""
    assert network._interface_to("127.0.0.1") is None
    assert network._interface_to("no-such-host.invalid") is None


@pytest.mark.every_size
@pytest.mark.parametrize("over", NETWORKS)
def test_chaos_for_ten_minutes(over):
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "chaos_ucx.py"),
        "--minutes",
        "10",
        "--seed",
        str(time.time_ns()),
    ]
    command += ["--network", NETWORKS[over].get("UCX_TLS", "")]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
