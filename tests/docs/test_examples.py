"""The programs of docs/examples: their short forms run and draw, and their page lists them with their commands."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from start_ranks import start

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
#: the programs whose ranks are threads of one process
ON_THREADS = ("decentralized", "diloco", "onebit_sgd")
#: the programs that torchrun starts, with what they import
UNDER_TORCHRUN = {"ddp": "torch", "fsdp": "torch", "lightning_module": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_THREADS, *UNDER_TORCHRUN])
def test_the_short_form_trains_and_draws(name: str, tmp_path: Path) -> None:
    for module in ("matplotlib", UNDER_TORCHRUN.get(name, "sklearn")):
        pytest.importorskip(module)
    picture = tmp_path / "x.svg"
    (tmp_path / "matplotlibrc").write_text("svg.fonttype: none\n")  # text as text
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            *(sys.executable, *(torchrun if name in UNDER_TORCHRUN else [])),
            *(str(EXAMPLES / f"{name}.py"), "--quick", "--figure", str(picture)),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout and done.stdout.endswith(f"wrote {picture}\n")
    assert name in UNDER_TORCHRUN or "MB sent" in done.stdout  # the table
    assert "Short run: " in picture.read_text()


@pytest.mark.mpi
@pytest.mark.slow
def test_the_short_form_of_jax_on_two_ranks(tmp_path: Path) -> None:
    for module in ("jax", "matplotlib", "sklearn"):
        pytest.importorskip(module)
    picture = tmp_path / "x.png"
    command = (str(EXAMPLES / "jax_mlp.py"), "--quick", "--figure", str(picture))
    ended = start(2, *command, limit=300, MPLBACKEND="agg", JAX_PLATFORMS="cpu")
    assert ended.status == 0, ended.output
    for codec in ("none", "minmax8", "minmax4+ef", "onebit"):
        assert re.search(rf"^{re.escape(codec)}\S* +step +50 of 50", ended.output, re.M), ended.output
    assert ended.output.endswith(f"wrote {picture}\n") and picture.read_bytes().startswith(b"\x89PNG")


def test_the_word_model_is_causal_and_its_embedding_is_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/results.md describes it: 1.12 million parameters, and decay for matrices only."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    recipe = importlib.import_module("word_gpt")
    torch.manual_seed(0)
    model = recipe.make_model()
    assert sum(p.numel() for p in model.parameters()) == 1_123_456
    assert model.embedding.weight.shape == (recipe.VOCABULARY, recipe.WIDTH)
    decayed, others = recipe.optimizer_of(model).param_groups
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in others["params"])
    words = torch.randint(recipe.VOCABULARY, (1, recipe.CONTEXT))
    later = words.clone()
    later[0, 20:] = (later[0, 20:] + 1) % recipe.VOCABULARY
    scores, changed = model(words), model(later)
    torch.testing.assert_close(changed[:, :20], scores[:, :20])
    assert not torch.allclose(changed[:, 20], scores[:, 20])


def test_the_page_lists_every_example_with_its_command() -> None:
    page = (EXAMPLES / "index.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in page and f"docs/examples/{path.name}" in page, path.name
