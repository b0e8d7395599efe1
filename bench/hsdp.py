"""Times HSDP with compressed averages between replicas: ``python bench/hsdp.py`` (about 5 minutes; needs root).

Two replicas of two shards train a model of docs/examples with FSDP2. Each replica is a node of the lab behind a slow
link; inside a node nothing is limited. PyTorch's own HSDP averages the gradients of the replicas by gloo in fp32;
qccl.torch.AllReduce does it with each codec. Four ranks do not fit on two cores, so each rank sleeps instead of
computing, as long as forward pass, backward pass and optimiser take one rank alone on this machine; a layer sleeps for
its share of the parameters. FSDP2 and the codecs do run, on parameters of the model's shapes, and four ranks share the
cores for them. The time of a step without a link, in shared memory, shows how long they take.

``--write docs/howto/pytorch-fsdp.md`` replaces that page's table.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
from runs import document_table, machine, print_table, report, rewrite_table, run_ranks, start_script

from qccl.bench.lab.lab import Lab, shaped_nbytes
from qccl.bench.params import parse_link

_EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
_RANKS, _NODES = 4, 2
_WARM_UP, _BLOCKS, _STEPS = 3, 5, 3
COLUMNS = (
    "model",
    "between the replicas",
    "ms a step",
    "faster than PyTorch",
    "MB a step and node",
    "ms without a link",
)
PLAIN = "fp32 (PyTorch)"


@click.command()
@click.option("--models", default="byte_model,word_gpt", show_default=True)
@click.option("--codecs", default="none,minmax8,minmax4+ef,minmax2:bucket=256+ef", show_default=True)
@click.option("--link", default="100mbit", show_default=True, help="Link of each replica.")
@click.option("--write", type=click.Path(exists=True, dir_okay=False), help="Replace the table of this page.")
def main(models: str, codecs: str, link: str, write: str | None) -> None:
    """Measure, and print the table."""
    of, rows = machine(), []
    for model in models.split(","):
        script = str(Path(__file__).with_name("training_rank.py"))
        (compute,) = run_ranks(script, 1, {"measure": "compute", "model": model}, "ucx", None, None)
        print(f"{model}: {compute['summary']}", flush=True)
        task = {"model": model, "codecs": codecs.split(","), "compute": compute}
        behind = run_ranks(__file__, _RANKS, task | {"link": link}, "ucx", Lab(_RANKS, parse_link(link), _NODES), None)
        without = run_ranks(__file__, _RANKS, task | {"link": None}, "ucx", None, None)
        for row, alone in zip(behind, without, strict=True):
            gain = behind[0]["seconds"] / row["seconds"]
            cells = f"{row['seconds'] * 1e3:.0f}", f"{gain:.1f}", f"{row['nbytes'] / 1e6:.2f}"
            rows.append((model, row["method"], *cells, f"{alone['seconds'] * 1e3:.0f}"))
    print_table(COLUMNS, rows)
    if write:
        text = f"Each replica behind a link of {link}:\n\n" + document_table(COLUMNS, rows, of)
        rewrite_table(write, "python bench/hsdp.py", text)


def _as_rank(task: dict[str, Any]) -> None:
    """Time the steps of PyTorch's own HSDP, and with each codec; rank 0 prints them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import qccl
    import qccl.torch

    sys.path.insert(0, str(_EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_node = torch.arange(_RANKS).reshape(-1, _NODES).T  # the lab has rank r on node r % 2
    mesh = DeviceMesh("cpu", by_node, mesh_dim_names=("replicate", "shard"))
    rows = [{"method": PLAIN, **_timed(task, mesh)}]
    for codec in task["codecs"]:
        with qccl.Communicator.from_torch(mesh["replicate"].get_group()) as comm:
            reduction = qccl.torch.AllReduce(codec, comm)
            rows.append({"method": f"`{codec}`", **_timed(task, mesh["shard"], reduction)})
    if dist.get_rank() == 0:
        report(rows)
    dist.destroy_process_group()


def _timed(task: dict[str, Any], mesh: Any, reduction: Any = None) -> dict[str, float]:
    """Seconds of a step, and the bytes that this rank's node sends in it through its link."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)  # replicas begin with the same parameters
    model = importlib.import_module(task["model"]).make_model()
    torch.manual_seed(dist.get_rank())
    model = _replay(model, task["compute"])
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if reduction is not None:
        reduction.install(model)

    def sent_nbytes() -> int:
        return shaped_nbytes() if task["link"] else 0

    def step() -> None:
        model.zero_grad()
        model(torch.zeros(1, requires_grad=True)).backward()
        time.sleep(task["compute"]["optimiser"] / (_RANKS // _NODES))  # a rank updates its shard

    for _ in range(_WARM_UP):
        step()
    seconds, sent = [], []
    for _ in range(_BLOCKS):
        dist.barrier()
        before, begin = sent_nbytes(), time.perf_counter()
        for _ in range(_STEPS):
            step()
        seconds.append((time.perf_counter() - begin) / _STEPS)
        dist.barrier()
        sent.append((sent_nbytes() - before) / _STEPS)
    return {"seconds": statistics.median(seconds), "nbytes": statistics.median(sent)}


def _replay(model: Any, compute: dict[str, Any]) -> Any:
    """Make a model that sleeps instead of computing, with the parameters of ``model``.

    Each of its layers has the parameters of one layer of ``model`` with a matrix, and the last one all others. The
    gradients are normally distributed, because a codec's time may depend on them.
    """
    import torch
    from torch import nn

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: Layer, *_: torch.Tensor) -> torch.Tensor:
            time.sleep(compute["forward"] * layer.share)
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            time.sleep(compute["ready"][-1][1] * ctx.layer.share)
            return gradient, None, *(each.clone() for each in ctx.layer.gradients)

    class Layer(nn.Module):
        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__()
            self.weights = nn.ParameterList(weights)
            self.gradients = [torch.randn(p.shape) for p in weights]
            self.share = sum(p.numel() for p in weights) / total

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Pause.apply(x, self, *self.weights)

    total, rest = sum(p.numel() for p in model.parameters()), list(model.parameters())
    layers = []
    for children in model.children():
        for each in children if isinstance(children, nn.ModuleList | nn.Sequential) else ():
            weights = list(each.parameters())
            if any(p.dim() > 1 for p in weights):
                layers.append(Layer(weights))
                rest = [p for p in rest if all(p is not other for other in weights)]
    return nn.Sequential(*layers, Layer(rest))


if __name__ == "__main__":
    start_script(main, _as_rank)
