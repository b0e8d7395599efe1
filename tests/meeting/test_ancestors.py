"""The processes above this one, and the launcher that is the innermost of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qccl.meeting import ancestors, launchers

SHOW = "from qccl.meeting import launchers as l; found = l.detect(); print(found.name, found.rank, found.size)"
#: the node's numbers, and torchrun's, which its agent sets for each of its ranks
NODE, RANK = "PMI_RANK=1 PMI_SIZE=2", "RANK=2 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [(NODE, RANK, "torchrun 2 4"), (RANK, NODE, "MPICH 1 2"), ("PMI_RANK=0 PMI_SIZE=1", RANK, "torchrun 2 4")],
)
def test_the_innermost_of_real_processes(outer, inner, expected):
    """A shell below each launcher starts what follows, and stays."""
    shell = ["sh", "-c", '"$@"; true', "sh"]
    command = ["env", *outer.split(), *shell, "env", *inner.split(), *shell, sys.executable, "-c", SHOW]
    clean = launchers.without_launchers(os.environ)
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == expected, done.stderr


def test_processes_above_this_one():
    found = list(ancestors.ancestors())
    assert found[0].pid == os.getppid() and all(each.begin.isdecimal() for each in found)
    assert ancestors.lineage()[0].keys() <= os.environ.keys() | {"", "PYTEST_XDIST_WORKER"}
    assert len(ancestors.lineage()) == 1 + len(found)
    assert ancestors._stat(1 << 30) == ("", 0, "") and ancestors._environment(1 << 30) == {}


def test_processes_of_a_given_proc(monkeypatch, tmp_path):
    """A name has parentheses, the environment of another user is secret, and a process has ended meanwhile."""
    monkeypatch.setattr(ancestors, "Path", lambda path: tmp_path / path.lstrip("/"))
    parent = os.getppid()
    for pid, name, above, begin in ((parent, "a (b) c", 70, 123), (70, "mpiexec", 60, 7)):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "stat").write_text(f"{pid} ({name}) S {above} {'0 ' * 17}{begin} 0 0\n")
    (tmp_path / "proc" / str(parent) / "environ").write_bytes(b"PMI_RANK=1\0B=x=y\0")
    expected = [(parent, "a (b) c", "123"), (70, "mpiexec", "7"), (60, "", "")]
    assert list(ancestors.ancestors()) == expected
    assert ancestors.lineage() == [{}, {"PMI_RANK": "1", "B": "x=y", "": ""}, {}, {}]
