"""Four ranks on two machines: what compress(), FSDP2's classes and the process group choose by themselves."""

from __future__ import annotations

import machines
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_calls import bound
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import qccl
from qccl.torch import AllGather, ReduceScatter, compress

NODES = (0, 0, 1, 1)
#: elements of the layer
INPUTS, OUTPUTS = 1024, 1024


def check(calls: list, *names: str) -> None:
    """The calls that bound() has seen use two levels."""
    found = {(spec.name, getattr(spec, "node_ids", None)) for spec, _ in calls}
    assert found == {(name, NODES) for name in names}, found


def step(model: torch.nn.Module) -> None:
    model(torch.full((4, INPUTS), 1.0 + dist.get_rank())).sum().backward()


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_compressed() -> None:
    """The buckets of a compressed DistributedDataParallel."""
    machines.pretend(dist.get_rank())
    for codec in ("minmax8", "minmax4+ef"):
        model = DistributedDataParallel(Linear(INPUTS, OUTPUTS, bias=False))
        with bound() as calls, compress(model, codec):
            step(model)
        check(calls, "hierarchical_allreduce_coalesced")


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_sharded() -> None:
    """FSDP2's gradients and weights."""
    machines.pretend(dist.get_rank())
    mesh = init_device_mesh("cpu", (4,))
    with bound() as calls, qccl.Communicator.from_torch(mesh.get_group(), timeout=60) as comm:
        model = fully_shard(Linear(INPUTS, OUTPUTS, bias=False), mesh=mesh)
        ReduceScatter("minmax8", comm).install(model)
        AllGather("minmax8", comm).install(model)
        step(model)
    check(calls, "reduce_scatter", "all_gather")


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_grouped() -> None:
    """The process group "qccl", which gathers exactly."""
    machines.pretend(dist.get_rank())
    whole, part = torch.ones(INPUTS * OUTPUTS), torch.ones(INPUTS * OUTPUTS // 4)
    with bound() as calls:
        group = dist.new_group(backend="qccl")
        dist.all_reduce(whole, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        check(calls, "hierarchical_allreduce", "reduce_scatter")
