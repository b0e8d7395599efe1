"""PyTorch's DistributedDataParallel with compressed gradients: 4 ranks train a language model.

    torchrun --standalone --nproc-per-node 4 docs/examples/ddp.py

``--codec`` chooses the codec; "fp32" leaves the gradients to PyTorch, for comparison. ``--model word_gpt`` is a GPT of
1.1 million parameters with AdamW (word_gpt.py), ``--model byte_model`` one of bytes with 2 million (byte_model.py).
"""

from __future__ import annotations

import argparse
import importlib

import torch
import torch.distributed as dist
from loop import draw, train
from torch.nn.parallel import DistributedDataParallel

import qccl.torch


def main() -> None:
    """Train as one rank of a launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="word_gpt", choices=("word_gpt", "byte_model"))
    parser.add_argument("--codec", default="minmax2:bucket=256+ef", help='such as "minmax4+ef", or "fp32"')
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="ddp.png", help="the picture to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the processors
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(options.seed)  # the same model on every rank
    recipe = importlib.import_module(options.model)
    # several buckets, so that some travel during backward()
    model = DistributedDataParallel(recipe.make_model(), bucket_cap_mb=0.5)
    if options.codec != "fp32":
        compression = qccl.torch.compress(model, options.codec)
        if rank == 0:
            print(compression, flush=True)
    steps = 10 if options.quick else options.steps
    curve = train(model, recipe, steps, rank, seed=options.seed, measures=rank == 0)
    if rank == 0:
        title = f"{options.model} on {dist.get_world_size()} ranks"
        draw(options.figure, curve, f"Short run: {title}" if options.quick else title, options.codec, recipe.UNIT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
