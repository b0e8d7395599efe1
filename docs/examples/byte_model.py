"""A byte-level language model and its data: the documentation of Python's standard library.

The model predicts the next byte from the 16 bytes before it (Bengio et al., "A neural probabilistic language model",
2003). It has 2.05 million parameters, computes fast on a CPU, and is therefore limited by the network on slow links.
"""

from __future__ import annotations

import ast
import math
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

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


def learning_rate(step: int, peak: float) -> float:
    """Of step 1, 2, ...: linear warm-up in 50 steps, then constant."""
    return peak * min(1.0, step / 50)
