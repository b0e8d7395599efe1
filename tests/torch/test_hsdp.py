"""HSDP with quantised averages between replicas: 2 replicas of 2 shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_calls import error_of
from sharded_models import SETS, Experts, Sums, backward, bits, gradients, net, raises, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear

import qccl
from qccl import codecs
from qccl.torch import AllReduce

pytestmark = pytest.mark.starts_first


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


@on_ranks(4)
def test_exact() -> None:
    """Without a codec the replicas have PyTorch's bits: averages of two values do not depend on their order."""
    mesh = mesh_of()
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}):
        with connect(mesh) as comm:
            plain, ours = net(mesh, **options), net(mesh["shard"], **options)
            AllReduce("none", comm).install(ours)
            for model in (plain, ours):
                train(model, range(4))
            assert bits(plain) == bits(ours) and comm.calls == 12, comm.calls


@on_ranks(4)
def test_bounds() -> None:
    """The averages are within the codec's bound of the replicas' gradients, and the calls overlap the backward pass."""
    mesh, codec = mesh_of(), codecs.get("minmax4:bucket=64")
    alone, ours = net(mesh["shard"]), net(mesh["shard"])
    with connect(mesh) as comm:
        reduction = AllReduce(codec, comm, min_elements=0)
        reduction.install(ours)
        waited = []
        for module in reduction._modules:
            module.must_wait = lambda *given, own=module.must_wait: waited.append(own(*given)) or waited[-1]
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


@on_ranks(4)
def test_replicas() -> None:
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


@on_ranks(4)
def test_accumulates() -> None:
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


@on_ranks(4)
def test_other_meshes(tmp_path: Path) -> None:
    """What the results lack is the same after a full state was loaded on another number of replicas and shards."""
    path = tmp_path / "full.pt"
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


@on_ranks(4)
def test_lists() -> None:
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


@on_ranks(4)
def test_owners() -> None:
    """Two models on one communicator have residuals of their own."""
    mesh = mesh_of()
    with connect(mesh) as comm:
        models = [fully_shard(Experts(1), mesh=mesh["shard"]) for _ in range(2)]
        models[1].SCALES = (0.01,)
        made = [AllReduce("minmax2+ef", comm, min_elements=0) for _ in models]
        sums = [Sums(model) for model in models]
        for each, model in zip(made, models, strict=True):
            each.install(model)
        for _ in range(12):
            for each in sums:
                each.step()
        for each in sums:
            each.check()
        assert list(comm.state_dict()["keys"]) == ["hsdp//0", "hsdp#2//0"]
        states = [each.state_dict() for each in made]
        made[0].load_state_dict(states[1])
        other = AllReduce("minmax2+ef", comm, key="hsdp", min_elements=0)
        raises("an AllReduce with key='hsdp' exists", other.install, models[0])
        made[0].close()
        raises("this AllReduce is closed", sums[0].step)
        other.install(models[0])
        other.load_state_dict(states[1])


@on_ranks(4)
def test_refuses() -> None:
    mesh = mesh_of()
    with connect(mesh) as comm:
        raises("so FSDP2 averages the replicas itself", AllReduce("minmax8", comm).install, net(mesh))
        raises("no module that fully_shard() has wrapped", AllReduce("minmax8", comm).install, Linear(2, 2))
        raises("exclude must be a list of patterns", lambda: AllReduce("minmax8", comm, exclude="*"))
        raises("comm must be a Communicator", AllReduce, "minmax8", mesh["replicate"].get_group())
        other = net(mesh["shard"], seed=dist.get_rank() // 2)
        raises("the replicas must begin with the same parameters", AllReduce("minmax8", comm).install, other)
        raises(
            "has the element type torch.float64", AllReduce("minmax8", comm).install, net(mesh["shard"], torch.float64)
        )
        several = {torch.Size([4]): FSDPMeshInfo(mesh=mesh["replicate"], shard_mesh_dim=0)}  # of the bias
        one = FSDPMeshInfo(mesh=mesh["shard"], shard_mesh_dim=0)
        placed = fully_shard(
            Linear(4, 4),
            mesh=mesh["shard"],
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), several.get(p.shape, one)),
        )
        raises("the parameters of the module '' are on several meshes", AllReduce("minmax8", comm).install, placed)
        raises("matches no parameter", AllReduce("minmax8", comm, exclude=["x"]).install, net(mesh["shard"]))
        reduction, model = AllReduce("minmax8+ef", comm, min_elements=0), net(mesh["shard"])
        reduction.install(model)
        raises("is installed already", reduction.install, model)
        raises("is not a state", reduction.load_state_dict, 3)
        raises("belongs to other parameters", reduction.load_state_dict, reduction.full_state_dict() | {"groups": []})


def trained(
    mesh: DeviceMesh, comm: qccl.Communicator, codec="minmax2:bucket=64+ef", **options
) -> tuple[Sums, AllReduce]:
    model = fully_shard(Experts(), mesh=mesh["shard"])
    reduction = AllReduce(codec, comm, min_elements=0, **options)
    reduction.install(model)
    return Sums(model), reduction


@on_ranks(4)
def test_sets() -> None:
    """Residuals follow their parameters where other ones have a gradient in each step, or are frozen."""
    for replicas, how in ((2, "used"), (2, "frozen"), (2, "saved"), (4, "used")):
        mesh = mesh_of(replicas)
        with connect(mesh) as comm:
            sums, reduction = trained(mesh, comm)
            for number in range(3 * len(SETS)):
                used = SETS[number % len(SETS)]
                for i, expert in enumerate(sums.model.experts):
                    expert.requires_grad_(how != "frozen" or i in used)
                sums.step(range(3) if how == "frozen" else used)
                if how == "saved":
                    state = reduction.state_dict()
                    assert list(state["residuals"]) == [f"experts.{i}.weight" for i in range(3)]
                    reduction.load_state_dict(state)
            sums.check()
            assert len(comm.state_dict()["keys"]) <= 3
            sums.check_owed(reduction.full_state_dict()["residuals"])


@on_ranks(4)
def test_sets_resumed() -> None:
    """A run that is saved between two sets goes on with the same bits, and on another mesh it owes the same."""
    mesh, states, state, full, keys = mesh_of(), [], {}, {}, set()
    for number in range(2):
        with connect(mesh) as comm:
            sums, reduction = trained(mesh, comm)
            if number:
                sums.step((0, 1))  # what it has so far is forgotten
                sums.step((2,))
                reduction.load_state_dict(state)
                assert set(comm.state_dict()["keys"]) == keys, "and no residuals of other sets"
                sums.steps = 9
            for step in range(sums.steps, 12):
                if step == 9:
                    state, full = reduction.state_dict(), reduction.full_state_dict()
                    keys = set(comm.state_dict()["keys"])
                sums.step(SETS[step % len(SETS)])
            states.append(reduction.state_dict())
    for name, values in states[0]["residuals"].items():
        assert values.equal(states[1]["residuals"][name]) and values.any(), name
    mesh = mesh_of(4)
    with connect(mesh) as comm:
        sums, reduction = trained(mesh, comm)
        reduction.load_state_dict(full)
        for name, values in reduction.full_state_dict()["residuals"].items():
            assert torch.allclose(values, full["residuals"][name], rtol=1e-5, atol=1e-4), name


@on_ranks(4)
def test_frozen_resumed() -> None:
    """A state has parameters that are frozen when it is loaded, or lacks some that were frozen then."""
    mesh, saved = mesh_of(), []
    for number in range(3):
        with connect(mesh) as comm:
            model = Experts()
            model.experts[1].requires_grad_(False)
            sums, reduction = (
                Sums(fully_shard(model, mesh=mesh["shard"])),
                AllReduce("minmax2+ef", comm, min_elements=0),
            )
            reduction.install(model)
            if number == 0:
                sums.step((0, 2))
                few = reduction.state_dict()
                model.experts[1].requires_grad_(True)
                sums.step(range(3))
                saved = [reduction.full_state_dict(), reduction.state_dict()]
                again = AllReduce("minmax2+ef", comm, min_elements=0)
                again.install(model)
                raises("it lacks experts.1.weight", again.load_state_dict, few)
                continue
            broken = {**saved[0], "step": -1}
            raises("", reduction.load_state_dict, broken)
            assert "experts.1.weight" not in str(reduction)
            reduction.load_state_dict(saved[number - 1])
            found = reduction.full_state_dict()["residuals"]
            for name, values in saved[0]["residuals"].items():
                assert torch.allclose(values, found[name], rtol=1e-5, atol=1e-4) and values.any(), name
            model.experts[1].requires_grad_(True)
            sums.steps = 2
            for used in SETS:
                sums.step(used)
            owed = reduction.full_state_dict()["residuals"]
            sums.check_owed({name: values - found[name] for name, values in owed.items()})


@on_ranks(4)
def test_unfreezes() -> None:
    """A parameter that needs a gradient only later is averaged, too, if the replicas have the same one."""
    mesh = mesh_of()
    for is_equal in (True, False):
        with connect(mesh) as comm:
            model = net(mesh["shard"])
            frozen = [*model[0].parameters(), model[2].bias]
            for p in frozen:
                p.requires_grad_(False)
            reduction = AllReduce("minmax4:bucket=64+ef", comm, min_elements=0)
            reduction.install(model)
            train(model, range(2))
            assert "0.weight" not in reduction.state_dict()["residuals"]
            for p in frozen:
                p.requires_grad_(True)
            if not is_equal:
                with torch.no_grad():
                    model[2].bias.to_local().add_(dist.get_rank() // 2)
                raises("the replicas must begin with the same parameters", train, model, range(2))
                assert "2.bias" not in str(reduction)
                continue
            train(model, range(2))
            assert are_equal(mesh, model) and "0.weight" in reduction.state_dict()["residuals"]
            again = AllReduce("minmax4:bucket=64+ef", comm, min_elements=0)
            again.install(model)  # which needs all gradients at once
            again.load_state_dict(reduction.state_dict())


@on_ranks(4)
def test_disagree() -> None:
    """Replicas that use other experts in a step would average gradients of other parameters."""
    mesh = mesh_of()
    for codec in ("minmax8", "minmax8+ef"):
        with connect(mesh) as comm:
            sums, _ = trained(mesh, comm, codec)
            text = error_of(lambda sums=sums: sums.step((dist.get_rank() // 2,)), qccl.MismatchError)
            assert "experts.0.weight" in text and "experts.1.weight" in text, text


@on_ranks(4)
def test_tensor_parallel() -> None:
    """The shard dimension beside one of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    with connect(mesh) as comm:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Linear(8, 64), torch.nn.ReLU(), Linear(64, 8))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shard"])
        reduction = AllReduce("minmax4:bucket=64+ef", comm, min_elements=0)
        reduction.install(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert are_equal(mesh, model)
        full = reduction.full_state_dict()
        assert {name: tuple(values.shape) for name, values in full["residuals"].items()} == {
            "0.weight": (64, 8), "2.weight": (8, 64)
        }  # fmt: skip
        reduction.load_state_dict(full)
        again = reduction.full_state_dict()
        for name, values in full["residuals"].items():
            assert torch.allclose(again["residuals"][name], values, rtol=1e-6, atol=1e-7) and values.any(), name


@on_ranks(4)
def test_default_types() -> None:
    """A program may change torch's default type and device; one rank's shard is empty."""
    mesh = mesh_of()
    with connect(mesh) as comm:
        model = fully_shard(Linear(500, 1, bias=False), mesh=mesh["shard"])
        reduction = AllReduce("minmax2+ef", comm, min_elements=0)
        reduction.install(model)
        model(torch.randn(3, 500, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
        wanted = reduction.full_state_dict()["residuals"]["weight"]
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                found = reduction.full_state_dict()
                reduction.load_state_dict(reduction.state_dict())
                reduction.load_state_dict(found)
        finally:
            torch.set_default_dtype(torch.float32)
        assert found["residuals"]["weight"].equal(wanted) and wanted.any()
