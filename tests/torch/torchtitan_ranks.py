"""Runs a program for torchtitan on the CPU: ``torchtitan_ranks.py PROGRAM FOLDER STEPS``.

torchtitan has no option for the CPU, no data without a download, and calls what PyTorch 2.13 does not have yet.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# before the imports of torchtitan, which ask for the device
torch._utils._get_available_device_type = lambda: "cpu"
for name, answer in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "memory_stats": {},
    "current_device": 0,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
}.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *_: None

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

WORDS = 2048  # of the model "debugmodel"


class Words(BaseDataLoader):
    """Numbers that count up, from a random one in each row."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._rows, self._columns = local_batch_size, torch.arange(seq_len + 1)
        self._random = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            x = (torch.randint(WORDS, (self._rows, 1), generator=self._random) + self._columns) % WORDS
            yield {"input": x[:, :-1]}, x[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.set_state(state["random"])


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


def tiny() -> Trainer.Config:
    """Two layers of the smallest model, on two replicas of two shards; PROGRAM finds it by --config."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are for GPUs
    loss = CrossEntropyLoss.Config(global_vocab_size=WORDS)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        dataloader=Words.Config(),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(local_batch_size=2, seq_len=64, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
    )


if __name__ == "__main__":
    program, folder, steps = sys.argv[1:]
    sys.argv = [program, "--module", "torchtitan_ranks", "--config", "tiny"]
    sys.argv += ["--dump_folder", folder, "--training.steps", steps]
    runpy.run_path(program, run_name="__main__")
