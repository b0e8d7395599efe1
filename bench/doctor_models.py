"""Trainings of different shapes, for doctor_accuracy.py; each function is one for ``qccl-bench doctor --model``.

They return the module, a function that computes the loss of the next batch, and the optimiser. The batches are random:
times do not depend on them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "byte_model", "conv_net", "word_gpt"]

_EXAMPLES = str(Path(__file__).parent.parent / "docs" / "examples")
Training = tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]


def byte_model() -> Training:
    """Few large layers, and an embedding that is complete last: docs/examples/byte_model.py, with SGD."""
    recipe = _example("byte_model")
    model = recipe.ByteModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    def loss() -> torch.Tensor:
        context, following = torch.randint(256, (64, recipe.CONTEXT)), torch.randint(256, (64,))
        return nn.functional.cross_entropy(model(context), following)

    return model, loss, optimizer


def word_gpt() -> Training:
    """Many small layers, and an embedding that is the output layer, too: docs/examples/word_gpt.py, with AdamW."""
    recipe = _example("word_gpt")
    model = recipe.WordGPT()
    optimizer = recipe.optimizer_of(model)

    def loss() -> torch.Tensor:
        words = torch.randint(recipe.VOCABULARY, (recipe.BATCH, recipe.CONTEXT + 1))
        return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    return model, loss, optimizer


def conv_net() -> Training:
    """Convolutions, which compute much with few parameters, before a large layer, whose gradient is ready early."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(100, (8,)))

    return model, loss, optimizer


def _example(name: str) -> Any:
    if _EXAMPLES not in sys.path:
        sys.path.append(_EXAMPLES)
    return importlib.import_module(name)


MODELS: dict[str, Callable[[], Training]] = {"byte_model": byte_model, "word_gpt": word_gpt, "conv_net": conv_net}
