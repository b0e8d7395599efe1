"""A ResNet with batch normalisation, its data (images that this program makes) and its recipe: SGD.

It is a recipe for docs/examples/loop.py. An image has two patterns at random places and noise. Its class is the
number of the stronger pattern. The quality is not perfect with any model, because both may be almost equally strong.
"""

from __future__ import annotations

import math

import torch
from torch import nn

#: images in the batch of each rank, the learning rate after the warm-up, and the weight decay
BATCH, RATE, DECAY = 16, 0.05, 5e-4
#: pixels of a side, classes, images for training and for validation, and the noise's deviation; a pattern's is 1
SIDE, CLASSES, TRAINING, VALIDATION, NOISE = 16, 20, 16384, 2048, 1.0
WIDTHS = (32, 64, 128)
UNIT = "bits per image"

Images = tuple[torch.Tensor, torch.Tensor]


def corpus() -> tuple[Images, Images]:
    """The images and their classes, for training and for validation."""
    generator = torch.Generator().manual_seed(0)
    smooth = nn.functional.interpolate(torch.randn(CLASSES, 3, 6, 6, generator=generator), SIDE, mode="bicubic")
    patterns = smooth / smooth.std((1, 2, 3), keepdim=True)
    count = TRAINING + VALIDATION
    classes = torch.rand(count, CLASSES, generator=generator).topk(2).indices  # two different ones
    strengths = torch.tensor([1.0, 0.0]) + torch.rand(count, 2, generator=generator) * torch.tensor([0.5, 0.9])
    places = torch.randint(SIDE, (2, count, 2), generator=generator)
    images = NOISE * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    for number in range(2):
        rows, columns = ((places[number, :, i, None] + torch.arange(SIDE)) % SIDE for i in range(2))
        moved = patterns[classes[:, number, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
        images += strengths[:, number, None, None, None] * moved
    split = [TRAINING, VALIDATION]
    training, validation = zip(images.split(split), classes[:, 0].split(split), strict=True)
    return training, validation


class Block(nn.Module):
    """Two convolutions with batch normalisation, added to the input."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        projection = (nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Sequential(*(projection if before != width else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (batch, before, n, n) to (batch, width, n / stride, n / stride)."""
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


def make_model() -> nn.Module:
    """Images (batch, 3, 16, 16) to the scores of their classes (batch, 20)."""
    first, second, third = WIDTHS
    return nn.Sequential(
        *(nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU()),
        *(Block(first, first, 1), Block(first, second, 2), Block(second, third, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(third, CLASSES)),
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=DECAY)


def learning_rate(step: int) -> float:
    """The rate of step 1, 2, ...: it rises linearly for 50 steps, then falls linearly to zero after step 500.

    With a constant rate the loss differs by 0.1 to 0.5 bits between two measurements of one training.
    """
    return RATE * max(0.0, min(step / 50, (500 - step) / 450))


def random_batch(data: Images, generator: torch.Generator) -> Images:
    """A batch of random images."""
    chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
    return data[0][chosen], data[1][chosen]


def loss_of(model: nn.Module, batch: Images) -> torch.Tensor:
    """The mean cross-entropy of the classes."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser."""
    optimizer.step()


@torch.no_grad()
def quality(model: nn.Module, data: Images, positions: int = VALIDATION) -> float:
    """The mean cross-entropy of the first ``positions`` images, in bits, with the statistics of the training."""
    model = getattr(model, "module", model)  # DDP's forward() would broadcast the statistics: only rank 0 calls this
    model.eval()
    bits = loss_of(model, (data[0][:positions], data[1][:positions])).item() / math.log(2)
    model.train()
    return bits
