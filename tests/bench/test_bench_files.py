"""qccl-bench: the JSON after each row, codecs with state, errors under launchers, torchrun's ranks."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from bench_runs import ROOT, bench
from click.testing import CliRunner
from start_ranks import start

import qccl
from qccl.bench import collective, files, launched, sweep, table
from qccl.bench.cli import main
from qccl.bench.columns import COLUMNS
from qccl.bench.options import Options
from qccl.bench.params import output_file
from qccl.bench.sweep import Sweep

STATEFUL = ("onebit+ef", "topk:k=0.01+ef+nesterov:mu=0.9", "randomk:k=0.1+nesterov:mu=0.9", "minmax4+nesterov:mu=0.5")


def swept(ranks: int, options: Options) -> tuple[list[bool], list[str]]:
    lines: list[str] = []
    return qccl.run_ranks(ranks, lambda comm: Sweep(comm, options, emit=lines.append).run()), lines


# -- codecs with state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective_name", ["allreduce", "allreduce_coalesced"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_codecs_that_keep_something_are_measured_and_right(ranks: int, collective_name: str) -> None:
    """Each check compares the bits of a call without earlier state."""
    options = Options(
        *(4096, 65536, 0, 16, 2, 1),
        check=2,
        codecs=STATEFUL,
        ops=("sum", "avg"),
        dtypes=("float", "half"),
        collective=collective_name,
        arrays=3,
    )
    okay, lines = swept(ranks, options)
    assert all(okay)
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[-1] for row in rows if row[-1] != "none"] == list(STATEFUL) * 8
    assert {row[i] for row in rows for i in (8, 12)} == {"0"}  # elements that are wrong


# -- the JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [qccl.EngineError("the link is cut"), KeyboardInterrupt()])
def test_what_was_measured_before_an_error_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path, found = tmp_path / "x.json", []
    measure = sweep.measure

    def failing(comm, calls, *args, **kwargs):
        if calls[0].case.nbytes == 65536:
            found.append(json.loads(path.read_text()))
            raise error
        return measure(comm, calls, *args, **kwargs)

    monkeypatch.setattr(sweep, "measure", failing)
    options = Options(4096, 65536, stepfactor=16, iters=1, codecs=("minmax8", "minmax4"), json=str(path))
    with pytest.raises(type(error)):
        swept(1, options)
    (before,), after = found, json.loads(path.read_text())
    assert [row["codec"] for row in before["results"]] == ["minmax8", "minmax4"]
    assert not before["complete"] and not after["complete"] and after["results"] == before["results"]
    assert after["errors"] == (["EngineError: the link is cut"] if isinstance(error, qccl.EngineError) else [])


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    swept(1, Options(4096, 4096, iters=1, json=str(path)))
    found = json.loads(path.read_text())
    assert found["complete"] and found["errors"] == [] and len(found["results"]) == 1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(str(path), [1])
    with pytest.raises(TypeError):
        files.write_json(str(path), ["begun", object()])
    assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_into_also_behind_a_symbolic_link(tmp_path: Path) -> None:
    """A pipe stands for /dev/null and /dev/stderr: what exists and is no regular file stays."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # a writer need not wait
    try:
        for path in (pipe, link):
            files.write_json(output_file(str(path)), [1])
            assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
            assert json.loads(os.read(reader, 1 << 16)) == [1]
    finally:
        os.close(reader)
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_device_is_written_into(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.open("w").close()
    except PermissionError as error:
        pytest.skip(f"this user may not make or use a device there: {error}")
    files.write_json(output_file(str(device)), [1])
    assert stat.S_ISCHR(device.stat().st_mode)


def test_the_target_of_a_symbolic_link_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, new = tmp_path / "folder" / "x.json", tmp_path / "link", tmp_path / "new"
    target.write_text("[]")
    target.chmod(0o640)
    link.symlink_to(target)
    new.symlink_to("folder/y.json")  # which does not exist yet
    for path in (link, new):
        files.write_json(output_file(str(path)), [2])
        assert path.is_symlink() and json.loads(path.read_text()) == [2]
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in target.parent.iterdir()) == ["x.json", "y.json"]


def test_the_temporary_name_cannot_be_foreseen(tmp_path: Path) -> None:
    """In a folder that others may write, a link with that name would lead the writer to another file."""
    path, victim = tmp_path / "x.json", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"x.json.{os.getpid()}.tmp").symlink_to(victim)
    files.write_json(str(path), [3])
    assert victim.read_text() == "precious" and json.loads(path.read_text()) == [3]


def test_json_of_the_kernels_goes_to_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["codec", "-b", "64K", "-n", "1", "-d", "float", "--codec", "minmax8,none", "--json"]
    result = CliRunner().invoke(main, [*flags, "-"])
    assert result.exit_code == 0, result.output
    assert [row["codec"] for row in json.loads(result.stdout)["results"]] == ["minmax8", "none"]
    assert "memcpy" in result.stderr


@pytest.mark.mpi
def test_json_on_standard_output_and_the_table_on_standard_error() -> None:
    flags = ["--ranks=2", "-b4K", "-e4K", "-n2", "--codec=minmax8,onebit+ef", "--json=-"]
    done = bench("allreduce", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"] and [row["codec"] for row in found["results"]] == ["minmax8", "onebit+ef"]
    assert "# Out of bounds values : 0 OK" in done.stderr and "\x1d" not in done.stderr


def test_the_report_comes_though_the_run_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(ranks, command, *, on_line, **given):
        on_line(collective.encode_progress(0, 2, "4K"))
        on_line(sweep.encode_report({"results": [1]}))
        on_line("a row")
        raise KeyboardInterrupt

    monkeypatch.setattr(collective, "detect", lambda: None)
    monkeypatch.setattr(collective, "run_ranks", stopped)
    result = CliRunner().invoke(main, ["allreduce", "--json=-"])
    assert result.exit_code == 130 and json.loads(result.stdout) == {"results": [1]}
    assert result.stderr.startswith("a row\n")


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["reduce", "--codec=minmax8,onebit+ef"],
            "onebit+ef keeps its residual from call to call, which reduce does not",
        ),
        (
            ["allreduce", "--codec=minmax8+ef", "-omax"],
            "use minmax8, or a collective with state: allreduce, hierarchical_allreduce and reduce_scatter, with op",
        ),
        (["allreduce", "--codec=topk:k=0.1", "-osum,min"], "op 'min' is not possible with topk"),
        (["broadcast", "--root=2"], "root=2 is not a rank"),
    ],
)
def test_calls_that_are_impossible_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], part: str
) -> None:
    monkeypatch.setattr(collective, "detect", lambda: None)
    monkeypatch.setattr(collective, "run_ranks", lambda *args, **kwargs: pytest.fail("ranks were started"))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and part in " ".join(result.output.split())


@pytest.mark.parametrize("flags", [["-f", "1"], ["-b", "2K", "-e", "1K"], ["--codec=topk:k=0.1", "-omin"], ["--nope"]])
def test_rank_0_of_a_launcher_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """The others print nothing and exit with 0, so that rank 0 can report; none exits before the exchange."""
    met: list[str] = []
    monkeypatch.setattr(launched, "_all_errors", lambda launcher, text: met.append(text) or [text])
    monkeypatch.setenv("PMI_SIZE", "2")
    found = []
    for rank in range(2):
        monkeypatch.setenv("PMI_RANK", str(rank))
        found.append(CliRunner().invoke(main, ["allreduce", *flags]))
    assert found[0].exit_code == 2 and "Error: " in found[0].output
    assert (found[1].exit_code, found[1].output) == (0, "")
    assert len(met) == 2 and all(met)


IN_FOLDER = """
import os, sys
os.chdir(sys.argv.pop(1) + os.environ["PMI_RANK"])
from qccl.bench.cli import main
main()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("lacking", [(0, 1), (1,), (0,)])
def test_a_folder_that_some_ranks_lack(tmp_path: Path, lacking: tuple[int, ...]) -> None:
    """The job ends, whichever ranks cannot write the file, and rank 0 says why."""
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        if rank not in lacking:
            (tmp_path / f"rank{rank}" / "x").mkdir()
    arguments = ["allreduce", "-b1024", "-e1024", "-n2", "--json", "x/out.json"]
    ended = start(2, "-c", IN_FOLDER, str(tmp_path / "rank"), *arguments, limit=60)
    assert ended.status == 2 and ended.output.count("cannot be written") == 1, ended.output
    assert ("rank 1: " in ended.output) == (lacking == (1,)), ended.output


# -- columns -----------------------------------------------------------------------------------------------------------


def test_every_column_is_explained_in_the_help_and_on_the_page() -> None:
    titles = " ".join(table.header("mpi", lab=True)).replace("out-of-place", "").replace("in-place", "")
    known = set(re.sub(r"\(.*?\)|GB/s|\b(out|in)\b|#(?!wrong)", " ", titles).replace("L2 err", " ").split()) - {
        "vs",
        "mpi",
    }
    assert known == set(COLUMNS) - {"L2 err", "vs mpi"}
    page = " ".join((ROOT / "bench" / "README.md").read_text(encoding="utf-8").split())
    for arguments in (["--help"], ["allreduce", "--help"]):
        shown = " ".join(CliRunner().invoke(main, arguments).output.split())
        for name, text in COLUMNS.items():
            assert f"{name} {text}" in shown and f"- **{name}**: {text}" in page
    assert "(bench/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


# -- torchrun ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "over", "plain"), [([], "UCX ", "none"), (["--transport=gloo"], "gloo of PyTorch ", "gloo")]
)
def test_under_torchrun_its_ranks_are_used(flags: list[str], over: str, plain: str, port: int) -> None:
    """Over UCX, compared with no compression, or over gloo, compared with its own all-reduce; rank 0 prints."""
    pytest.importorskip("torch")
    others = ("PMI_", "OMPI_", "SLURM_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    flags = ["-b4K", "-e4K", "-n2", "--codec=minmax8", "-T30", *flags]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "qccl.bench", "allreduce", *flags],
            cwd=ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    lines = ends[0][0].splitlines()
    assert [line.split()[-1] for line in lines if not line.startswith("#")] == [plain, "minmax8"]
    assert f"allreduce over {over}" in lines[0] and f"plain: {plain}" in lines[0]
    assert "# Out of bounds values : 0 OK" in lines
    assert ends[1][0] == ""
