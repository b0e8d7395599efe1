"""PyTorch's DistributedDataParallel with compressed gradients: 4 ranks train a language model of bytes.

    torchrun --standalone --nproc-per-node 4 docs/examples/ddp.py

``--codec`` chooses the codec; "fp32" leaves the gradients to PyTorch, for comparison. The model has 2 million
parameters (byte_model.py).
"""

from __future__ import annotations

import argparse
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from byte_model import ByteModel, bits_per_byte, corpus, learning_rate, random_batch
from torch.nn.parallel import DistributedDataParallel

import qccl.torch

#: examples in the batch of each rank, and the learning rate after the warm-up
BATCH, RATE = 64, 0.1


def train(codec: str, steps: int, seed: int) -> list[tuple[int, float]]:
    """The validation quality about ten times during the training, on rank 0."""
    torch.manual_seed(seed)  # the same model on every rank
    model = DistributedDataParallel(ByteModel(), bucket_cap_mb=2)  # several buckets: some travel during backward()
    if codec != "fp32":
        compression = qccl.torch.compress(model, codec)
        if dist.get_rank() == 0:
            print(compression, flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    text, validation = corpus()
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())  # other data on every rank
    curve, begin = [], time.monotonic()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, RATE)
        context, following = random_batch(text, BATCH, generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(context), following).backward()
        optimizer.step()
        if step % max(5, steps // 10) == 0 and dist.get_rank() == 0:
            curve.append((step, bits_per_byte(model.module, validation)))
            each = (time.monotonic() - begin) / step * 1e3
            print(f"step {step:4} of {steps}: {curve[-1][1]:.3f} bits per byte, {each:.0f} ms a step", flush=True)
    return curve


def draw(path: str, curve: list[tuple[int, float]], codec: str) -> None:
    """The validation quality by step."""
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(*zip(*curve, strict=True), marker="o", label=codec)
    axes.set(xlabel="step", ylabel="bits per byte, validation", title=f"A byte model on {dist.get_world_size()} ranks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train as one rank of a launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="minmax4+ef", help='such as "onebit:reconstruct=mean+ef", or "fp32"')
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="ddp.png", help="the picture to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the processors
    dist.init_process_group("gloo")
    curve = train(options.codec, 10 if options.quick else options.steps, options.seed)
    if dist.get_rank() == 0:
        draw(options.figure, curve, options.codec)
        print(f"wrote {options.figure}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
