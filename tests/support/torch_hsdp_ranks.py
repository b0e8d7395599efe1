"""What the ranks of test_torch_hsdp.py do: ``torch_hsdp_ranks.py FOLDER FUNCTION...``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Linear
from torch_sharded import STATEFUL, Branch, backward, bits, gradients, net, run_named, train

import qccl
from qccl import codecs
from qccl.torch import AllReduce

FOLDER = Path(sys.argv[1])


def mesh_of(replicas: int = 2) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def connect(mesh: DeviceMesh) -> qccl.Communicator:
    return qccl.Communicator.from_torch(mesh["replicate"].get_group(), timeout=60)


def are_equal(mesh: DeviceMesh, model) -> bool:
    """Whether the replicas have the same bits."""
    found: list[bytes] = [b""] * mesh["replicate"].size()
    dist.all_gather_object(found, bits(model), group=mesh["replicate"].get_group())
    return len(set(found)) == 1


def raises(reason: str, call, *arguments, **options) -> None:
    try:
        call(*arguments, **options)
    except qccl.ArgumentError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"no error that says {reason!r}")


def exact() -> None:
    """Without a codec the replicas have PyTorch's bits: averages of two values do not depend on their order."""
    mesh = mesh_of()
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}):
        with connect(mesh) as comm:
            plain, ours = net(mesh, **options), net(mesh["shard"], **options)
            AllReduce("none", comm).install(ours)
            for model in (plain, ours):
                train(model, range(4))
            assert bits(plain) == bits(ours) and comm.calls == 12, comm.calls


def bounds() -> None:
    """The averages are within the codec's bound of the replicas' gradients, and the calls overlap the backward pass."""
    mesh, codec = mesh_of(), codecs.get("minmax4:bucket=64")
    alone, ours = net(mesh["shard"]), net(mesh["shard"])
    with connect(mesh) as comm:
        reduction = AllReduce(codec, comm, min_elements=0)
        reduction.install(ours)
        waited = []
        for module in reduction._modules:
            module.must_wait = lambda shard, own=module.must_wait: waited.append(own(shard)) or waited[-1]
        for model in (alone, ours):
            backward(model, 0)
        assert waited == [False] * 3 and reduction.step == 1 and not reduction._under_way
        for p, q in zip(alone.parameters(), ours.parameters(), strict=True):
            own = p.grad.to_local().flatten()
            both = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(both, own, group=mesh["replicate"].get_group())
            mean = sum(x.double() for x in both).numpy() / 2
            error = np.abs(q.grad.to_local().flatten().numpy() - mean)
            if p.dim() == 1:  # sent as they are
                assert (error <= 1e-6 * np.abs(mean)).all()
                continue
            bound = sum(codec.error_bound(x.numpy()) for x in both) / 2
            bound += codec.error_bound(mean.astype(np.float32)) + bound.max(initial=0) / 15  # the second round
            assert (error <= bound + 1e-6).all()


def replicas() -> None:
    """Training with error feedback leaves the same bits on all replicas, with every kind of precision."""
    mesh = mesh_of()
    for dtype, options in (
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (torch.float16, {}),
    ):
        with connect(mesh) as comm:
            model = net(mesh["shard"], dtype, **options)
            reduction = AllReduce("minmax4:bucket=64+ef", comm, min_elements=0)
            reduction.install(model)
            for step in range(3):
                train(model, [step])
                assert are_equal(mesh, model)
            assert "minmax4:bucket=64+ef" in str(reduction)


def accumulates() -> None:
    """Gradients of several backward passes add up, as PyTorch's do."""
    mesh = mesh_of()
    plain, ours = net(mesh), net(mesh["shard"])
    with connect(mesh) as comm:
        AllReduce("none", comm).install(ours)
        for model in (plain, ours):
            model.set_requires_gradient_sync(False)
            backward(model, 0)
            model.set_requires_gradient_sync(True)
            backward(model, 1)
            backward(model, 2)  # onto gradients that are there
        assert gradients(plain).equal(gradients(ours)) and comm.calls == 6


def resumes() -> None:
    """A run that is saved, and goes on in another communicator, ends with the same bits."""
    mesh, path = mesh_of(), FOLDER / f"{dist.get_rank()}.pt"

    def made(comm: qccl.Communicator):
        model, reduction = net(mesh["shard"]), AllReduce(STATEFUL, comm, min_elements=0)
        reduction.install(model)
        reduction.lr = 0.5
        return model, reduction

    with connect(mesh) as comm:
        model, reduction = made(comm)
        train(model, range(3))
        weights = [p.to_local().clone() for p in model.parameters()]
        torch.save({"weights": weights, "reduction": reduction.state_dict()}, path)
        train(model, range(3, 6))
        wanted = bits(model)
    with connect(mesh) as comm:
        model, reduction = made(comm)
        saved = torch.load(path)  # with weights_only=True
        with torch.no_grad():
            for p, each in zip(model.parameters(), saved["weights"], strict=True):
                p.to_local().copy_(each)
        reduction.load_state_dict(saved["reduction"])
        assert reduction.step == 3
        train(model, range(3, 6))
        assert bits(model) == wanted


def other_meshes() -> None:
    """What the results lack is the same after a full state was loaded on another number of replicas and shards."""
    path = FOLDER / "full.pt"
    mesh = mesh_of()
    with connect(mesh) as comm:
        model, reduction = net(mesh["shard"]), AllReduce("minmax2:bucket=64+ef", comm, min_elements=0)
        reduction.install(model)
        train(model, range(3))
        full = reduction.full_state_dict()
        assert {name: list(values.shape) for name, values in full["residuals"].items()} == {
            "0.weight": [64, 20], "2.weight": [33, 64], "4.weight": [1, 33]
        }  # fmt: skip
        assert all(values.abs().max() > 0 for values in full["residuals"].values())
        if dist.get_rank() == 0:
            torch.save(full, path)
    dist.barrier()
    for count in (4, 2):
        mesh = mesh_of(count)
        with connect(mesh) as comm:
            model, reduction = net(mesh["shard"]), AllReduce("minmax2:bucket=64+ef", comm, min_elements=0)
            reduction.install(model)
            reduction.load_state_dict(torch.load(path))
            again = reduction.full_state_dict()
            for name, values in full["residuals"].items():
                assert torch.allclose(again["residuals"][name], values, rtol=1e-6, atol=1e-7), name
            assert again["step"] == 3
            train(model, range(2))
            assert are_equal(mesh, model)


def lists() -> None:
    """Modules that fully_shard() wrapped as a list have one vector of gradients, and one state."""
    mesh = mesh_of()
    with connect(mesh) as comm:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Linear(20, 64), Linear(64, 33), Linear(33, 1))
        fully_shard([model[1], model[2]], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        reduction = AllReduce("minmax2:bucket=64+ef", comm, min_elements=0)
        reduction.install(model)
        assert [name for group in reduction._groups for name in group.names] == [
            "0.weight", "0.bias", "1.weight", "2.weight", "1.bias", "2.bias"
        ]  # fmt: skip
        train(model, range(3))
        assert are_equal(mesh, model) and comm.calls == 12, comm.calls
        full = reduction.full.state_dict()
        assert all(full["residuals"][f"{i}.weight"].any() for i in range(3))
        reduction.full.load_state_dict(full)
        again = reduction.full_state_dict()
        for name, values in full["residuals"].items():
            assert torch.allclose(again["residuals"][name], values, rtol=1e-6, atol=1e-7), name


def refuses() -> None:
    mesh = mesh_of()
    with connect(mesh) as comm:
        raises("so FSDP2 averages the replicas itself", AllReduce("minmax8", comm).install, net(mesh))
        raises("no module that fully_shard() has wrapped", AllReduce("minmax8", comm).install, Linear(2, 2))
        raises("comm must be a Communicator", AllReduce, "minmax8", mesh["replicate"].get_group())
        other = net(mesh["shard"], seed=dist.get_rank() // 2)
        raises("the replicas must begin with the same parameters", AllReduce("minmax8", comm).install, other)
        raises(
            "has the element type torch.float64", AllReduce("minmax8", comm).install, net(mesh["shard"], torch.float64)
        )
        raises("matches no parameter", AllReduce("minmax8", comm, exclude=["x"]).install, net(mesh["shard"]))
        reduction, model = AllReduce("minmax8+ef", comm, min_elements=0), net(mesh["shard"])
        reduction.install(model)
        raises("is installed already", reduction.install, model)
        raises("is not a state", reduction.load_state_dict, 3)
        raises("belongs to other parameters", reduction.load_state_dict, reduction.full_state_dict() | {"groups": []})
        torch.manual_seed(0)
        model = fully_shard(Branch(), mesh=mesh["shard"])
        reduction = AllReduce("minmax8+ef", comm, key="branch", min_elements=0)
        reduction.install(model)
        model(torch.ones(2, 4), True).sum().backward()
        model.zero_grad()
        second = model(torch.ones(2, 4), False).sum()
        raises("set_reduce_scatter_unused_params(True)", second.backward)
        model = fully_shard(Branch(), mesh=mesh["shard"])
        model.set_reduce_scatter_unused_params(True)
        AllReduce("minmax8+ef", comm, key="told", min_elements=0)


if __name__ == "__main__":
    run_named(globals())
