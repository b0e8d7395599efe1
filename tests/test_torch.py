"""The ranks of a torch.distributed group over gloo, each a process: bytes, failures, and that processes end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@dataclass(frozen=True)
class Ended:
    """How a rank ended ("stopped" where it did not), when, and what it wrote."""

    status: str
    time: float
    out: str
    err: str

    def check(self, last: str) -> None:
        assert self.status == "0" and self.out.endswith(f"done {last}\n"), f"{self.status}\n{self.out}\n{self.err}"


def run(folder: Path, size: int, *names: str) -> list[Ended]:
    """Run functions of torch_ranks.py, one after the other, on ranks of one group."""
    command = [sys.executable, str(ROOT / "tests" / "torch_fork.py"), str(folder), str(size), *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
    ends = sorted(line.split() for line in out.splitlines())
    written = [[(folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(size)]
    return [Ended(status, float(at), *texts) for (_, status, at), texts in zip(ends, written, strict=True)]


@pytest.mark.parametrize(
    ("size", "names"), [(1, ("calls", "refused")), (2, ("calls", "keeps", "stays_away")), (3, ("calls", "mismatch"))]
)
def test_ranks(tmp_path, size, names):
    for rank in run(tmp_path, size, *names):
        rank.check(names[-1])


def test_a_rank_that_fails_and_ranks_that_do_not_close(tmp_path):
    ranks = run(tmp_path, 3, "raises", "leaves")
    for rank in ranks:
        rank.check("leaves")
    assert all("a reason of its own" in rank.out for rank in ranks[1:])


@pytest.mark.parametrize("name", ["dies", "dies_in_setup"])
def test_a_rank_that_dies(tmp_path, name):
    for rank in run(tmp_path, 3, name)[1:]:
        rank.check(name)


@pytest.mark.parametrize("name", ["stops", "never_comes"])
def test_a_process_ends_soon_after_a_rank_has_stopped(tmp_path, name):
    first, *_, last = run(tmp_path, 3, name)
    first.check(name)
    assert last.status == "stopped" and first.time - float(first.out.split()[0]) < 15


def test_ranks_that_are_killed_stopped_or_interrupted():
    """A few of the runs of lost_ranks.py, which says more."""
    command = [sys.executable, str(ROOT / "tests" / "lost_ranks.py"), "--runs", "6", "--grace", "30"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
