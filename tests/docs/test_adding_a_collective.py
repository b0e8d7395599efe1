"""docs/adding-a-collective.md is true: it is followed in a copy of the library, whose tests then pass."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pages import DOCS, ROOT, insert, run_in_copy

from qccl import _host

PAGE = (DOCS / "adding-a-collective.md").read_text(encoding="utf-8")
IMPORT = "from qccl.collectives.shift import ShiftSpec\n"


def follow(package: Path) -> None:
    """Do what the page says."""
    collective, declaration, method, postcondition, tests = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (package / "collectives/shift.py").write_text(collective)
    insert(package / "collectives/__init__.py", "from qccl.collectives.spec import", IMPORT)
    insert(package / "collectives/__init__.py", "HierarchicalSpec,\n)", "ShiftSpec, ")
    insert(package / "communicator/calls.py", "from qccl.communicator.profile import", IMPORT)
    insert(package / "communicator/calls.py", "_BROADCAST = Method(", declaration)
    insert(package / "communicator/calls.py", "    def _call(", method + "\n")
    insert(package / "collectives/analysis/postconditions.py", "def given_replicas", postcondition + "\n\n")
    (package.parent / "test_shift.py").write_text(tests)


def files(package: Path) -> dict[str, bytes]:
    return {f"qccl/{path.relative_to(package)}": path.read_bytes() for path in package.rglob("*.py")}


@pytest.mark.processes
def test_a_collective_touches_the_five_files_that_the_page_lists_and_runs(tmp_path: Path) -> None:
    package = tmp_path / "qccl"
    shutil.copytree(ROOT / "qccl", package, ignore=shutil.ignore_patterns("__pycache__", "kernels", "bench"))
    shutil.copy(_host.__file__, package)
    before = files(package)
    follow(package)
    touched = {path for path, content in files(package).items() if before.get(path) != content}
    listed = re.findall(r"^\| `(\S+)` \|", PAGE, re.MULTILINE)
    assert {*listed} == touched | {"tests/collectives/test_shift.py"} and len(listed) == 5
    output = run_in_copy(tmp_path, "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_shift.py", limit=60)
    assert " passed" in output
