"""A word-level GPT, its data (the documentation in PyTorch's source code) and its recipe: AdamW, as people write it.

Causal attention in three blocks, LayerNorm, GELU, and one matrix that is both the embedding and the output layer. With
1.12 million parameters it computes fast on a CPU, and is therefore limited by the network on slow links. The gradient
of the embedding, half of all elements, is complete only at the end of the backward pass.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

#: sequences in the batch of each rank, words that the model sees, and words of the vocabulary
BATCH, CONTEXT, VOCABULARY = 4, 32, 4096
WIDTH, HEADS, LAYERS = 128, 4, 3
#: the learning rate after the warm-up, and the greatest norm of a gradient
RATE, MAX_NORM = 2e-3, 1.0
#: words of the blocks of which every 20th is for validation
BLOCK, EVERY = 1024, 20
UNIT = "bits per word"


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The words for training and for validation, as numbers; word 0 stands for those outside of the vocabulary.

    A word is a run of letters, a digit or another sign.
    """
    words = [word for text in _docstrings() for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", text.lower())]
    counts = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    numbers = {word: number for number, (word, _) in enumerate(counts[: VOCABULARY - 1], start=1)}
    blocks = torch.tensor([numbers.get(word, 0) for word in words]).split(BLOCK)
    train = torch.cat([block for i, block in enumerate(blocks) if i % EVERY])
    return train, torch.cat(blocks[::EVERY])


def _docstrings() -> Iterator[str]:
    specification = importlib.util.find_spec("torch")
    assert specification is not None and specification.origin is not None
    root = Path(specification.origin).parent
    for package in ("nn", "optim", "utils"):
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield ast.get_docstring(node) or ""


class Block(nn.Module):
    """Attention and a layer of GELUs, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (batch, n, 128) after attention to earlier words and after the layer, in the same shape."""
        parts = self.attention(self.norm1(x)).split(WIDTH, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.layers(self.norm2(x))
        return result


class WordGPT(nn.Module):
    """Words (batch, n), n at most 32, to scores of each following word (batch, n, 4096)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The scores of the word that follows each of ``words``; the embedding is the output layer, too."""
        x = self.embedding(words) + self.positions.weight[: words.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


make_model = WordGPT


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose weight decay is for matrices only."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) is decays] for decays in (True, False)]
    decays = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    return torch.optim.AdamW(decays, lr=RATE)


def learning_rate(step: int) -> float:
    """Of step 1, 2, ...: linear warm-up in 50 steps, then constant."""
    return RATE * min(1.0, step / 50)


def random_batch(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sequences of CONTEXT + 1 words from random places."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
    return data[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the words after the first one."""
    return nn.functional.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser, after the gradient was clipped."""
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()


@torch.no_grad()
def quality(model: nn.Module, data: torch.Tensor, positions: int = 2000) -> float:
    """The mean cross-entropy of the next word at about ``positions`` places of evenly spaced sequences, in bits."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, max(1, positions // CONTEXT)).long()
    sequences = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return loss_of(model, sequences).item() / math.log(2)
