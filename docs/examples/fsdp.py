"""PyTorch's FSDP2 with compressed gradients and weights: 4 ranks train a language model of bytes.

    torchrun --standalone --nproc-per-node 4 docs/examples/fsdp.py

Each rank keeps a quarter of each layer. ``--gradients none --weights none`` leaves both to PyTorch, for comparison. The
model has 2 million parameters (byte_model.py).
"""

from __future__ import annotations

import argparse
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from byte_model import ByteModel, bits_per_byte, corpus, learning_rate, random_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qccl
import qccl.torch

#: examples in the batch of each rank, and the learning rate after the warm-up
BATCH, RATE = 64, 0.1


def train(comm: qccl.Communicator, model: ByteModel, steps: int) -> list[tuple[int, float]]:
    """The validation quality about ten times during the training; all ranks compute it, since each has a part."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    text, validation = corpus()
    generator = torch.Generator().manual_seed(comm.rank)  # other data on every rank
    curve, begin = [], time.monotonic()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, RATE)
        context, following = random_batch(text, BATCH, generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(context), following).backward()
        optimizer.step()
        if step % max(5, steps // 10) == 0:
            curve.append((step, bits_per_byte(model, validation)))
            each = (time.monotonic() - begin) / step * 1e3
            if comm.rank == 0:
                print(f"step {step:4} of {steps}: {curve[-1][1]:.3f} bits per byte, {each:.0f} ms a step", flush=True)
    return curve


def draw(path: str, curve: list[tuple[int, float]], label: str) -> None:
    """The validation quality by step."""
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(*zip(*curve, strict=True), marker="o", label=label)
    axes.set(xlabel="step", ylabel="bits per byte, validation", title="A byte model with FSDP2")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train as one rank of a launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", default="minmax4+ef", help="codec of the gradients")
    parser.add_argument("--weights", default="minmax8:bucket=256", help="codec of the gathered weights")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="fsdp.png", help="the picture to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the processors
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same model on every rank
    model = ByteModel()
    for layer in (model.embedding, *model.layers):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with qccl.Communicator.from_torch(mesh.get_group()) as comm:
        qccl.torch.ReduceScatter(options.gradients, comm).install(model)
        qccl.torch.AllGather(options.weights, comm).install(model)
        curve = train(comm, model, 10 if options.quick else options.steps)
        if comm.rank == 0:
            draw(options.figure, curve, f"gradients {options.gradients}, weights {options.weights}")
            print(f"wrote {options.figure}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
