"""The JSON that qccl-bench writes: whole or not at all, into files, pipes and devices, and on standard output."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from qccl.bench import params
from qccl.bench.cli import main
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


def test_json_of_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = ["-b", "64K", "-n", "1", "-d", "float", "--codec", "minmax8,none", "--json", str(path)]
    result = CliRunner().invoke(main, ["codec", *flags])
    assert result.exit_code == 0 and "memcpy" in result.output, result.output
    assert [row["codec"] for row in json.loads(path.read_text())["results"]] == ["minmax8", "none"]
