"""qccl-bench run: a user's program as several ranks, its lines, its exit status, and in the lab its traffic."""

from __future__ import annotations

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
from bench_runs import OF_TWO_RANKS, ROOT, bench, started, traces, workers
from click.testing import CliRunner

from qccl.bench.cli import main
from qccl.bench.lab import lab
from qccl.bench.start import start


def needs(what: str, reason: str | None) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs the lab, or a transport."""
    return [getattr(pytest.mark, what), pytest.mark.skipif(bool(reason), reason=reason or "it is there")]


LAB = needs("lab", lab.obstacle())
MPI, UCX = (needs("mpi", start.obstacle(transport)) for transport in ("mpi", "ucx"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return bench("run", *arguments, **environment)


def shell(program: str) -> list[str]:
    return ["--", "sh", "-c", program]


@pytest.mark.processes
def test_ranks_have_torchruns_variables_and_lines_their_ranks_numbers() -> None:
    variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    show = " ".join(f"${name}" for name in variables)
    done = run("--ranks=3", *shell(f'echo {show}; echo "to stderr" >&2; printf "no end"'))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    numbered = [line for line in lines if "no end" not in line]
    assert [line.split()[:6] for line in numbered] == [
        [f"[{rank}]", str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)
    ]
    (port,) = {int(line.split()[6]) for line in numbered}
    assert 0 < port < 1 << 16
    assert sorted(set(lines) - set(numbered)) == [f"[{rank}] no end" for rank in range(3)]
    assert {f"[{rank}] to stderr" for rank in range(3)} < set(done.stderr.splitlines())
    assert re.search(r"^# qccl-bench run: 3 ranks, [\d.]+ s$", done.stderr, re.M) and "link" not in done.stderr


@pytest.mark.quick
@pytest.mark.processes
def test_the_first_program_of_the_readme(tmp_path: Path) -> None:
    """By the command that stands below it: each rank prints the first elements of the same sum."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.search(r"^```python\n(# sum\.py: .*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    flags = re.search(r"^qccl-bench run (.*) -- python sum\.py", page, re.MULTILINE)[1]
    (tmp_path / "sum.py").write_text(text)
    done = run(*flags.split(), "--", sys.executable, str(tmp_path / "sum.py"))
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split(maxsplit=2) for line in done.stdout.splitlines())
    assert [line[:2] for line in lines] == [[f"[{rank}]", str(rank)] for rank in range(4)]
    assert len({line[2] for line in lines}) == 1, lines


@pytest.mark.processes
def test_what_the_user_has_set_is_left_alone() -> None:
    done = run("--ranks=2", *shell("echo $OMP_NUM_THREADS"), OMP_NUM_THREADS="77")
    assert sorted(done.stdout.splitlines()) == ["[0] 77", "[1] 77"]


@pytest.mark.parametrize("launcher", [pytest.param("mpiexec", marks=MPI)])
def test_mpiexec_starts_the_ranks(launcher: str) -> None:
    done = run("--ranks=2", f"--launcher={launcher}", *shell("echo ${PMI_RANK:-$OMPI_COMM_WORLD_RANK} $MASTER_ADDR"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 127.0.0.1", "[1] 1 127.0.0.1"]


@pytest.mark.processes
def test_the_exit_status_of_the_first_rank_that_failed_is_passed_on_and_the_others_are_ended(tmp_path: Path) -> None:
    path, begin = tmp_path / "x.json", time.monotonic()
    done = run("--ranks=3", f"--json={path}", *shell('[ "$RANK" = 1 ] && exit 7; sleep 90'))
    assert done.returncode == 7 and time.monotonic() - begin < 60
    found = json.loads(path.read_text())
    assert found["status"] == 7 and found["ranks"] == 3 and found["sent"] == [] and found["command"][0] == "sh"


@pytest.mark.processes
def test_a_process_that_outlives_its_rank_is_ended() -> None:
    """It holds the pipe of the rank's output open."""
    begin = time.monotonic()
    done = run("--ranks=1", *shell("sleep 90 & echo started"))
    assert done.returncode == 0 and done.stdout == "[0] started\n" and time.monotonic() - begin < 60


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["run", "true"])
    text = " ".join(result.output.split())
    assert "torchrun has started 2; start it without a launcher, or if there was none" in text
    assert text.endswith("with env -u RANK -u WORLD_SIZE")


FOUND = "from qccl.meeting.launchers import detect; found = detect(); print(found.name, found.rank, found.size)"
#: what srun -n 1, mpiexec -n 1 and torchrun --nproc-per-node 1 set, and a batch script that asks for 4 tasks
ONE_TASK = {
    "srun": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "99"},
    "torchrun": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
    "sbatch": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
}


@pytest.mark.processes
@pytest.mark.parametrize("outer", ONE_TASK)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpiexec", marks=MPI)])
def test_below_a_launcher_of_one_task_the_ranks_know_only_their_own(outer: str, launcher: str) -> None:
    done = run("--ranks=2", f"--launcher={launcher}", "--", sys.executable, "-c", FOUND, **ONE_TASK[outer])
    name = "torchrun" if launcher == "torchrun" else "MPI"
    found = sorted(done.stdout.replace("MPICH", "MPI").replace("Open MPI", "MPI").splitlines())
    assert found == [f"[{rank}] {name} {rank} 2" for rank in range(2)], done.stderr


# -- in the lab --------------------------------------------------------------------------------------------------------

CALLS = """
import numpy as np, os, time, qccl
time.sleep(1)
with qccl.init("host") as comm:
    x = np.ones(1 << 18, np.float32)
    for _ in range(8):
        comm.quantized_allreduce(x, codec="none")
    print(comm.transport.name, os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [pytest.param("mpiexec", "mpi", marks=[*LAB, *MPI]), pytest.param("torchrun", "ucx", marks=[*LAB, *UCX])],
)
def test_traffic_crosses_the_links_and_is_counted(launcher: str, transport: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["--ranks=2", "--link=400mbit", f"--launcher={launcher}", f"--json={path}"]
    done = run(*flags, "--", sys.executable, "-c", CALLS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {transport} eth0" for rank in range(2)]
    found = json.loads(path.read_text())
    assert all(8 << 20 <= sent < 9.5 * (1 << 20) for sent in found["sent"])
    assert found["seconds"] > 1 + 0.9 * (8 << 20) / 50e6  # it is limited
    assert traces(os.getpid()) == []
    for rank, sent in enumerate(found["sent"]):
        share = sent / (50e6 * found["seconds"])
        assert f"# {rank:>4} {sent / 1e6:>10.3f} {share:>7.1%}" in done.stderr.splitlines()


@pytest.mark.parametrize("link", [pytest.param("1gbit", marks=LAB)])
def test_control_c_ends_everything_and_the_traffic_is_printed(link: str) -> None:
    process = started("run", "--ranks=2", f"--link={link}", *shell("echo up; sleep 90"))
    try:
        assert process.stdout.readline().endswith("up\n") and len(traces(process.pid)) == OF_TWO_RANKS
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 130 and "stopped; its ranks and networks are gone" in errors
        assert "sent MB" in errors and "Traceback" not in errors
        assert traces(process.pid) == [] and workers(process.pid) == []
    finally:
        process.kill()
        process.communicate(timeout=20)
        patience.wait_until(lambda: not workers(process.pid), seconds=20)
        lab.remove_stale()
