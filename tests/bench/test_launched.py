"""qccl-bench as the ranks of a launcher: who says what is wrong, and torchrun's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import codecs_of, under_torchrun
from click.testing import CliRunner
from start_ranks import start

import qccl
from qccl.bench.cli import main
from qccl.bench.start import launched
from qccl.bench.sweep import collective, worker

IN_FOLDER = """
import os, sys
os.chdir(sys.argv.pop(1) + os.environ["PMI_RANK"])
from qccl.bench.cli import main
from qccl.bench.options import KINDS
main()
"""


@pytest.mark.parametrize("flags", [["-f", "1"], ["-b", "2K", "-e", "1K"], ["--codec=topk:k=0.1", "-omin"], ["--nope"]])
def test_rank_0_of_a_launcher_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """The others initialize MPI, as it does, and give it the time to report and to end them."""
    done: list[object] = []
    monkeypatch.setattr(launched, "_abort_of_mpi", lambda launcher: done.append("initializes") or done.append)
    monkeypatch.setattr(launched.time, "sleep", done.append)
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank, steps in ((0, ["initializes", 2]), (1, ["initializes", 2.0, 2])):
        done.clear()
        monkeypatch.setenv("PMI_RANK", str(rank))
        found = CliRunner().invoke(main, ["allreduce", *flags])
        assert found.exit_code == 2 and found.output.count("Error: ") == 1 and done == steps


def test_a_rank_without_a_rank_0_says_itself_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are left over from a job that has ended."""
    monkeypatch.setattr(launched, "uses_mpi", lambda launcher, wanted: False)
    monkeypatch.setattr(launched, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    for arguments in (["allreduce", "--nope"], ["nope"], ["run", "--nope", "true"], ["run", "true"]):
        found = CliRunner().invoke(main, arguments)
        assert found.exit_code == 2 and "Error: " in found.output, arguments

    def refuse(*args: object, **options: object) -> None:
        raise qccl.ArgumentError("it is alone")

    monkeypatch.setattr(worker, "init", refuse)
    waits: list[float] = []
    monkeypatch.setattr(launched.time, "sleep", waits.append)
    found = CliRunner().invoke(main, ["allreduce", "-b8", "-e8"])
    assert waits == [0.0]  # for rank 0, which would say the same, and whose launcher would end this rank
    assert found.exit_code == 1 and "ArgumentError: it is alone" in found.output


def test_half_a_set_of_a_launchers_variables_is_an_error_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MV2_COMM_WORLD_RANK", "1")
    for arguments in (["allreduce"], ["run", "true"], ["doctor", "--link=1gbit", "--step=1ms", "--parameters=9"]):
        found = CliRunner().invoke(main, arguments)
        assert found.exit_code == 1 and "Error: ArgumentError: MV2_COMM_WORLD_RANK=1" in found.output, arguments


def test_below_a_launcher_of_one_task_the_command_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setattr(collective, "_start", lambda ranks, *_: print("starts", ranks) or 0)
    monkeypatch.setattr(collective, "_join", lambda launcher, *_: print("is one of", launcher.size) or 0)
    for flags, said in ((["--ranks=3"], "starts 3"), (["--transport=loopback"], "starts 2"), ([], "is one of 1")):
        assert CliRunner().invoke(main, ["allreduce", *flags]).output == f"{said}\n"


@pytest.mark.mpi
@pytest.mark.parametrize("lacking", [(0, 1), (1,), (0,)])
def test_a_folder_that_some_ranks_lack(tmp_path: Path, lacking: tuple[int, ...]) -> None:
    """The job ends, whichever ranks cannot write the file, and one of them says why."""
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        if rank not in lacking:
            (tmp_path / f"rank{rank}" / "x").mkdir()
    arguments = ["allreduce", "-b1024", "-e1024", "-n2", "--json", "x/out.json"]
    ended = start(2, "-c", IN_FOLDER, str(tmp_path / "rank"), *arguments, limit=60)
    assert ended.status == 2 and ended.output.count("cannot be written") == 1, ended.output


@pytest.mark.processes
def test_under_torchrun_its_ranks_are_used() -> None:
    """Over UCX, compared with no compression; rank 0 prints."""
    (first, _), (second, _) = under_torchrun("allreduce", "-b4K", "-e4K", "-n2", "--codec=minmax8", "-T30")
    assert codecs_of(first) == ["none", "minmax8"] and second == ""
    head = first.splitlines()[0]
    assert "allreduce over UCX " in head and "plain: none" in head and "# Out of bounds values : 0 OK" in first
