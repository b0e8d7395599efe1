"""The quality of a training with compress(), computed by ranks that are threads of one process.

The ranks share one model: its gradients are computed for one rank after the other, and the result updates it once. So
a training takes a third of the processors' time that it takes with DistributedDataParallel, and its parameters are the
same bits, because the sum of a codec depends neither on DDP's buckets nor on the transport. In fp32 only the order of
the sums differs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
import threading
import time
from typing import Any

import torch
from training_rank import EVERY, EXAMPLES, POSITIONS, recipe_of
from without_ddp import changed

import qccl
from qccl.torch.ddp import compress
from qccl.torch.groups import Policy, form_groups
from qccl.training.grouping import GROUP_NBYTES

__all__ = ["curve"]

#: elements from which compress() encodes a parameter, and seconds that a rank waits for the others' gradients
_MIN_ELEMENTS, _PATIENCE = inspect.signature(compress).parameters["min_elements"].default, 600.0
_parts = functools.cache(lambda model: importlib.import_module(model).corpus())  # reading the text takes seconds


def curve(ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    """Train as training_rank.py does with a codec or fp32; returns the task with the same results."""
    sys.path[:0] = [str(EXAMPLES)] * (str(EXAMPLES) not in sys.path)
    from loop import train

    torch.set_num_threads(1)
    own, data = recipe_of(task), _parts(task["model"])
    torch.manual_seed(task["seed"])
    model = own.make_model()
    codec = "none" if task["method"] == "fp32" else task["method"]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = form_groups(named, Policy(codec, min_elements=_MIN_ELEMENTS), GROUP_NBYTES)
    generators = [torch.Generator().manual_seed(1000 * task["seed"] + rank) for rank in range(ranks)]
    gradients: list[dict[Any, torch.Tensor]] = [{} for _ in range(ranks)]
    are_ready = threading.Barrier(ranks)

    def reduce(comm: qccl.Communicator) -> None:
        are_ready.wait(_PATIENCE)
        mine = gradients[comm.rank]
        for group in groups:
            arrays = [mine[p] for p in group.parameters]
            key = group.key if group.state_names else None
            comm.quantized_allreduce_coalesced(arrays, codec=group.codec, op="avg", key=key)

    def update(comm: qccl.Communicator, model: Any, optimizer: Any) -> None:
        gradients[0] = {p: p.grad for _, p in named}
        buffers = [buffer.clone() for buffer in model.buffers()]  # DDP's ranks have those of rank 0
        for rank in range(1, ranks):
            model.zero_grad()
            own.loss_of(model, own.random_batch(data[0], generators[rank])).backward()
            gradients[rank] = {p: p.grad for _, p in named}
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        reduce(comm)
        for _, p in named:
            p.grad = gradients[0][p]
        own.update(model, optimizer)

    def run(comm: qccl.Communicator) -> Any:
        try:
            if comm.rank == 0:
                parts = {"corpus": lambda: data, "update": functools.partial(update, comm)}
                how = {"seed": task["seed"], "every": EVERY, "positions": POSITIONS}
                return train(model, changed(own, **parts), task["steps"], 0, **how)
            for _ in range(task["steps"]):
                reduce(comm)
        except BaseException:
            are_ready.abort()
            raise

    begin = time.process_time()
    found = qccl.run_ranks(ranks, run)[0]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    summary = f"{found[-1][1]:.4f} {own.UNIT}, {time.process_time() - begin:.0f} s of the processor"
    return task | {"curve": found, "digest": digest, "seconds": time.process_time() - begin, "summary": summary}
