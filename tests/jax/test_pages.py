"""The blocks of docs/howto/jax.md run unchanged."""

from __future__ import annotations

import pytest
from pages import DOCS, PROGRAMS, run_mpi_program, run_snippets

PAGE = DOCS / "howto" / "jax.md"


def test_snippets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(PAGE)


@pytest.mark.mpi
@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.page == PAGE], ids=str)
def test_programs(block, tmp_path):
    run_mpi_program(block, tmp_path)
