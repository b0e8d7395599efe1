"""docs/adding-a-collective.md is true: it is followed in a copy of the library, whose tests then pass."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from qccl import _host

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-collective.md").read_text(encoding="utf-8")
IMPORT = "from qccl.collectives.shift import ShiftSpec\n"

#: runs pytest with the copy of qccl in the current folder, not with the installed one
RUN = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, ".")
sys.argv = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "test_shift.py"]
runpy.run_module("pytest", run_name="__main__")
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put ``text`` in front of the one place where ``before`` is."""
    old = file.read_text(encoding="utf-8")
    assert old.count(before) == 1, f"{file.name} has {before!r} {old.count(before)} times"
    file.write_text(old.replace(before, text + before), encoding="utf-8")


def follow(package: Path) -> None:
    """Do what the page says."""
    collective, check, method, postcondition, tests = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (package / "collectives/shift.py").write_text(collective)
    insert(package / "collectives/__init__.py", "from qccl.collectives.spec import", IMPORT)
    insert(package / "collectives/__init__.py", "HierarchicalSpec,\n)", "ShiftSpec, ")
    insert(package / "methods.py", "from qccl.dtypes import", IMPORT)
    insert(package / "methods.py", "def _allreduce(", check + "\n\n")
    insert(package / "calls.py", "    Given,\n", "    SHIFT,\n")
    insert(package / "calls.py", "    def _call(", method + "\n")
    insert(package / "analysis/postconditions.py", "def given_replicas", postcondition + "\n\n")
    (package.parent / "test_shift.py").write_text(tests)


def files(package: Path) -> dict[str, bytes]:
    return {f"qccl/{path.relative_to(package)}": path.read_bytes() for path in package.rglob("*.py")}


def test_a_collective_touches_the_six_files_that_the_page_lists_and_runs(tmp_path: Path) -> None:
    package = tmp_path / "qccl"
    shutil.copytree(ROOT / "qccl", package, ignore=shutil.ignore_patterns("__pycache__", "kernels", "bench"))
    shutil.copy(_host.__file__, package)
    before = files(package)
    follow(package)
    touched = {path for path, content in files(package).items() if before.get(path) != content}
    listed = re.findall(r"^\| `(\S+)` \|", PAGE, re.MULTILINE)
    assert {*listed} == touched | {"tests/collectives/test_shift.py"} and len(listed) == 6
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]
