"""The blocks of Python in the documentation, of which tests run all.

A block whose first line is ``# FILE: COMMAND`` is a program, which is started by that command. The others of a page are
one program in the order of the page, and run on ranks that are threads, with ``comm``, ``np`` and ``qccl``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from start_ranks import start

import qccl

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
#: pages whose blocks have a test of their own
ELSEWHERE = {DOCS / f"adding-a-{kind}.md" for kind in ("codec", "collective", "transport")}
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - ELSEWHERE)
RANKS = 4
_PROGRAM = re.compile(r"# (\w+\.py): (.+)\n")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: Path
    line: int
    text: str

    @property
    def program(self) -> re.Match[str] | None:
        return _PROGRAM.match(self.text)

    @property
    def launcher(self) -> str:
        return self.program[2].split()[0]

    def imports(self, name: str) -> bool:
        return re.search(rf"^ *(import|from) {name}\b", self.text, re.MULTILINE) is not None

    def write(self, folder: Path) -> Path:
        path = folder / self.program[1]
        path.write_text(self.text)
        return path

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text[: found.start(1)].count("\n"), found[1]) for found in _BLOCK.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROGRAMS = [block for block in BLOCKS if block.program]
SNIPPETS = {page: found for page in PAGES if (found := [b for b in blocks_of(page) if not b.program])}


def run_snippets(page: Path) -> None:
    compiled = [compile("\n" * b.line + b.text, page.name, "exec", dont_inherit=True) for b in SNIPPETS[page]]

    def run(comm: qccl.Communicator) -> None:
        names = {"__name__": page.stem, "comm": comm, "np": np, "qccl": qccl}
        for code in compiled:
            exec(code, names)

    qccl.run_ranks(RANKS, run, timeout=30)


def run_mpi_program(block: Block, folder: Path) -> None:
    found = re.fullmatch(r"mpiexec -n (\d+) python (\w+\.py)", block.program[2])
    assert found and found[2] == block.program[1]
    ended = start(int(found[1]), str(block.write(folder)), limit=60)
    assert ended.status == 0, ended.output


def insert(file: Path, before: str, text: str) -> None:
    """Put ``text`` in front of the one place where ``before`` is."""
    old = file.read_text(encoding="utf-8")
    assert old.count(before) == 1, f"{file.name} has {before!r} {old.count(before)} times"
    file.write_text(old.replace(before, text + before), encoding="utf-8")


#: runs a file or pytest with the qccl of the current folder, not with the installed one
_IN_COPY = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path[:0] = [".", "tests/support"]
sys.argv = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__")
"""


def run_in_copy(root: Path, *arguments: str, limit: float) -> str:
    """The output of a Python file, or of pytest, in a folder that has a copy of qccl."""
    command = [sys.executable, "-c", _IN_COPY, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def run_example(name: str, folder: Path, *launcher: str) -> str:
    """Run the short form of a program of docs/examples, which trains and draws; returns its output."""
    picture = folder / "x.svg"
    (folder / "matplotlibrc").write_text("svg.fonttype: none\n")  # text as text
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), "--quick", "--figure", str(picture)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout and done.stdout.endswith(f"wrote {picture}\n")
    assert "Short run: " in picture.read_text()
    return done.stdout
