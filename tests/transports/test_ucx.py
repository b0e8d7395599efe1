"""UCX in one process: its library, settings, ports, and what a forked child does with its connections."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import patience
import pytest
from plain_ranks import free_ports
from start_ranks import needs_ucx

import qccl
from qccl.meeting import network
from qccl.meeting.network import Network
from qccl.meeting.regroup import MembershipSocket
from qccl.transports import ucx
from qccl.transports.ucx import UcxTransport

pytestmark = needs_ucx


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
    patience.wait_until(lambda: 1 in wires[0].poll(0), lambda: wires[1].poll(0))
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


@pytest.mark.processes
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


def test_the_library_is_found_without_a_folder_for_temporary_files(monkeypatch):
    """A container may be read-only: nothing is started, and nothing written."""

    def fail(*_, **__):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert ucx.load_library.__wrapped__().ucp_get_version
    *wheel, system = ucx._candidates()
    assert system == "libucp.so.0" and all(Path(path).is_file() for path in wheel)


def test_the_sockets_of_the_membership_are_in_the_range_of_ucx(monkeypatch):
    """A firewall lets nothing else through."""
    first = free_ports(1)[0]
    between, beside = Network("host0", is_local=False), Network("127.0.0.1", is_local=True)
    for text, expected in ((f"{first}-{first + 1}", range(first, first + 2)), ("0", ()), (f"{first}-{first}", ())):
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", text)
        assert UcxTransport._listens(between)[1] == expected and UcxTransport._listens(beside)[1] == ()
    with contextlib.ExitStack() as stack:
        ports = []
        with pytest.raises(OSError, match=rf"all ports from {first} to {first + 1} are used; give UCX_TCP_PORT_RANGE"):
            for _ in range(3):
                own = MembershipSocket("127.0.0.1", ports=range(first, first + 2))
                stack.callback(own.close)
                ports.append(int(own.member(b"").port))
        assert set(ports) <= {first, first + 1} and ports


def test_what_to_do_where_ucx_has_too_few_ports(monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "30000-30001")
    membership = MembershipSocket("127.0.0.1")
    try:
        with pytest.raises(
            qccl.EngineError, match=r"did not start.*30000-30001 must have two free ports for each rank"
        ):
            ucx._wire([("NO_SUCH_SETTING", "x")], membership)
    finally:
        membership.close()
