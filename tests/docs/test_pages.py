"""The documentation is true: its Python blocks run unchanged, and its lists are complete.

The programs that need PyTorch or JAX run in tests/torch/test_pages.py and tests/jax/test_pages.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from typing import Any

import pytest
from pages import DOCS, PROGRAMS, ROOT, SNIPPETS, run_mpi_program, run_snippets

import qccl
from qccl import codecs
from qccl.meeting.launchers import detect

REFERENCE = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))


def needs_jax(blocks: list[Any]) -> bool:
    return any(block.imports("jax") for block in blocks)


@pytest.mark.parametrize(
    "page", [page for page in SNIPPETS if not needs_jax(SNIPPETS[page])], ids=lambda page: str(page.relative_to(ROOT))
)
def test_snippets(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(block), marks=[pytest.mark.gpu] if block.imports("cupy") else [])
        for block in PROGRAMS
        if block.launcher == "mpiexec" and not needs_jax([block])
    ],
)
def test_programs(block, tmp_path):
    run_mpi_program(block, tmp_path)


def test_the_reference_has_every_public_name():
    for name in qccl.__all__:
        assert f"qccl.{name}" in REFERENCE, name
    for kind in codecs.CODECS.values():
        assert f".. autoclass:: qccl.codecs.{kind.__name__}" in REFERENCE, kind
    for name, member in inspect.getmembers(qccl.Communicator):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert re.search(rf"auto(method|property):: Communicator\.{name}$", REFERENCE, re.MULTILINE), name


def test_the_environment_variables():
    read = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[)|_?environ\.get\()\s*"(\w+)"|"(\w+)" in os\.environ""")
    sources = [*(ROOT / "qccl").rglob("*.py"), *(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    found = {a or b for path in sources for a, b in read.findall(path.read_text())}
    assert {"OMP_NUM_THREADS", "QCCL_ISA", "QCCL_PORT", "QCCL_CACHE_DIR"} <= found
    page = (DOCS / "guide" / "settings.md").read_text()
    launchers = inspect.getmodule(detect)._VARIABLES.values()
    for name in found | {name for names in launchers for name in names if name}:
        assert f"`{name}`" in page, name


NAMES_FILES = [DOCS / "architecture.md", *sorted((DOCS / "architecture").glob("*.md")), DOCS / "glossary.md"]
WHERE = DOCS / "architecture" / "where-to-find-things.md"


@functools.cache
def members_of_classes() -> dict[str, set[str]]:
    """What each class of qccl defines or sets, with what its bases do."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "qccl").rglob("*.py*"):
        for node in ast.walk(ast.parse(path.read_text()) if path.suffix in (".py", ".pyi") else ast.Module()):
            if isinstance(node, ast.ClassDef):
                names = re.findall(r"def (\w+)|self\.(\w+)|^    (\w+)(?:: | = )", ast.unparse(node), re.MULTILINE)
                found.setdefault(node.name, set()).update(name for each in names for name in each)
                bases.setdefault(node.name, set()).update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    for _ in range(4):
        for name in found:
            found[name] |= {member for base in bases[name] & found.keys() for member in found[base]}
    return found


@pytest.mark.parametrize("page", NAMES_FILES, ids=lambda page: page.name)
def test_what_pages_name_exists(page):
    """Files, from the root on the page about all of them; members of classes; names that are in a file."""
    text, members = page.read_text(), members_of_classes()
    native = "\n".join(path.read_text() for path in (ROOT / "kernels").rglob("*.[hc]*"))
    folders = (ROOT,) if page == WHERE else (ROOT, ROOT / "qccl", ROOT / "qccl" / "collectives", DOCS)
    paths = re.findall(r"`([\w./-]+(?:\.(?:py|h|cpp|md)|/\w+))`", text)
    faults = [path for path in paths if not any((folder / path).exists() for folder in folders)]
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`", text):
        if member != "txt" and member not in members.get(owner, set()):
            faults.append(f"{owner}.{member}")
    for owner, member in re.findall(r"`(\w+)::(\w+)(?:\([^`]*\))?`", text):
        if f"{owner}::{member}(" not in native:
            faults.append(f"{owner}::{member}")
    for name, path in re.findall(r"`(\w+)(?:\(\))?` (?:in |\()`(\w[\w/]*\.(?:py|h|cpp))`", text):
        if (ROOT / path).exists() and not re.search(rf"\b{name}\b", (ROOT / path).read_text()):
            faults.append(f"{name} in {path}")
    assert not faults, faults
