"""The programs of docs/examples that torchrun starts: their short forms run and draw."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from pages import EXAMPLES, run_example

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.starts_first
@pytest.mark.parametrize("name", ["ddp", "fsdp", "lightning_module"])
def test_the_short_form_trains_and_draws(name: str, tmp_path: Path) -> None:
    run_example(name, tmp_path, *TORCHRUN)


def test_the_word_model_is_causal_and_its_embedding_is_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/results.md describes it: 1.12 million parameters, and decay for matrices only."""
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
