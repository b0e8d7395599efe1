"""Four ranks on two machines: what compress(), FSDP2's classes and the process group choose by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import machines
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import qccl
from qccl.collectives import CollectiveSpec
from qccl.communicator.session import Session
from qccl.torch import AllGather, ReduceScatter, compress

NODES = (0, 0, 1, 1)
#: elements of the layer
INPUTS, OUTPUTS = 1024, 1024


@contextmanager
def chosen() -> Iterator[list[CollectiveSpec]]:
    """The collectives of the calls that are made for the first time, on ranks of two machines."""
    machines.pretend(dist.get_rank())
    found: list[CollectiveSpec] = []
    bind = Session.bind

    def spy(session, spec, *rest):
        found.append(spec)
        return bind(session, spec, *rest)

    Session.bind = spy
    try:
        yield found
    finally:
        Session.bind = bind


def check(specs: list[CollectiveSpec], *names: str) -> None:
    found = {(spec.name, getattr(spec, "node_ids", None)) for spec in specs}
    assert found == {(name, NODES) for name in names}, found


def step(model: torch.nn.Module) -> None:
    model(torch.full((4, INPUTS), 1.0 + dist.get_rank())).sum().backward()


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_compressed() -> None:
    """The buckets of a compressed DistributedDataParallel."""
    for codec in ("minmax8", "minmax4+ef"):
        model = DistributedDataParallel(Linear(INPUTS, OUTPUTS, bias=False))
        with chosen() as specs, compress(model, codec):
            step(model)
        check(specs, "hierarchical_allreduce_coalesced")


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_sharded() -> None:
    """FSDP2's gradients and weights."""
    mesh = init_device_mesh("cpu", (4,))
    with chosen() as specs, qccl.Communicator.from_torch(mesh.get_group(), timeout=60) as comm:
        model = fully_shard(Linear(INPUTS, OUTPUTS, bias=False), mesh=mesh)
        ReduceScatter("minmax8", comm).install(model)
        AllGather("minmax8", comm).install(model)
        step(model)
    check(specs, "reduce_scatter", "all_gather")


@on_ranks(4, transport="gloo", QCCL_TEST_RANKS_EACH="2")
def test_grouped() -> None:
    """The process group "qccl", which gathers exactly."""
    whole, part = torch.ones(INPUTS * OUTPUTS), torch.ones(INPUTS * OUTPUTS // 4)
    with chosen() as specs:
        group = dist.new_group(backend="qccl")
        dist.all_reduce(whole, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        check(specs, "hierarchical_allreduce", "reduce_scatter")
