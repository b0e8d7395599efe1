"""bench/train_slow_link.py: the bound that it computes, what it refuses, and how a run goes on; nothing is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
import train_slow_link as program


def test_methods_without_fp32_are_refused() -> None:
    """Before anything is measured, unless the file that is continued has fp32's rows."""
    program._check_fp32("fp32,minmax8", ["curves", "steps"], {})
    program._check_fp32("minmax8", ["whole", "scaling"], {})
    fp32 = [{"method": "fp32", "ranks": 4, "link": "100mbit"}]
    program._check_fp32("minmax8", ["curves", "steps"], {"curves": fp32, "steps": fp32})
    with pytest.raises(click.UsageError, match="section 'steps' compares each method with fp32: add fp32"):
        program._check_fp32("minmax8,powersgd:4", ["steps"], {})


def test_a_limit_lets_gradients_wait_for_their_turn() -> None:
    compute = {"forward": 0.03, "ready": [[[8, 8], 0.01], [[64], 0.05]], "optimiser": 0.02}
    assert program.limit(compute, 128.0, 1e3) == pytest.approx(0.03 + 0.01 + 0.128 + 0.02)  # from the first gradient on
    assert program.limit(compute, 128.0, 1e9) == pytest.approx(0.1)
    assert program.limit(compute, 128.0, 1e9, delay=0.025) == pytest.approx(0.125)


def test_a_run_continues_the_newest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    for day in ("2026-11-21", "2026-11-22"):
        (results / f"training-word_gpt-{day}.json").write_text(json.dumps({"day": day}))
    (results / "training-word_gpt-2-ranks-2026-11-23.json").write_text("{}")
    newest = program._newest("word_gpt")
    assert newest.name == "training-word_gpt-2026-11-22.json"
    program._save({"day": "today"}, newest, results / "training-word_gpt-2026-11-23.json")
    assert json.loads(program._newest("word_gpt").read_text()) == {"day": "today"} and not newest.exists()


def test_the_pages_have_the_figures_of_the_results_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md and docs/results.md are what ``--sections "" --write`` makes of the files."""
    root, pages = program._ROOT, ("README.md", "docs/results.md")
    shutil.copytree(root / "docs" / "results", tmp_path / "docs" / "results")
    for page in pages:
        shutil.copy(root / page, tmp_path / page)
    drawn: list[str] = []
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    monkeypatch.setattr(program.training_report, "draw", lambda found, _: drawn.extend(each["model"] for each in found))
    program.write_pages()
    assert "byte_model" in drawn
    for page in pages:
        assert (tmp_path / page).read_text() == (root / page).read_text(), page
