"""Trainings of different shapes, for doctor_accuracy.py.

Each function returns the module, a function for the loss of the next batch (its argument is the module or a wrapper of
it), and the optimiser. The batches are random: times do not depend on them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

__all__ = ["MODELS", "conv_net"]

_EXAMPLES = str(Path(__file__).parent.parent / "docs" / "examples")
Training = tuple[nn.Module, Callable[[nn.Module], torch.Tensor], torch.optim.Optimizer]


def _example(name: str) -> Training:
    """The model, the batches and the optimiser of a recipe in docs/examples."""
    if _EXAMPLES not in sys.path:
        sys.path.append(_EXAMPLES)
    recipe = importlib.import_module(name)
    model, (text, _), generator = recipe.make_model(), recipe.corpus(), torch.Generator().manual_seed(0)
    return model, lambda m: recipe.loss_of(m, recipe.random_batch(text, generator)), recipe.optimizer_of(model)


def conv_net() -> Training:
    """Convolutions, with much computation and few parameters, and a large last layer, whose gradient is ready early."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(100, (8,)))

    return model, loss, optimizer


#: byte_model has few large layers, and its embedding's gradient is ready last. word_gpt has many small layers, and its
#: embedding is also the output layer
MODELS: dict[str, Callable[[], Training]] = {
    **{name: partial(_example, name) for name in ("byte_model", "word_gpt")},
    "conv_net": conv_net,
}
