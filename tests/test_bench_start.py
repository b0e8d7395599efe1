"""qccl-bench with ranks that mpiexec starts, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_bench import LAUNCHERS

from qccl.bench import start
from qccl.bench.kinds import KINDS

ROOT = Path(__file__).parent.parent


def bench(*arguments: str, limit: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run qccl-bench in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "qccl.bench", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in LAUNCHERS} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )


# -- ranks by mpiexec --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpi() -> start.Mpiexec:
    try:
        return start.find_mpiexec()
    except start.StartError as error:
        pytest.skip(str(error))


def test_settings_leave_the_users_own_alone(mpi: start.Mpiexec) -> None:
    for name in ("MPICH", "Open MPI"):
        settings = start.Mpiexec("mpiexec", name, "5.0").environment(1000, None, 1 << 20)
        assert any("yield" in key.lower() for key in settings)
        assert not any("ALLREDUCE" in key.upper() for key in settings)


@pytest.mark.mpi
def test_the_command_starts_ranks_and_reports(mpi: start.Mpiexec, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "trace")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    done = bench("allreduce", "--ranks=3", "-b4K", "-e64K", "-f16", "-n3", "--codec=minmax8,none", *flags)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert [line.split()[-1] for line in rows] == ["mpi", "minmax8", "none"] * 2
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert done.stdout.count("#  Rank") == 3
    assert "\x1e" not in done.stdout + done.stderr and done.stderr == ""
    found = json.loads(files["json"].read_text())
    assert found["args"][:2] == ["qccl-bench", "allreduce"] and len(found["results"]) == 4
    assert {event["pid"] for event in json.loads(files["trace"].read_text())["traceEvents"]} == {0, 1, 2}


@pytest.mark.mpi
def test_under_a_launcher_its_ranks_are_used(mpi: start.Mpiexec) -> None:
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


@pytest.mark.mpi
def test_a_rank_that_fails_is_reported_and_none_is_left(mpi: start.Mpiexec) -> None:
    die = (
        "from mpi4py import MPI; import os, time; MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    )
    begin = time.monotonic()
    command = [sys.executable, "-c", die]
    status = start.run_ranks_by_mpiexec(3, command, lab=None, smallest=0, silence=30, on_line=lambda line: None)
    assert status != 0 and time.monotonic() - begin < 25


@pytest.mark.mpi
def test_silent_ranks_are_given_up(mpi: start.Mpiexec) -> None:
    begin = time.monotonic()
    with pytest.raises(start.StartError, match="printed nothing for 1 s"):
        command = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
        start.run_ranks_by_mpiexec(2, command, lab=None, smallest=0, silence=1, on_line=lambda line: None)
    assert time.monotonic() - begin < 15


@pytest.mark.mpi
def test_broken_output_of_a_command_that_ends_is_complete(mpi: start.Mpiexec) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", "print('a\\nb', end='')"]
    assert start.run_ranks_by_mpiexec(1, command, lab=None, smallest=0, silence=30, on_line=lines.append) == 0
    assert lines == ["a", "b"]


def test_signals_unwind_once() -> None:
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        before = signal.getsignal(number)
        with pytest.raises(expected) as caught, start.stoppable():
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
