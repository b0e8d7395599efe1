"""A byte-level language model, its data (the documentation of Python's standard library) and its recipe: SGD.

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

#: examples in the batch of each rank, and the learning rate after the warm-up
BATCH, RATE = 64, 0.1
#: bytes that the model sees, and bytes of the blocks of which every 20th is for validation
CONTEXT, BLOCK, EVERY = 16, 4096, 20
UNIT = "bits per byte"


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
        """The scores of the byte that follows each context."""
        scores: torch.Tensor = self.layers(self.embedding(context).flatten(1))
        return scores


make_model = ByteModel


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)


def learning_rate(step: int) -> float:
    """Of step 1, 2, ...: linear warm-up in 50 steps, then constant."""
    return RATE * min(1.0, step / 50)


def batch(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contexts that begin at ``starts``, and the bytes that follow them."""
    return data[starts[:, None] + torch.arange(CONTEXT)], data[starts + CONTEXT]


def random_batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of random positions."""
    return batch(data, torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy of the next bytes."""
    context, following = batch
    return nn.functional.cross_entropy(model(context), following)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser."""
    optimizer.step()


@torch.no_grad()
def quality(model: nn.Module, data: torch.Tensor, positions: int = 2000) -> float:
    """The mean cross-entropy of the next byte at evenly spaced positions, in bits."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, positions).long()
    return loss_of(model, batch(data, starts)).item() / math.log(2)
