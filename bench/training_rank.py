"""One rank of bench/train_slow_link.py, which starts this script: ``python bench/training_rank.py TASK``.

A method is "fp32", "fp16", "powersgd:RANK" (PyTorch's own), a codec of qccl, "low_rank:RANK:CODEC", which is
``compress(low_rank=RANK, codec=CODEC)``, or "diloco:OPTIONS:CODEC" (without_ddp.py).
"CODEC@25" sends the first 25 steps as they are: ``compress(warmup_steps=25)``. A codec with "+nesterov" replaces the
momentum of the recipe's optimiser.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import report
from training_report import computation, network_of
from without_ddp import changed, is_local, local_recipe, outer_of, step_of

import qccl
from qccl.bench.lab.lab import shaped_nbytes

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
#: megabytes of DDP's buckets: as in docs/examples/ddp.py; and behind a link with a delay PyTorch's default. On 4 ranks
#: gloo's ring waits for six round trips in each bucket, so few large buckets are faster there
BUCKET_MB, FAR_BUCKET_MB = 0.5, 25.0
#: steps between two measurements of the quality, and positions at which it is measured
EVERY, POSITIONS = 25, 6000
#: warm-up steps; PowerSGD begins to compress after 10
WARM_UP = 12


def main(task: dict[str, Any]) -> None:
    """Measure as one rank; rank 0 reports its results."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"curve": _measure_curve, "compute": _measure_compute, "step": _measure_step}[task["measure"]](task)
    if dist.get_rank() == 0:
        report([found])
    # DistributedDataParallel holds the group, whose threads must end before the interpreter: otherwise they may abort
    gc.collect()
    dist.destroy_process_group()


def _wrapped(module: Any, method: str, link: str | None = None) -> Any:
    """Wrap the module in DistributedDataParallel, and let ``method`` reduce the gradients; buckets fit ``link``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import qccl.torch

    name, _, parameter = method.partition(":")
    if name == "powersgd":  # in one bucket: several block each other in gloo's threads
        model = DistributedDataParallel(module, bucket_cap_mb=100, gradient_as_bucket_view=True)
        state = powerSGD_hook.PowerSGDState(None, int(parameter), start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model
    is_far = name in ("fp32", "fp16") and link is not None and network_of(link).is_far
    size = FAR_BUCKET_MB if is_far else BUCKET_MB
    model = DistributedDataParallel(module, bucket_cap_mb=size, gradient_as_bucket_view=True)
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name != "fp32":
        codec, _, steps = method.partition("@")
        rank = 0
        if name == "low_rank":
            number, _, codec = codec.removeprefix("low_rank:").partition(":")
            rank = int(number)
        qccl.torch.compress(model, codec, low_rank=rank, warmup_steps=int(steps or 0))
    return model


def recipe_of(task: dict[str, Any]) -> Any:
    """The recipe of a task's model, for its method.

    The task's "factor", if it has one, multiplies the learning rate.
    """
    recipe = importlib.import_module(task["model"])
    if "+nesterov" in task["method"]:
        recipe = _without_momentum(recipe)
    return _scaled(recipe, task["factor"]) if "factor" in task else recipe


def _measure_curve(task: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the quality every EVERY steps, and a digest of the parameters."""
    import torch
    import torch.distributed as dist
    from loop import train

    recipe = recipe_of(task)
    torch.manual_seed(task["seed"])
    model, number = recipe.make_model(), dist.get_rank()
    finish = None
    if is_local(task["method"]):
        outer = outer_of(qccl.Communicator.from_torch(), list(model.parameters()), task["method"])
        recipe, finish = local_recipe(recipe, outer), outer.finish
    else:
        model = _wrapped(model, task["method"])
    begin = time.monotonic()
    how = {"seed": task["seed"], "measures": number == 0, "every": EVERY, "positions": POSITIONS}
    curve = train(model, recipe, task["steps"], number, **how)
    if finish is not None:
        finish()
    took = time.monotonic() - begin
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    summary = f"{curve[-1][1]:.4f} {recipe.UNIT}, {took:.0f} s" if curve else ""
    return {"curve": curve, "digest": digest, "seconds": took, "summary": summary}


def _scaled(recipe: Any, factor: float) -> Any:
    """The recipe with ``factor`` times its learning rate."""
    return changed(recipe, learning_rate=lambda step: factor * recipe.learning_rate(step))


def _without_momentum(recipe: Any) -> Any:
    """The recipe without the optimiser's momentum, for codecs that have their own."""

    def optimizer_of(model: Any) -> Any:
        optimizer = recipe.optimizer_of(model)
        for group in optimizer.param_groups:
            if "momentum" not in group:
                raise ValueError(f"a codec with +nesterov is for SGD with momentum, not {type(optimizer).__name__}")
            group |= {"momentum": 0.0, "nesterov": False}
        return optimizer

    return changed(recipe, optimizer_of=optimizer_of)


def _measure_compute(task: dict[str, Any]) -> dict[str, Any]:
    """The median times of a step's computation.

    "forward" and "optimiser" are in seconds. "ready" has the shape of each gradient and the seconds from the beginning
    of the backward pass until it is ready, in this order.
    """
    import torch

    recipe = importlib.import_module(task["model"])
    model = recipe.make_model()
    optimizer = recipe.optimizer_of(model)
    text, _ = recipe.corpus()
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {}

    def note(what: str) -> Callable[[object], None]:
        return lambda _: times.setdefault(what, []).append(time.perf_counter() - begin)

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(note(name))
    for _ in range(60):
        begin = time.perf_counter()
        batch = recipe.random_batch(text, generator)
        optimizer.zero_grad()
        loss = recipe.loss_of(model, batch)
        note("forward")(None)
        begin = time.perf_counter()
        loss.backward()
        begin = time.perf_counter()
        recipe.update(model, optimizer)
        note("optimiser")(None)
    medians = {name: statistics.median(each[10:]) for name, each in times.items()}
    forward, optimiser = medians.pop("forward"), medians.pop("optimiser")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ready = sorted(((shapes[name], at) for name, at in medians.items()), key=lambda each: each[1])
    summary = (
        f"forward {forward * 1e3:.1f} ms, backward {ready[-1][1] * 1e3:.1f} ms, optimiser {optimiser * 1e3:.1f} ms"
    )
    return {"forward": forward, "ready": ready, "optimiser": optimiser, "summary": summary}


def _measure_step(task: dict[str, Any]) -> dict[str, Any]:
    """The median time of a step whose computation is replaced by sleeping, and the bytes that a rank sends."""
    import torch
    import torch.distributed as dist

    step, number = _step_of(task)
    for _ in range(max(WARM_UP, 2 * number)):
        step()
    blocks, sent = [], []
    for _ in range(7):
        dist.barrier()
        before = sent_nbytes_behind(task["link"])
        begin = time.perf_counter()
        for _ in range(number):
            step()
        mine = torch.tensor((time.perf_counter() - begin) / number)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        blocks.append(mine.item())
        nbytes = torch.tensor((sent_nbytes_behind(task["link"]) - before) / number)
        dist.all_reduce(nbytes, dist.ReduceOp.MAX)
        sent.append(nbytes.item())
    seconds = statistics.median(blocks)
    summary = f"{seconds * 1e3:.1f} ms a step, {statistics.median(sent) / 1e6:.2f} MB"
    return {"seconds": seconds, "blocks": blocks, "nbytes": statistics.median(sent), "summary": summary}


def _step_of(task: dict[str, Any]) -> tuple[Callable[[], None], int]:
    """A function that takes a step, and how many steps are timed together."""
    import torch
    import torch.distributed as dist

    compute = task["compute"]
    if is_local(task["method"]):
        shapes = [shape for shape, _ in reversed(compute["ready"])]
        return step_of(qccl.Communicator.from_torch(), shapes, task["method"], computation(task), dist.get_rank())
    model = _wrapped(_replay(compute["ready"]), task["method"], task["link"])

    def step() -> None:
        model.zero_grad()
        time.sleep(compute["forward"])
        model(torch.zeros(1, requires_grad=True)).backward()
        time.sleep(compute["optimiser"])

    return step, 4


def sent_nbytes_behind(link: str | None) -> int:
    """The bytes that this rank has sent through the lab; 0 without a link."""
    return 0 if link is None else shaped_nbytes()


def _replay(ready: list[tuple[list[int], float]]) -> Any:
    """A module with parameters of given shapes, whose gradients become ready at given times of the backward pass.

    The gradients are normally distributed, because a codec's time may depend on its values.
    """
    import torch
    from torch import nn

    class Replay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [shape for shape, _ in ready]
            self.begin = 0.0
            self.gradients = [torch.randn(shape) for shape in shapes]
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in reversed(shapes)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, weight in enumerate(self.weights):
                x = Ready.apply(x, weight, len(ready) - 1 - i)
            return Begin.apply(x)

    class Begin(torch.autograd.Function):
        """Records when the backward pass begins."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            module.begin = time.perf_counter()
            return gradient

    class Ready(torch.autograd.Function):
        """Returns gradient ``number`` at its time."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            own = module.gradients[ctx.number].detach()  # a new tensor of the same memory: PyTorch need not copy it
            time.sleep(max(0.0, module.begin + ready[ctx.number][1] - time.perf_counter()))
            return gradient, own, None

    module = Replay()
    return module


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
