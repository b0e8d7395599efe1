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
from bench_runs import COMMAND, ROOT, USERS, bench, codecs_of, started, workers

from qccl.base.errors import EngineError
from qccl.bench.start import mpiexec, start
from qccl.transports import choice

pytestmark = pytest.mark.starts_first

# -- ranks by mpiexec --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpi() -> mpiexec.Mpiexec:
    try:
        return mpiexec.find_mpiexec()
    except mpiexec.StartError as error:
        pytest.skip(str(error))


def test_settings_leave_the_users_own_alone() -> None:
    for name in ("MPICH", "Open MPI"):
        settings = mpiexec.Mpiexec("mpiexec", name, "5.0").environment(1000, None, 1 << 20)
        assert any("yield" in key.lower() for key in settings)
        assert not any("ALLREDUCE" in key.upper() for key in settings)


def over(transport: str) -> pytest.param:
    """A parameter of tests of this transport, which is skipped where the machine lacks it."""
    reason = start.obstacle(transport)
    return pytest.param(transport, marks=[pytest.mark.mpi, pytest.mark.skipif(bool(reason), reason=reason or "there")])


#: gloo is in tests/torch/test_bench.py
EVERY = [over(name) for name in (*choice.TRANSPORTS, "loopback") if name != "gloo"]


@pytest.mark.parametrize("transport", EVERY)
def test_the_command_starts_ranks_and_reports(transport: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "trace")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    sizes = ["--ranks=3", "-b4K", "-e64K", "-f16", "-n3", "--codec=minmax8,none"]
    done = bench("allreduce", f"--transport={transport}", *sizes, *flags)
    assert done.returncode == 0, done.stderr
    plain = "mpi" if transport == "mpi" else "none"
    assert codecs_of(done.stdout) == [*([plain] if plain == "mpi" else []), "minmax8", "none"] * 2
    assert "# Out of bounds values : 0 OK" in done.stdout and f"vs {plain}" in done.stdout
    assert done.stdout.count("#  Rank") == 3
    assert done.stderr == ""
    found = json.loads(files["json"].read_text())
    assert found["args"][:2] == ["qccl-bench", "allreduce"] and len(found["results"]) == 4
    assert found["config"]["transport"].lower().startswith("m" if transport == "mpi" else transport)
    assert {event["pid"] for event in json.loads(files["trace"].read_text())["traceEvents"]} == {0, 1, 2}


@pytest.mark.mpi
@pytest.mark.parametrize(("transport", "plain"), [("mpi", "none"), ("ucx", "mpi")])
def test_the_baseline_is_chosen(mpi: mpiexec.Mpiexec, transport: str, plain: str) -> None:
    """MPI's all-reduce, also beside UCX, or qccl's without compression."""
    done = bench("allreduce", "--ranks=2", "-b4K", "-e4K", "-n2", f"--transport={transport}", f"--plain={plain}")
    assert done.returncode == 0, done.stderr
    assert codecs_of(done.stdout) == [plain, "minmax8"] and "# Out of bounds values : 0 OK" in done.stdout
    assert {"mpi": "over M", "ucx": "over UCX"}[transport] in done.stdout.splitlines()[0]


def test_the_first_transport_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QCCL_TRANSPORT", raising=False)
    for missing, chosen in ((("ucx", "mpi", "gloo"), "wan"), (("ucx", "mpi"), "gloo"), (("ucx",), "mpi"), ((), "ucx")):
        for module in (start, choice):
            monkeypatch.setattr(module, "obstacle", lambda name, missing=missing: "no" if name in missing else "")
        monkeypatch.setattr(start, "find_mpiexec", lambda: "mpiexec")
        assert start.choose_way(None) == start.Way(chosen, "mpiexec" if chosen == "mpi" else None)
    assert start.choose_way("ucx", plain="mpi").mpi == "mpiexec"
    monkeypatch.setenv("QCCL_TRANSPORT", "gloo")
    assert start.choose_way(None) == start.Way("gloo") and start.choose_way("loopback") == start.Way("loopback")
    monkeypatch.setattr(choice, "obstacle", lambda name: f"it has no {name}")
    with pytest.raises(EngineError, match="gloo: rank 0: it has no gloo"):
        start.choose_way(None)


@pytest.mark.mpi
def test_under_a_launcher_its_ranks_are_used(mpi: mpiexec.Mpiexec) -> None:
    done = subprocess.run(
        [mpi.path, *mpi.options(None), "-n", "2", *COMMAND, "allreduce", "-b4K", "-e4K", "-n2"],
        cwd=ROOT,
        env=mpi.environment(2, None, 4096) | os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Out of bounds values") == 1 and done.stdout.count("#  Rank") == 2


def run(transport: str, ranks: int, program: str) -> int:
    """Run a Python program as ``ranks`` ranks."""
    command = [sys.executable, "-c", program]
    return start.run_ranks(ranks, command, way=start.choose_way(transport), lab=None, smallest=0)


DIES = """
import os, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
rank == 1 and {}
time.sleep(60)
"""


@pytest.mark.processes
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
    patience.wait_until(lambda: not workers(process.pid), seconds=10)


@pytest.mark.processes
def test_a_rank_says_nothing_when_nobody_reads_its_lines() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from qccl.bench.sweep.worker import _show; _show('a line')"
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
