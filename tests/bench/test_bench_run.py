"""qccl-bench run: a user's program as several ranks, its lines, its exit status, and in the lab its traffic."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_runs import OF_TWO_RANKS, bench, started, traces, within, workers
from click.testing import CliRunner

from qccl.bench import lab, start
from qccl.bench.cli import main
from qccl.scalars import parse_seconds


def needs(what: str, reason: str | None) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs the lab, or a transport."""
    return [getattr(pytest.mark, what), pytest.mark.skipif(bool(reason), reason=reason or "it is there")]


LAB = needs("lab", lab.obstacle())
MPI, UCX = (needs("mpi", start.obstacle(transport)) for transport in ("mpi", "ucx"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return bench("run", *arguments, **environment)


def shell(program: str) -> list[str]:
    return ["--", "sh", "-c", program]


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


def test_what_the_user_has_set_is_left_alone() -> None:
    done = run("--ranks=2", *shell("echo $OMP_NUM_THREADS"), OMP_NUM_THREADS="77")
    assert sorted(done.stdout.splitlines()) == ["[0] 77", "[1] 77"]


@pytest.mark.parametrize("launcher", [pytest.param("mpiexec", marks=MPI)])
def test_mpiexec_starts_the_ranks(launcher: str) -> None:
    done = run("--ranks=2", f"--launcher={launcher}", *shell("echo ${PMI_RANK:-$OMPI_COMM_WORLD_RANK} $MASTER_ADDR"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 127.0.0.1", "[1] 1 127.0.0.1"]


def test_the_exit_status_of_the_first_rank_that_failed_is_passed_on_and_the_others_are_ended(tmp_path: Path) -> None:
    path, begin = tmp_path / "x.json", time.monotonic()
    done = run("--ranks=3", f"--json={path}", *shell('[ "$RANK" = 1 ] && exit 7; sleep 90'))
    assert done.returncode == 7 and time.monotonic() - begin < 60
    found = json.loads(path.read_text())
    assert found["status"] == 7 and found["ranks"] == 3 and found["sent"] == [] and found["command"][0] == "sh"


def test_a_process_that_outlives_its_rank_is_ended() -> None:
    """It holds the pipe of the rank's output open."""
    begin = time.monotonic()
    done = run("--ranks=1", *shell("sleep 90 & echo started"))
    assert done.returncode == 0 and done.stdout == "[0] started\n" and time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Missing argument 'COMMAND...'"),
        (
            ["--delay=20ms", "true"],
            "--delay is for the lab's links, which need rates, too; give --link, or --up and --down",
        ),
        (["--delay=20", "--link=1gbit", "true"], "'20' is not a time; give a positive number with us, ms or s"),
        (["--link=fast", "true"], "'fast' is not a link's rate"),
        (["--link=1gbit", "--ranks=1", "true"], "nothing would cross the link"),
        (["--launcher=srun", "true"], "'srun' is not one of 'torchrun', 'mpiexec'"),
        (["--", "no-such-program", "--ranks=3"], "'no-such-program' is no program in PATH"),
    ],
)
def test_refused(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qccl.bench.run.obstacle", lambda: None)
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


def test_a_link_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(main, ["run", "--link=1gbit", "true"])
    assert result.exit_code == 2 and "need root" in result.output


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["run", "true"])
    assert "torchrun has started 2; start it without a launcher" in " ".join(result.output.split())


def test_seconds() -> None:
    assert [parse_seconds(text) for text in ("20ms", "1.5s", "300US")] == [0.02, 1.5, 0.0003]
    for text in ("", "20", "0ms", "-1s", "1h"):
        with pytest.raises(ValueError, match="is not a time"):
            parse_seconds(text)


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
    assert 1 < found["began"] < found["seconds"]
    for rank, sent in enumerate(found["sent"]):
        share = sent / (50e6 * (found["seconds"] - found["began"]))
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
        within(20, lambda: not workers(process.pid))
        lab.remove_stale()
