"""The lab: its networks limit and count the traffic, and are removed afterwards, whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from bench_runs import COMMAND, OF_TWO_RANKS, ROOT, bench, started, traces, workers

from qccl import codecs
from qccl.bench.lab import lab
from qccl.bench.lab.lab import Lab, LabError
from qccl.bench.params import parse_link
from qccl.bench.start import start

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(lab.obstacle() is not None, reason=f"no lab here: {lab.obstacle()}"),
    pytest.mark.starts_first,
]
LONG = ["allreduce", "--ranks=2", "-b16M", "-e16M", "-n500", "-c0", "--link=100mbit"]


@pytest.fixture(params=["mpi", "ucx"])
def running(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """qccl-bench in the middle of a long run in the lab, with ranks by mpiexec or its own."""
    process = started(*LONG, f"--transport={request.param}")
    try:
        for line in process.stdout:
            if "codec" in line and "size" in line:
                break
        patience.wait_until(lambda: len(workers(process.pid)) >= (3 if request.param == "mpi" else 2), seconds=10)
        assert len(traces(process.pid)) == OF_TWO_RANKS
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)
        patience.wait_until(lambda: not workers(process.pid), seconds=20)
        lab.remove_stale()


def test_addresses_have_names_inside() -> None:
    """PyTorch looks up those that connect to it, by sockets of IPv6."""
    with Lab(2, parse_link("1gbit")) as network:
        places = [(network.first_address, 0), (f"::ffff:{network.first_address}", 0), (network.address, 0)]
        program = f"import socket; print(*[socket.getnameinfo(place, socket.NI_NAMEREQD)[0] for place in {places}])"
        command = [*network.enter("RANK"), sys.executable, "-c", program]
        done = subprocess.run(command, env=os.environ | {"RANK": "1"}, capture_output=True, text=True, timeout=20)
    assert done.stdout == "node0 node0 launcher\n", done.stderr


def test_the_table_in_the_lab_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    done = bench("allreduce", "--ranks=2", "-b4M", "-e4M", "-n5", "--link=1gbit", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "# Crossed the link     : at least 1" in done.stdout
    found = json.loads(path.read_text())
    result = found["results"][0]
    assert found["config"]["link"] == {
        "name": "1gbit",
        "bytes_per_second": 125e6,
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
    }
    assert result["floor"] == pytest.approx(result["wire_bytes"] / 125.0)
    assert 0.99 < result["out_of_place"]["crossed"] < 1.2
    assert result["out_of_place"]["time"] > 0.7 * result["floor"]
    assert result["out_of_place"]["plain_time"] > 0.9 * (4 << 20) / 125.0


def test_the_timeline_shows_encodes_during_transfers(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = bench("allreduce", "--ranks=4", "-b8M", "-e8M", "-n2", "-c0", "--link=1gbit", f"--trace={path}")
    assert done.returncode == 0, done.stderr
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    arrived = {}  # (message, sender, receiver) -> when
    for event in events:
        if event["cat"] == "recv":
            arrived[event["args"]["message"], event["args"]["peer"], event["pid"]] = event["ts"] + event["dur"]
    for rank in range(4):
        mine = [event for event in events if event["pid"] == rank]
        sends = [(e["ts"] - e["args"]["queued_us"], e["args"]) for e in mine if e["cat"] == "send"]
        transfers = [(begin, arrived[args["message"], rank, args["peer"]]) for begin, args in sends]
        encodes = [(e["ts"], e["ts"] + e["dur"]) for e in mine if e["name"].startswith("encode")]
        during = [e for e in encodes if any(begin <= e[0] and e[1] <= end for begin, end in transfers)]
        assert len(encodes) > 12 and len(during) > len(encodes) / 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(running: subprocess.Popen[str], number: int) -> None:
    begin = time.monotonic()
    running.send_signal(number)
    running.send_signal(number)  # an impatient user
    _, errors = running.communicate(timeout=20)
    assert time.monotonic() - begin < 10 * patience.factor()
    assert running.returncode == 128 + number
    assert traces(running.pid) == [] and workers(running.pid) == []
    assert "Traceback" not in errors


def test_a_killed_run_is_cleaned_up_by_the_next(running: subprocess.Popen[str]) -> None:
    running.kill()
    running.communicate(timeout=20)
    patience.wait_until(lambda: not workers(running.pid), seconds=10)  # the ranks end with their parent
    assert len(traces(running.pid)) == OF_TWO_RANKS
    with Lab(1, parse_link("1gbit")):
        assert traces(running.pid) == []
        assert traces(os.getpid())


def test_a_rank_that_dies_ends_the_run(running: subprocess.Popen[str]) -> None:
    ranks = [p for p in workers(running.pid) if b"qccl.bench.sweep.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    victims = [p for p in ranks if not Path(f"/proc/{p}/cmdline").read_bytes().startswith((b"mpiexec", b"/bin/sh"))]
    os.kill(max(victims), signal.SIGKILL)
    running.communicate(timeout=60)
    assert running.returncode not in (0, None)
    assert traces(running.pid) == [] and workers(running.pid) == []


APART = (
    "import sys; from qccl.bench.lab.lab import Lab; from qccl.bench.params import parse_link\n"
    "with Lab(2, parse_link('1gbit')) as network: print(network.bridge, flush=True); sys.stdin.readline()"
)


def test_two_labs_at_once_do_not_collide() -> None:
    with Lab(2, parse_link("1gbit")):
        other = subprocess.Popen(
            [sys.executable, "-c", APART], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert other.stdout.readline() == f"qcclb{other.pid}\n"
        assert len(traces(os.getpid())) == len(traces(other.pid)) == OF_TWO_RANKS
    assert traces(os.getpid()) == [] and len(traces(other.pid)) == OF_TWO_RANKS
    other.communicate("\n", timeout=20)
    assert other.returncode == 0 and traces(other.pid) == []


def test_a_lab_of_another_pid_namespace_stays() -> None:
    """Its process id says nothing here: no process has it."""
    number = next(n for n in range(os.getpid() + 100_000, 4_000_000) if not Path(f"/proc/{n}").exists())
    script = f'echo {number - 1} > /proc/sys/kernel/ns_last_pid; "$@"; exit $?'
    other = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", script, "sh", sys.executable, "-c", APART],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert other.stdout.readline() == f"qcclb{number}\n"
        for _ in range(2):
            lab.remove_stale()
        with Lab(1, parse_link("1gbit")):
            assert len(traces(number)) == OF_TWO_RANKS
        other.communicate("\n", timeout=20)
        assert other.returncode == 0 and traces(number) == []
    finally:
        other.kill()
        other.communicate(timeout=20)


def test_two_labs_with_the_same_process_id() -> None:
    """A second lab of a process, as one of another container with the same process id, has another number."""
    with Lab(1, parse_link("1gbit")) as first:
        with Lab(1, parse_link("1gbit")) as second:
            assert second.bridge != first.bridge and second.address != first.address
        assert len(traces(os.getpid())) == OF_TWO_RANKS - 3
        assert first.shaped_nbytes()
    assert traces(os.getpid()) == []


def test_what_was_half_built_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = lab._run, []

    def failing(*command: str, check: bool = True) -> str:
        calls.append(command)
        if check and len(calls) == 8:
            raise LabError("no more")
        return real(*command, check=check)

    monkeypatch.setattr(lab, "_run", failing)
    with pytest.raises(LabError, match="no more"), Lab(3, parse_link("1gbit")):
        pass
    assert traces(os.getpid()) == []


def test_what_a_lab_cannot_be() -> None:
    with pytest.raises(LabError, match="1 to 200 ranks, not 201"):
        Lab(201, parse_link("1gbit"))
    with pytest.raises(LabError, match=r"tc .* failed"):
        lab.shaped_nbytes("no-such-namespace")


def test_control_c_on_a_terminal() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*COMMAND, *LONG], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal
    )
    try:
        read_until(master, b"(B/rank)", 30)  # the end of the table's header
        os.write(master, b"\x03")
        read_until(master, b"stopped", 60)
        process.wait(timeout=20)
        assert process.returncode == 130
        assert termios.tcgetattr(slave) == before
        assert traces(process.pid) == [] and workers(process.pid) == []
    finally:
        process.kill()
        process.wait(timeout=20)
        os.close(master)
        os.close(slave)


def read_until(master: int, wanted: bytes, seconds: float) -> None:
    """Read the terminal's output until it contains ``wanted``."""
    seen, limit = b"", patience.Limit(seconds)
    while wanted not in seen and limit.left():
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 1 << 16)
    assert wanted in seen, seen


@pytest.mark.parametrize("link_per_rank", [False, True])
def test_ranks_of_a_node_share_memory_and_only_others_the_link(link_per_rank: bool) -> None:
    """Two nodes of two ranks: MPI knows them, and traffic inside a node passes no limiter."""
    program = (
        "from mpi4py import MPI; import numpy as np; c = MPI.COMM_WORLD\n"
        "node = c.Split_type(MPI.COMM_TYPE_SHARED); assert node.allgather(c.rank) == [c.rank % 2, c.rank % 2 + 2]\n"
        "x = np.zeros(1 << 20, np.uint8); node.Bcast(x); c.Barrier()\n"
        "c.Sendrecv(np.zeros(1 << 20, np.uint8), (c.rank + 1) % 4, recvbuf=x, source=(c.rank - 1) % 4)\n"
    )
    with Lab(4, parse_link("1gbit"), 2, link_per_rank=link_per_rank) as network:
        command, way = [sys.executable, "-c", program], start.choose_way("mpi")
        status = start.run_ranks(4, command, way=way, lab=network, smallest=0)
        passed = network.shaped_nbytes()
    assert status == 0
    each = 1 if link_per_rank else 2  # of the messages that go to the other node
    assert [round(nbytes / (1 << 20)) for nbytes in passed] == [each] * (4 // each)


def test_a_link_per_rank_needs_memory_that_the_node_shares(tmp_path: Path) -> None:
    flags = ["--ranks=4", "--nodes=2", "--link-per-rank", "-b1M", "-e1M", "-n1", "--transport=ucx"]
    done = run("hierarchical_allreduce", *flags, tmp_path / "x.json")
    assert done.returncode == 2 and "give --transport mpi" in " ".join(done.stderr.split()), done.stderr


def test_nodes_that_cannot_be() -> None:
    with pytest.raises(LabError, match="4 ranks make 1 to 4 nodes, not 5"):
        Lab(4, parse_link("1gbit"), 5)


@pytest.mark.parametrize("layout", ["leader", "sharded"])
def test_two_levels_send_codes_between_nodes_alone(tmp_path: Path, layout: str) -> None:
    """Two nodes of two ranks behind 200 Mbit/s: E bytes cross each node's link."""
    path = tmp_path / "x.json"
    done = run("hierarchical_allreduce", "--ranks=4", "--nodes=2", f"--layout={layout}", "-b1M", "-e1M", "-n1", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    (result,) = found["results"]
    assert result["wire_bytes"] == codecs.get("minmax8").encoded_nbytes(1 << 18, "float32")
    side = result["out_of_place"]
    assert found["out_of_bounds"]["count"] == 0 and 0.99 < side["crossed"] < 1.2


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of qccl-bench at 200 Mbit/s; the last argument is the JSON file."""
    return bench(name, "--link=200mbit", *map(str, arguments[:-1]), f"--json={arguments[-1]}")
