"""PyTorch's FSDP2 with compressed gradients and weights: 4 ranks train a byte-level language model.

    torchrun --standalone --nproc-per-node 4 docs/examples/fsdp.py

Each rank keeps a quarter of each layer. ``--gradients none --weights none`` leaves both to PyTorch, for comparison. The
model has 2 million parameters (byte_model.py).
"""

from __future__ import annotations

import argparse

import byte_model
import torch
import torch.distributed as dist
from loop import draw, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qccl
import qccl.torch


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
    model = byte_model.ByteModel()
    for layer in (model.embedding, *model.layers):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with qccl.Communicator.from_torch(mesh.get_group()) as comm:
        qccl.torch.ReduceScatter(options.gradients, comm).install(model)
        qccl.torch.AllGather(options.weights, comm).install(model)
        steps = 10 if options.quick else options.steps
        curve = train(model, byte_model, steps, comm.rank)  # all ranks measure: each has a part
        if comm.rank == 0:
            label = f"gradients {options.gradients}, weights {options.weights}"
            title = "A byte model with FSDP2"
            draw(options.figure, curve, f"Short run: {title}" if options.quick else title, label)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
