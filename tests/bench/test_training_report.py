"""bench/train_slow_link.py: what its report says, and that the pages show the results files."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

ROOT = Path(__file__).parents[2]
#: what the program writes into a page
GENERATED = re.compile(r"<!-- measured by (.+?) -->.*?<!-- end of \1 -->", re.DOTALL)


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("train_slow_link")


def document(model: str = "word_gpt") -> dict[str, Any]:
    """fp32 needs 2 s for a step of 0.1 s computation and 4 steps, the codec 0.5 s and 8 steps; topk never arrives."""
    curves = {"fp32": [8.0, 4.0, 2.0], "minmax4+ef": [9.0, 8.0, 4.0], "topk": [9.0, 9.0, 9.0]}
    times = {"fp32": (2.0, 25e6), "minmax4+ef": (0.5, 3e6), "topk": (0.2, 1e6)}
    common = {"ranks": 4, "link": "100mbit", "limit": 0.1}
    return {
        "model": model,
        "machine": {"cpu": "a processor", "cores": 2, "qccl": "1.0", "commit": "abc", "date": "2026-11-23"},
        "budget": 4,
        "compute": {"forward": 0.03, "ready": [[[8, 8], 0.01], [[64], 0.05]], "optimiser": 0.02, "summary": "parts"},
        "curves": [
            {"method": method, "seed": 0, "curve": [[2, bits[0]], [4, bits[1]], [8, bits[2]]]}
            for method, bits in curves.items()
        ],
        "steps": [common | {"method": m, "seconds": s, "nbytes": n} for m, (s, n) in times.items()],
    }


def test_methods_without_fp32_are_refused(bench: Any) -> None:
    """Before anything is measured, unless the file that is continued has fp32's rows."""
    bench._check_fp32("fp32,minmax8", ["curves", "steps"], {})
    bench._check_fp32("minmax8", ["whole", "scaling"], {})
    bench._check_fp32("minmax8", ["curves", "steps"], document())
    with pytest.raises(click.UsageError, match="section 'steps' compares each method with fp32: add fp32"):
        bench._check_fp32("minmax8,powersgd:4", ["steps"], {})


def test_the_headline_names_model_optimiser_computation_and_bound(bench: Any) -> None:
    lines = bench.training_report.headline([document(), document("byte_model")]).splitlines()
    assert "each behind a link of 100mbit. The word-level GPT has 1.12 million parameters, AdamW, and " in lines[0]
    assert "The byte-level model has 2.05 million parameters, SGD with momentum, and 100 ms of computation" in lines[0]
    assert lines[2] == "| gradients sent as | word-level GPT | byte-level model |"
    # fp32 reaches its target of 4 bits in 4 steps of 2 s, the codec in 8 steps of 0.5 s
    assert "| fp32 (PyTorch) | 1.0 | 1.0 |" in lines and "| `minmax4+ef` | 2.0 | 2.0 |" in lines
    assert "| `topk` | not reached | not reached |" in lines
    assert lines[-1] == "| upper bound, (c + n) / c | 21.0 | 21.0 |"  # 25 MB at 12.5 MB/s: n = 2 s


def test_links_with_a_delay_have_a_headline_of_their_own(bench: Any) -> None:
    report, link = bench.training_report, "100mbit 25ms 0.1% bbr"
    network = report.network_of(link)
    assert (network.delay, network.loss, network.tcp, network.slowest.rate) == (0.025, 0.001, "bbr", 12.5e6)
    assert report.network_of("1gbit").delay is None and not report.network_of("1gbit").is_forwarded
    assert report.headline([document()], has_delay=True) == ""
    far = document()
    far["steps"] += [row | {"link": link, "seconds": 3 * row["seconds"]} for row in far["steps"][:2]]
    far["steps"][-1]["seconds"] = 0.25  # of the codec
    assert report.headline([far]) == report.headline([document()])
    lines = report.headline([far], has_delay=True).splitlines()
    assert "a link of 100mbit, with a delay of 25ms in each direction and 0.1% of the packets lost (bbr)." in lines[0]
    assert "| `minmax4+ef` | 12.0 |" in lines  # 4 steps of 6 s, and 8 of 0.25 s


def test_a_limit_lets_gradients_wait_for_their_turn(bench: Any) -> None:
    compute = document()["compute"]
    assert bench.limit(compute, 128.0, 1e3) == pytest.approx(0.03 + 0.01 + 0.128 + 0.02)  # from the first gradient on
    assert bench.limit(compute, 128.0, 1e9) == pytest.approx(0.1)
    assert bench.limit(compute, 128.0, 1e9, delay=0.025) == pytest.approx(0.125)


def test_replayed_gradients_have_the_shapes_of_the_model(bench: Any) -> None:
    """Otherwise PowerSGD, whose matrices follow the shapes, sends and computes something else."""
    torch = pytest.importorskip("torch")
    ready = [([1024, 1024], 0.0), ([64], 0.001), ([256, 768], 0.002)]
    module = importlib.import_module("training_rank")._replay(ready)
    module(torch.zeros(1, requires_grad=True)).backward()
    assert [list(p.grad.shape) for p in module.parameters()] == [shape for shape, _ in reversed(ready)]


def test_a_run_continues_the_newest_file(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    for day in ("2026-11-21", "2026-11-22"):
        (results / f"training-word_gpt-{day}.json").write_text(json.dumps({"day": day}))
    (results / "training-word_gpt-2-ranks-2026-11-23.json").write_text("{}")
    newest = bench._newest("word_gpt")
    assert newest.name == "training-word_gpt-2026-11-22.json"
    bench._save({"day": "today"}, newest, results / "training-word_gpt-2026-11-23.json")
    assert json.loads(bench._newest("word_gpt").read_text()) == {"day": "today"} and not newest.exists()


def test_the_pages_show_the_results_files(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md and docs/results.md are what `bench/train_slow_link.py --sections "" --write` makes of the files."""
    pages = [Path("README.md"), Path("docs") / "results.md"]
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    for page in pages:
        shutil.copy(ROOT / page, tmp_path / page)
    drawn: list[list[str]] = []
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    monkeypatch.setattr(
        bench.training_report, "draw", lambda documents, _: drawn.append([d["model"] for d in documents])
    )
    bench.write_pages()
    assert len(drawn) == 1 and "byte_model" in drawn[0]
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page


def test_no_gain_stands_without_its_model() -> None:
    """The generated tables have the model, the optimiser and the computation in their heads."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = GENERATED.sub("", page.read_text())
        assert not re.search(r"\d times\s+sooner|sooner\s+than\s+(with\s+)?fp32\s+at\s+\d", text), page
