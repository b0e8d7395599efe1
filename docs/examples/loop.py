"""The training loop of the examples, for the models of byte_model.py and word_gpt.py.

Such a module is a recipe: it has ``corpus``, ``random_batch``, ``loss_of``, ``optimizer_of``, ``learning_rate``,
``update``, ``quality`` and the ``UNIT`` of the quality.
"""

from __future__ import annotations

import time
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import nn


def train(
    model: nn.Module,
    recipe: Any,
    steps: int,
    rank: int,
    *,
    seed: int = 0,
    measures: bool = True,
    every: int | None = None,
    positions: int = 2000,
) -> list[tuple[int, float]]:
    """Train as one rank; returns the validation quality by step if this rank ``measures`` it.

    It is measured and printed ``every`` so many steps (None: about ten times), at so many ``positions``.
    """
    optimizer = recipe.optimizer_of(model)
    text, validation = recipe.corpus()
    generator = torch.Generator().manual_seed(1000 * seed + rank)  # other data on every rank
    curve, begin = [], time.monotonic()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        batch = recipe.random_batch(text, generator)
        optimizer.zero_grad()
        recipe.loss_of(model, batch).backward()
        recipe.update(model, optimizer)
        if measures and step % (every or max(5, steps // 10)) == 0:
            curve.append((step, recipe.quality(model, validation, positions)))
            each = (time.monotonic() - begin) / step * 1e3
            if rank == 0:
                print(f"step {step:4} of {steps}: {curve[-1][1]:.3f} {recipe.UNIT}, {each:.0f} ms a step", flush=True)
    return curve


def draw(path: str, curve: list[tuple[int, float]], title: str, label: str, unit: str = "bits per byte") -> None:
    """Save a picture of the validation quality by step."""
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(*zip(*curve, strict=True), marker="o", label=label)
    axes.set(xlabel="step", ylabel=f"{unit}, validation", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"wrote {path}")
