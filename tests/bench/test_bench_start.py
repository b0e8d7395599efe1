"""qccl-bench with ranks that it starts itself or by mpiexec, over each transport, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from bench_runs import ROOT, USERS, bench, started, workers

from qccl.bench import mpiexec, processes, start
from qccl.bench.kinds import KINDS
from qccl.bench.options import TRANSPORTS

pytestmark = pytest.mark.starts_first

# -- ranks by mpiexec --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpi() -> mpiexec.Mpiexec:
    try:
        return mpiexec.find_mpiexec()
    except mpiexec.StartError as error:
        pytest.skip(str(error))


def test_settings_leave_the_users_own_alone(mpi: mpiexec.Mpiexec) -> None:
    for name in ("MPICH", "Open MPI"):
        settings = mpiexec.Mpiexec("mpiexec", name, "5.0").environment(1000, None, 1 << 20)
        assert any("yield" in key.lower() for key in settings)
        assert not any("ALLREDUCE" in key.upper() for key in settings)


def over(transport: str) -> pytest.param:
    """A parameter of tests of this transport, which is skipped where the machine lacks it."""
    reason = start.obstacle(transport)
    return pytest.param(transport, marks=[pytest.mark.mpi, pytest.mark.skipif(bool(reason), reason=reason or "there")])


EVERY = [over(name) for name in TRANSPORTS]
#: the names of the rows of the plain all-reduce
PLAIN = {"mpi": "mpi", "ucx": "none", "gloo": "gloo", "wan": "none", "loopback": "none"}


@pytest.mark.parametrize("transport", EVERY)
def test_the_command_starts_ranks_and_reports(transport: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "trace")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    sizes = ["--ranks=3", "-b4K", "-e64K", "-f16", "-n3", "--codec=minmax8,none"]
    done = bench("allreduce", f"--transport={transport}", *sizes, *flags)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[-1] for line in done.stdout.splitlines() if line and not line.startswith("#")]
    plain = PLAIN[transport]
    assert rows == ["minmax8", "none"] * 2 if plain == "none" else [plain, "minmax8", "none"] * 2
    assert "# Out of bounds values : 0 OK" in done.stdout and f"vs {plain}" in done.stdout
    assert done.stdout.count("#  Rank") == 3
    assert "\x1e" not in done.stdout + done.stderr and done.stderr == ""
    found = json.loads(files["json"].read_text())
    assert found["args"][:2] == ["qccl-bench", "allreduce"] and len(found["results"]) == 4
    assert found["config"]["transport"].lower().startswith({"mpi": "m", "gloo": "gloo of"}.get(transport, transport))
    assert {event["pid"] for event in json.loads(files["trace"].read_text())["traceEvents"]} == {0, 1, 2}


@pytest.mark.parametrize("transport", EVERY[:2])
@pytest.mark.parametrize("plain", ["mpi", "gloo", "none"])
def test_the_baseline_is_chosen(mpi: mpiexec.Mpiexec, transport: str, plain: str) -> None:
    """MPI's or gloo's all-reduce, also beside UCX, or qccl's without compression."""
    if plain == "gloo":
        pytest.importorskip("torch")
    done = bench("allreduce", "--ranks=2", "-b4K", "-e4K", "-n2", f"--transport={transport}", f"--plain={plain}")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[-1] for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert rows == [plain, "minmax8"] and "# Out of bounds values : 0 OK" in done.stdout
    assert {"mpi": "over M", "ucx": "over UCX"}[transport] in done.stdout.splitlines()[0]


def test_the_first_transport_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QCCL_TRANSPORT", raising=False)
    for missing, chosen in ((("ucx", "mpi"), "gloo"), (("ucx",), "mpi"), ((), "ucx")):
        monkeypatch.setattr(start, "obstacle", lambda name, missing=missing: "no" if name in missing else "")
        monkeypatch.setattr(start, "find_mpiexec", lambda: "mpiexec")
        assert start.choose_way(None) == start.Way(chosen, "mpiexec" if chosen == "mpi" else None)
    assert start.choose_way("ucx", plain="mpi").mpi == "mpiexec"
    monkeypatch.setenv("QCCL_TRANSPORT", "gloo")
    assert start.choose_way(None) == start.Way("gloo") and start.choose_way("loopback") == start.Way("loopback")
    monkeypatch.setattr(start, "obstacle", lambda name: f"it has no {name}")
    with pytest.raises(mpiexec.StartError, match="gloo: it has no gloo"):
        start.choose_way(None)


@pytest.mark.mpi
def test_under_a_launcher_its_ranks_are_used(mpi: mpiexec.Mpiexec) -> None:
    done = subprocess.run(
        [
            mpi.path,
            *mpi.options(None),
            "-n",
            "2",
            sys.executable,
            "-m",
            "qccl.bench",
            "allreduce",
            "-b4K",
            "-e4K",
            "-n2",
        ],
        cwd=ROOT,
        env=mpi.environment(2, None, 4096) | os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Out of bounds values") == 1 and done.stdout.count("#  Rank") == 2


WAYS = [over("mpi"), over("ucx")]


def run(transport: str, ranks: int, program: str, *, silence: float = 30, on_line=print) -> int:
    """Run a Python program as ``ranks`` ranks."""
    command = [sys.executable, "-c", program]
    way = start.choose_way(transport)
    return start.run_ranks(ranks, command, way=way, lab=None, smallest=0, silence=silence, on_line=on_line)


DIES = """
import os, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
rank == 1 and {}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("transport", "end", "status"),
    [("mpi", "os.kill(os.getpid(), 9)", 9), ("ucx", "os.kill(os.getpid(), 9)", 137), ("ucx", "os._exit(3)", 3)],
)
def test_a_rank_that_fails_is_reported_and_none_is_left(
    mpi: mpiexec.Mpiexec, transport: str, end: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    found = run(transport, 3, DIES.format(end))
    assert found == status and time.monotonic() - begin < 25 * patience.factor() and workers(os.getpid()) == []
    if transport == "ucx":
        assert ("qccl-bench: SIGKILL ended rank 1" in capfd.readouterr().err) == (status == 137)


@pytest.mark.parametrize("transport", WAYS)
def test_silent_ranks_are_given_up(transport: str) -> None:
    begin = time.monotonic()
    with pytest.raises(mpiexec.StartError, match="printed nothing for 1 s"):
        run(transport, 2, "print('hello', flush=True); import time; time.sleep(60)", silence=1)
    assert time.monotonic() - begin < 15 * patience.factor() and workers(os.getpid()) == []


@pytest.mark.parametrize("transport", WAYS)
def test_broken_output_of_a_command_that_ends_is_complete(transport: str) -> None:
    lines: list[str] = []
    assert run(transport, 1, "print('a\\nb', end='')", on_line=lines.append) == 0
    assert lines == ["a", "b"]


BROKEN = """
import os, threading
import qccl

@dataclass(frozen=True)
class Broken(Half):
    def encode_values(self, x):
        if os.environ["RANK"] == "1" or threading.current_thread().name == "rank 1":
            raise qccl.EngineError("it is broken")
        return super().encode_values(x)
"""


@pytest.mark.parametrize("transport", [over("ucx"), over("loopback")])
def test_an_error_of_a_rank_is_printed_once(transport: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(USERS + BROKEN)
    flags = ["--ranks=3", "-b1M", "-e1M", "--codec=broken:Broken", f"--transport={transport}"]
    done = bench("allreduce", *flags, limit=100, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and done.stderr.count("it is broken") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("transport", [over("ucx"), over("loopback")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_command(transport: str, number: int) -> None:
    flags = ["--ranks=2", "-b1M", "-e1M", "-n100000", "-c0", f"--transport={transport}"]
    process = started("allreduce", *flags)
    try:
        while "codec" not in process.stdout.readline():  # the columns' names: all ranks are there
            assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number) and "Traceback" not in errors
    limit = patience.Limit(10)
    while (ranks := workers(process.pid)) and limit.left():
        time.sleep(0.05)
    assert ranks == []


def test_a_rank_says_nothing_when_the_command_was_killed() -> None:
    """The pipe to the command is closed shortly before its ranks get the signal."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "from qccl.bench.worker import _print; _print('a line')"
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")


def test_signals_unwind_once() -> None:
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        before = signal.getsignal(number)
        with pytest.raises(expected) as caught, processes.stoppable():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)  # while cleaning up: ignored
        assert signal.getsignal(number) is before
        if expected is SystemExit:
            assert caught.value.code == 128 + number


# -- the other collectives ---------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in KINDS if name != "allreduce"])
def test_every_collective_is_timed_and_checked(name: str, tmp_path: Path) -> None:
    """Results are right, and busbw is algbw times the collective's factor."""
    path = tmp_path / "x.json"
    codecs = "--codec=minmax4:rounding=stochastic,none"
    done = bench(name, "--ranks=3", "-b100K", "-e100K", "-n2", codecs, f"--json={path}")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    for result in found["results"]:
        side = result["out_of_place"]
        assert side["alg_bw"] == pytest.approx(result["size"] / side["time"] / 1e3)
        assert side["bus_bw"] == pytest.approx(side["alg_bw"] * KINDS[name].factor(3))
        assert (result["in_place"] is None) == (not KINDS[name].is_allreduce)
        assert (side["relative_l2_error"] > 1e-3) == (result["codec"] != "none" and name != "hierarchical_allreduce")
