"""Mutation testing (tests/tools/mutants.py) of a small file: one mutant is killed, another survives."""

from __future__ import annotations

import sys
from pathlib import Path
from queue import Queue

import mutants
import pytest

SOURCE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from larger import larger\ndef test_larger(): assert larger(1, 2) == larger(2, 1) == 2\n"


@pytest.mark.processes
@pytest.mark.parametrize(("mutated", "outcome"), [("a if a >= b else b", "survived"), ("None", "killed")])
def test_a_changed_line_is_noticed_or_survives(mutated, outcome, monkeypatch, tmp_path):
    folder = tmp_path / "0/qccl"
    folder.mkdir(parents=True)
    (folder / "larger.py").write_text(SOURCE)
    (folder / "test_larger.py").write_text(TEST)
    monkeypatch.setattr(mutants, "BUILD", tmp_path)
    clone = object.__new__(mutants.Clone)
    clone.folder, clone._python = folder, Path(sys.executable)
    clones: Queue[mutants.Clone] = Queue()
    clones.put(clone)
    (mutant,) = (each for each in mutants.mutants("larger.py", SOURCE) if each.mutated == f"    return {mutated}")
    monkeypatch.setenv("PYTHONPATH", f"{mutants.ROOT}/tests/tools")
    mutants.run(mutant, ["test_larger.py::test_larger"], 1.0, clones)
    assert (mutant.outcome, mutant.line, mutant.tests) == (outcome, 2, {"test_larger.py": 1})
    assert (folder / "larger.py").read_text() == SOURCE and clones.get() is clone


def test_errors_texts_and_what_runs_at_import_are_not_drawn():
    source = """LIMIT = 1 + 1
def check(value: int = 3) -> str:
    'Returns 1 + 1.'
    if value:
        raise ValueError(value + 1)
    return f"{value + 1}"
"""
    assert [each.mutated.strip() for each in mutants.mutants("check.py", source)] == ["pass", "return None"]
