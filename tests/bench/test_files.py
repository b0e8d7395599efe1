"""The JSON that qccl-bench writes: whole or not at all, into files, pipes and devices, and on standard output."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from bench_runs import bench
from separate_streams import invoke

from qccl.bench import collective, params
from qccl.bench.options import Options
from qccl.bench.params import output_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    params.write_json(str(path), [1])
    with pytest.raises(TypeError):
        params.write_json(str(path), ["begun", object()])
    assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_into_also_behind_a_symbolic_link(tmp_path: Path) -> None:
    """A pipe stands for /dev/null and /dev/stderr: what exists and is no regular file stays."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # a writer need not wait
    try:
        for path in (pipe, link):
            params.write_json(output_file(str(path)), [1])
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
    params.write_json(output_file(str(device)), [1])
    assert stat.S_ISCHR(device.stat().st_mode)


def test_the_target_of_a_symbolic_link_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, new = tmp_path / "folder" / "x.json", tmp_path / "link", tmp_path / "new"
    target.write_text("[]")
    target.chmod(0o640)
    link.symlink_to(target)
    new.symlink_to("folder/y.json")  # which does not exist yet
    for path in (link, new):
        params.write_json(output_file(str(path)), [2])
        assert path.is_symlink() and json.loads(path.read_text()) == [2]
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in target.parent.iterdir()) == ["x.json", "y.json"]


def test_the_temporary_name_cannot_be_foreseen(tmp_path: Path) -> None:
    """In a folder that others may write, a link with that name would lead the writer to another file."""
    path, victim = tmp_path / "x.json", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"x.json.{os.getpid()}.tmp").symlink_to(victim)
    params.write_json(str(path), [3])
    assert victim.read_text() == "precious" and json.loads(path.read_text()) == [3]


def test_json_of_the_kernels_goes_to_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["codec", "-b", "64K", "-n", "1", "-d", "float", "--codec", "minmax8,none", "--json"]
    result = invoke(*flags, "-")
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
    assert "# Out of bounds values : 0 OK" in done.stderr


def test_the_report_comes_though_the_run_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(ranks, command, *, stdout, **given):
        params.write_json(Options.from_json(command[-1]).json, {"results": [1]})
        print("a row", file=stdout)
        raise KeyboardInterrupt

    monkeypatch.setattr(collective, "detect", lambda: None)
    monkeypatch.setattr(collective, "run_ranks", stopped)
    result = invoke("allreduce", "--json=-")
    assert result.exit_code == 130 and json.loads(result.stdout) == {"results": [1]}
    assert result.stderr.startswith("a row\n")
