"""PyTorch Lightning with compressed gradients by one word, the name of the backend: 4 ranks train a language model.

    torchrun --standalone --nproc-per-node 4 docs/examples/lightning_module.py

The backend compresses gradients by QCCL_CODEC, and everything else goes exactly: see the page on PyTorch. The model has
2 million parameters (byte_model.py).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import byte_model
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from loop import draw
from torch.utils.data import DataLoader

import qccl.torch  # registers the backend


class ByteModule(lightning.LightningModule):  # type: ignore[misc]  # a class of Lightning, which mypy does not read
    """An ordinary module of Lightning, which knows nothing of qccl."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same model on every rank
        self.model, self.steps = byte_model.ByteModel(), steps
        self.text, self.validation = byte_model.corpus()
        self.curve: list[tuple[int, float]] = []

    def train_dataloader(self) -> Any:
        """Batches of random positions, other ones on every rank."""
        generator = torch.Generator().manual_seed(self.global_rank)
        batches = (byte_model.random_batch(self.text, generator) for _ in range(self.steps))
        return DataLoader(list(batches), batch_size=None)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        return byte_model.loss_of(self.model, batch)

    def on_train_batch_end(self, *_: object) -> None:
        """Print the validation quality about ten times during the training."""
        step = self.global_step
        if step % max(5, self.steps // 10) == 0 and self.global_rank == 0:
            self.curve.append((step, byte_model.quality(self.model, self.validation)))
            print(f"step {step:4} of {self.steps}: {self.curve[-1][1]:.3f} bits per byte", flush=True)

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: byte_model.learning_rate(step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train as one rank of a launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="qccl", help='"gloo" is PyTorch\'s own')
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="lightning.png", help="the picture to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the processors
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend=options.backend),  # the one word
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        use_distributed_sampler=False,  # each rank makes its own batches; a sampler would leave most of them out
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ByteModule(10 if options.quick else options.steps)
    trainer.fit(module)
    if module.global_rank == 0:
        title = "A byte model with Lightning"
        codec = str(qccl.torch.Options().codec)
        draw(options.figure, module.curve, f"Short run: {title}" if options.quick else title, codec)


if __name__ == "__main__":
    main()
