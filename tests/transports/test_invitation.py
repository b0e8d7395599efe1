"""The proof that two processes can share memory: what is read, and what is not even opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qccl.transports import invitation, topology
from qccl.transports.invitation import Invitation, invite

ROOT = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 3


@pytest.fixture
def invited():
    found = invite(CONTENT)
    assert found is not None
    yield found[0]
    os.close(found[1])


@pytest.mark.processes
def test_another_process_reads_it_as_long_as_it_is_open():
    program = (
        "import sys; from qccl.transports.invitation import invite; found = invite(bytes(range(256)) * 3);"
        "print(found[0].text().decode(), flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        found = Invitation.parse(process.stdout.readline().rstrip())
        assert found is not None and found.process == process.pid and found.machine == invitation.machine()
        assert found.content() == CONTENT
        process.kill()
        process.wait(20)
        assert found.content() == b""
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_the_text(invited):
    assert Invitation.parse(invited.text()) == invited
    for wrong in (b"", b"x", invited.text() + b" ", invited.text()[:-1], b"../" + invited.text(), b"\xff" * 80):
        assert Invitation.parse(wrong) is None


def test_a_content_that_was_changed_or_is_another_one_is_not_used(invited):
    assert invited._replace(checksum="0" * 32).content() == b""
    with open(f"/proc/self/fd/{invited.descriptor}", "r+b") as file:
        file.write(b"changed")
    assert invited.content() == b""


def test_other_files_are_not_opened(invited, tmp_path, monkeypatch):
    """A rank that lies might name a device, on which opening has an effect, or a pipe, on which it would wait."""
    named = Path("/dev/shm") / f"qccl-test-{os.getpid()}"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened = [os.open("/dev/null", os.O_RDONLY), os.open(fifo, os.O_RDWR), os.open(tmp_path, os.O_RDONLY)]
    opened.append(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    opened.append(os.open(named, os.O_CREAT | os.O_RDWR, 0o600))
    opened.append(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR))
    os.ftruncate(opened[-1], (1 << 16) + 1)
    named_ones = []
    real = os.open
    try:
        monkeypatch.setattr(os, "open", lambda *arguments: named_ones.append(arguments) or real(*arguments))
        for descriptor in opened:
            assert invited._replace(descriptor=descriptor).content() == b""
        assert invited._replace(descriptor=999_999).content() == b""
        assert invited._replace(process=(1 << 31) - 1).content() == b""
        assert named_ones == []
        assert invited.content() == CONTENT
    finally:
        monkeypatch.undo()
        for descriptor in opened:
            os.close(descriptor)
        named.unlink()


@pytest.mark.parametrize("unknown", ["network_id", "memory_id"])
def test_without_a_known_machine_there_is_no_invitation(unknown, monkeypatch):
    monkeypatch.setattr(invitation, unknown, lambda: "")
    assert invite(CONTENT) is None


def test_network_namespaces_count_as_machines(monkeypatch):
    first = invitation.machine()
    monkeypatch.setattr(topology, "_network", lambda: 7)
    assert invitation.machine() not in ("", first)
