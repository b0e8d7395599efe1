"""The documentation is true: its Python blocks run unchanged, and its lists are complete.

The programs that need PyTorch or JAX run in tests/torch/test_pages.py and tests/jax/test_pages.py.
"""

from __future__ import annotations

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


def test_the_files_that_pages_name_exist():
    folders = (ROOT, ROOT / "qccl", ROOT / "qccl" / "collectives", DOCS)
    named = [
        (p, each) for p in NAMES_FILES for each in re.findall(r"`([\w./-]+(?:\.(?:py|h|cpp|md)|/\w+))`", p.read_text())
    ]
    assert not [f"{page} names {path}" for page, path in named if not any((f / path).exists() for f in folders)]
