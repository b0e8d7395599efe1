"""A byte-level language model, its data (the documentation of Python's standard library) and its training.

The model predicts the next byte from the 16 bytes before it (Bengio et al., "A neural probabilistic language model",
2003). It has 2.05 million parameters, computes fast on a CPU, and is therefore limited by the network on slow links.
"""

from __future__ import annotations

import ast
import math
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

#: examples in the batch of each rank, and the learning rate after the warm-up
BATCH, RATE = 64, 0.1
#: bytes that the model sees, and bytes of the blocks of which every 20th is for validation
CONTEXT, BLOCK, EVERY = 16, 4096, 20


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes for training and for validation: the topics of ``help()``, and the docstrings of modules."""
    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    data = torch.frombuffer(bytearray("\n".join([*texts, *_docstrings()]).encode()), dtype=torch.uint8).long()
    blocks = data.split(BLOCK)
    train = torch.cat([block for i, block in enumerate(blocks) if i % EVERY])
    return train, torch.cat(blocks[::EVERY])


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


class ByteModel(nn.Module):
    """Bytes (batch, 16) to scores of the next byte (batch, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.layers = nn.Sequential(
            *(nn.Linear(CONTEXT * 64, 1024), nn.LayerNorm(1024), nn.ReLU()),
            *(nn.Linear(1024, 768), nn.LayerNorm(768), nn.ReLU()),
            nn.Linear(768, 256),
        )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(self.embedding(context).flatten(1))
        return scores


def batch(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contexts that begin at ``starts``, and the bytes that follow them."""
    return data[starts[:, None] + torch.arange(CONTEXT)], data[starts + CONTEXT]


def random_batch(data: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of ``size`` random positions."""
    return batch(data, torch.randint(len(data) - CONTEXT, (size,), generator=generator))


@torch.no_grad()
def bits_per_byte(model: nn.Module, data: torch.Tensor, positions: int = 2000) -> float:
    """The mean cross-entropy of the next byte at evenly spaced positions, in bits."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, positions).long()
    context, following = batch(data, starts)
    return nn.functional.cross_entropy(model(context), following).item() / math.log(2)


def learning_rate(step: int) -> float:
    """Of step 1, 2, ...: linear warm-up in 50 steps, then constant."""
    return RATE * min(1.0, step / 50)


def train(
    model: nn.Module,
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
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    text, validation = corpus()
    generator = torch.Generator().manual_seed(1000 * seed + rank)  # other data on every rank
    curve, begin = [], time.monotonic()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        context, following = random_batch(text, BATCH, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(context), following).backward()
        optimizer.step()
        if measures and step % (every or max(5, steps // 10)) == 0:
            curve.append((step, bits_per_byte(model, validation, positions)))
            each = (time.monotonic() - begin) / step * 1e3
            if rank == 0:
                print(f"step {step:4} of {steps}: {curve[-1][1]:.3f} bits per byte, {each:.0f} ms a step", flush=True)
    return curve


def draw(path: str, curve: list[tuple[int, float]], title: str, label: str) -> None:
    """Save a picture of the validation quality by step."""
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(*zip(*curve, strict=True), marker="o", label=label)
    axes.set(xlabel="step", ylabel="bits per byte, validation", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"wrote {path}")
