"""Files that users name: no pipe or device makes a program wait, and no link of another user leads to a victim."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import qccl
from qccl.base.files import check_writable, read_file, reading, writing
from qccl.base.trace import write_trace
from qccl.bench.cli import main
from qccl.bench.params import output_file, write_json
from qccl.observe.records import FOLDER, read_record

PACKAGE = Path(qccl.__file__).parent
NOBODY = 65534

#: files of the package that open files themselves, also others than those of /proc and /sys
OPENERS = {
    "base/files.py": "what this test demands",
    "bench/lab/lab.py": "/proc, /sys and /etc/netns",
    "bench/lab/namespaces.py": "network namespaces, and /proc",
    "bench/start/processes.py": "a named pipe in a folder of its own, and /proc",
    "bench/start/run.py": "named pipes in a folder of its own",
    "engine/cuda/cache.py": "the cache's folder",
    "engine/cuda/links.py": "/sys",
    "engine/cuda/source.py": "the package's own headers",
    "meeting/secret.py": "a new token, which replaces nothing",
}
_OPENING = re.compile(
    r"open|fdopen|(read|write)_(text|bytes)|fromfile|tofile|memmap|load_cert_chain|load_verify_locations"
)


def opens(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    calls = [call for call in calls if not re.match(r"Path\(f?'/(proc|sys)/", ast.unparse(call))]
    names = [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return any(map(_OPENING.fullmatch, names))


def test_no_other_part_opens_files():
    """A second way to open files would again wait for a pipe, read without a limit, or follow a planted link."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if opens(path)}
    assert found == OPENERS.keys()


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path):
    """A named pipe that no process has open: opening it would wait for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    return path


@pytest.mark.parametrize("name", ["QCCL_TOKEN_FILE", "QCCL_PROFILE"])
def test_a_variable_that_names_a_pipe_is_refused(name, pipe, monkeypatch):
    monkeypatch.setenv(name, str(pipe))
    with pytest.raises(qccl.ArgumentError, match=r"pipe'.* cannot be read: it is a named pipe; give a regular file"):
        qccl.init(rank=0, size=2, address="127.0.0.1:1", timeout=2, backend="host")


def test_a_state_is_read_from_a_regular_file(pipe, tmp_path):
    for path, kind in ((pipe, "a named pipe"), ("/dev/zero", "a device"), (tmp_path, "a folder")):
        with pytest.raises(qccl.ArgumentError, match=f"cannot be read: it is {kind}; give a regular file"):
            qccl.load_state(path)


def test_a_file_has_a_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    assert read_file(path, 1000) == bytes(1000)
    with pytest.raises(
        qccl.ArgumentError, match="file' cannot be read: it has 1,000 bytes, and at most 999 are allowed"
    ):
        read_file(path, 999)
    with pytest.raises(qccl.ArgumentError, match="THE NAME cannot be read: it has 1,000 bytes"):
        read_file(path, 10, name="THE NAME")
    with reading(path, 1000) as file, path.open("ab") as more:
        assert not os.get_inheritable(file.fileno()) and more.write(b"1") == 1
    with pytest.raises(qccl.ArgumentError, match="at most 1,000"):
        read_file(path, 1000)


def test_no_descriptor_stays_open(pipe, tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    for path in (pipe, tmp_path, "/dev/zero"):
        with pytest.raises(qccl.ArgumentError):
            read_file(path, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 10)
    assert set(os.listdir("/proc/self/fd")) <= before  # those that other tests have left may be closed meanwhile


def test_a_command_reads_a_pipe_to_its_end(tmp_path, pipe):
    """As in ``qccl-bench explain <(ssh host cat record)``: its writer may be slow, and a pipe has a limit, too."""

    def from_pipe(content: bytes) -> bytes:
        reader, writer = os.pipe()
        with os.fdopen(reader), os.fdopen(writer, "wb") as to:
            thread = threading.Thread(target=lambda: (to.write(content), to.close()))
            thread.start()
            try:
                return read_file(f"/dev/fd/{reader}", 100_000, pipes=True)
            finally:
                thread.join()

    assert from_pipe(bytes(99_999)) == bytes(99_999)
    with pytest.raises(qccl.ArgumentError, match="it has more bytes, and at most 100,000 are allowed"):
        from_pipe(bytes(100_001))
    assert read_file(pipe, 10, pipes=True) == b""  # nobody writes, and nothing waits
    done = CliRunner().invoke(main, ["explain", str(pipe)])
    assert done.exit_code == 1 and "is not a record of a rank" in done.output


def test_a_command_that_is_given_a_device():
    done = CliRunner().invoke(main, ["explain", "/dev/zero"])
    assert (
        done.exit_code != 0
        and "'/dev/zero' cannot be read: it is a device; give a regular file or a pipe" in done.output
    )


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("precious")
    path.chmod(0o600)
    return path


@pytest.fixture
def shared(tmp_path):
    """A folder in which all users may write, as /tmp."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def planted():
    """Gives what has a name to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can make links of another user")
    return lambda path: os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def save(path: Path) -> None:
    qccl.save_state(path, {"step": 1})


def write(path: Path) -> None:
    with writing(path) as file:
        file.write(b"new")


EVERY_WRITER = pytest.mark.parametrize(
    "write_it",
    [save, lambda path: write_trace(str(path), []), lambda path: write_json(output_file(str(path)), [1])],
    ids=["state", "trace", "JSON"],
)


@EVERY_WRITER
def test_a_link_of_another_user_is_replaced_itself(write_it, shared, victim, planted):
    link = shared / "name"
    link.symlink_to(victim)
    planted(link)
    write_it(link)
    assert victim.read_text() == "precious" and not link.is_symlink()
    assert link.stat().st_uid == os.getuid() and link.stat().st_size > 0
    assert sorted(shared.iterdir()) == [link]


def test_a_record_overwrites_no_victim(shared, victim, planted, monkeypatch):
    monkeypatch.setenv(FOLDER, str(shared))

    def run(comm):
        link = shared / f"{comm.record().group.replace(' ', '-')}-rank-{comm.rank}.json"
        link.symlink_to(victim)
        planted(link)
        with pytest.raises(qccl.MismatchError):
            comm.quantized_allreduce(np.ones(3 + comm.rank, np.float32))
        return read_record(link).rank

    assert qccl.run_ranks(2, run) == [0, 1]
    assert victim.read_text() == "precious" and len(list(shared.iterdir())) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_of_another_user_is_refused_where_all_may_write(shared, victim, is_link, monkeypatch, caplog):
    folder = shared / "records"
    if is_link:
        folder.symlink_to(victim.parent)
    else:
        folder.mkdir(mode=0o777)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    before = sorted(victim.parent.iterdir())
    for write_it in (save, write):
        with pytest.raises(
            PermissionError, match=r"'records' belongs to another user; give a folder of your own: .*/x'"
        ):
            write_it(folder / "x")
    with pytest.raises(ValueError, match=r"cannot be written .'records' belongs to another user"):
        output_file(str(folder / "x"))
    monkeypatch.setenv(FOLDER, str(folder))
    qccl.run_ranks(1, lambda comm: comm._session.write_record("asked for"))
    assert "belongs to another user" in caplog.text
    assert sorted(victim.parent.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_file_or_pipe_of_another_user_is_replaced(shared):
    """Neither its owner nor its mode goes over to the new file, which would then be the other user's to read."""
    file, fifo = shared / "file", shared / "pipe"
    file.write_text("old")
    os.mkfifo(fifo)
    for path in (file, fifo):
        path.chmod(0o666)
        os.chown(path, NOBODY, NOBODY)
        write(path)
        found = path.lstat()
        assert path.read_text() == "new" and found.st_uid == 0 and stat.S_IMODE(found.st_mode) & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_members_of_a_group_share_folders(tmp_path):
    """The folder and the file of a colleague, in a folder that the group may write, are no attack."""
    folder = tmp_path / "project" / "runs"
    folder.mkdir(parents=True)
    (folder / "x").write_text("old")
    for path in (folder / "x", folder, folder.parent):
        path.chmod(0o2775)
        os.chown(path, NOBODY, NOBODY)
    write(folder / "x")
    assert (folder / "x").read_text() == "new" and (folder / "x").stat().st_uid == NOBODY


@EVERY_WRITER
@pytest.mark.parametrize("is_there", [True, False])
def test_own_links_are_followed_also_over_several(write_it, is_there, tmp_path):
    """The target is replaced and keeps its mode, or is made."""
    target, folder, link = tmp_path / "a" / "target", tmp_path / "folder", tmp_path / "first"
    target.parent.mkdir()
    if is_there:
        target.write_text("old")
        target.chmod(0o640)
    folder.symlink_to("a", target_is_directory=True)
    (tmp_path / "a" / "second").symlink_to("../a/./target")
    link.symlink_to(folder / "second")
    write_it(link)
    assert target.stat().st_size > 3 and not target.is_symlink() and link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640 or not is_there
    assert sorted(path.name for path in target.parent.iterdir()) == ["second", "target"]


@EVERY_WRITER
@pytest.mark.parametrize("is_link", [False, True])
def test_a_pipe_is_written_into(write_it, is_link, pipe, tmp_path):
    """It stands for /dev/stderr, which may be a link to a pipe."""
    path = tmp_path / "link" if is_link else pipe
    if is_link:
        path.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # a writer need not wait
    try:
        write_it(path)
        assert os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and path.is_symlink() == is_link


@EVERY_WRITER
def test_a_device_is_written_into(write_it, tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.open("w").close()
    except PermissionError as error:
        pytest.skip(f"this user may not make or use a device there: {error}")
    write_it(device)
    assert stat.S_ISCHR(device.stat().st_mode)


def test_an_exception_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), writing(path) as file:
        file.write(b"the first bytes")
        raise KeyboardInterrupt
    with pytest.raises(TypeError):
        write_json(str(path), ["begun", object()])
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_with_the_name_of_the_temporary_file_is_not_followed(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "0")
    (tmp_path / "x.0.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(tmp_path / "x")
    assert victim.read_text() == "precious"


def test_what_cannot_be_written_names_the_path(tmp_path, pipe):
    (tmp_path / "loop").symlink_to("loop")
    missing = tmp_path / "none" / "x"
    folders = [(path, IsADirectoryError) for path in (tmp_path, f"{tmp_path}/", f"{tmp_path}/.", "/")]
    for path, kind in ((missing, FileNotFoundError), *folders, (tmp_path / "loop", OSError)):
        for use in (write, check_writable):
            with pytest.raises(kind, match=re.escape(f"'{path}'")):
                use(path)
    with pytest.raises(OSError, match=r"no process has this pipe open to read: .*/pipe'"):
        save(pipe)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.processes
@pytest.mark.parametrize("way", ["/dev/stdout", "/proc/self/fd/1"])
def test_standard_output_is_written_into(way, tmp_path):
    """The path of a pipe, which has no name, and of a file, which is replaced as any other."""
    program = f"from qccl.bench.params import write_json; write_json({way!r}, [1])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[\n 1\n]\n"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, timeout=60, check=True)
    assert (tmp_path / "file").read_text() == "[\n 1\n]\n" and Path(way).is_symlink()
