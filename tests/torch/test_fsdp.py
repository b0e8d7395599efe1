"""FSDP2 with quantised gradients and weights."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from profiles import profile
from sharded_models import SETS, Branch, Experts, Sums, batch, bits, gradients, loss_of, net, raises, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Linear

import qccl
from qccl import codecs
from qccl.torch import AllGather, ReduceScatter

pytestmark = pytest.mark.starts_first


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def connect(mesh: DeviceMesh) -> qccl.Communicator:
    return qccl.Communicator.from_torch(mesh.get_group(), timeout=60)


@on_ranks(2, 4)
def test_exact() -> None:
    """Without a codec, or with element types that have none, training is PyTorch's to the bit."""
    mesh = line()
    with connect(mesh) as comm:
        for dtype, gradient, weight in ((torch.float32, "none", "none"), (torch.float64, "minmax2+ef", "minmax2")):
            plain, ours = net(mesh, dtype), net(mesh, dtype)
            ReduceScatter(gradient, comm).install(ours)
            AllGather(weight, comm).install(ours)
            for model in (plain, ours):
                train(model, range(4))
            assert bits(plain) == bits(ours)
        assert comm.calls == 0
        if comm.size == 2:  # sums of two values do not depend on their order
            plain, ours = net(mesh), net(mesh)
            ReduceScatter("none+ef", comm).install(ours)
            for model in (plain, ours):
                train(model, range(4))
            assert bits(plain) == bits(ours) and comm.calls == 12
        out, x = torch.zeros(3), torch.arange(3.0 * comm.size) * (comm.rank + 1)
        ReduceScatter("minmax2", comm)(out, x, mesh.get_group(), dist.ReduceOp.MAX)
        assert (out == comm.size * torch.arange(3.0 * comm.size)[3 * comm.rank :][:3]).all()


class Recorder(ReduceScatter):
    """Keeps what it was given and what it gave."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.input = input_tensor.clone()
        super().__call__(output_tensor, input_tensor, group, op, async_op)
        self.output = output_tensor.clone()


@on_ranks(2, 4)
def test_bounds() -> None:
    """Gradients and weights are within the codec's bound, in float32 and in mixed precision."""
    mesh = line()
    n, rank, codec = mesh.size(), mesh.get_rank(), codecs.get("minmax4:bucket=64")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with connect(mesh) as comm:
        for options in ({}, {"mp_policy": mixed}):
            model = net(mesh, **options)
            made = [Recorder(codec, comm, key=str(i)) for i in range(0, 5, 2)]
            for layer, each in zip((model[0], model[2], model[4]), made, strict=True):
                layer.set_custom_reduce_scatter(each)
            loss_of(model, batch(0)).backward()
            for each in made:
                inputs = [torch.empty_like(each.input) for _ in range(n)]
                dist.all_gather(inputs, each.input)
                parts = [x.numpy().reshape(n, -1)[rank] for x in inputs]
                mean = sum(part.astype(np.float64) for part in parts) / n
                bound = sum(codec.error_bound(part) for r, part in enumerate(parts) if r != rank) / n
                error = np.abs(each.output.numpy() - mean)
                assert (error <= bound + 1e-6 * np.abs(mean).max()).all()
                assert error.max() > 0 or each is not made[0]  # a rank may have only padding of small modules
    with connect(mesh) as comm:
        model, plain = net(mesh), net(mesh)
        AllGather(codec, comm).install(model)
        for found, wanted in ((model[0], plain[0]), (model[2], plain[2])):
            for module in (found, wanted):
                module.unshard()
            span = max(p.detach().max() for p in wanted.parameters()) - min(
                p.detach().min() for p in wanted.parameters()
            )
            for p, q in zip(found.parameters(), wanted.parameters(), strict=True):
                error = (p - q).abs().max()
                assert 0 < error <= span / 15 / 2 + 1e-6


def digests(model, comm: qccl.Communicator) -> list[bytes]:
    """Each rank's gathered weights."""
    own = hashlib.sha256()
    for layer in (model[0], model[2], model[4]):
        handle = layer.unshard(async_op=True)
        handle.wait()
        for p in layer.parameters():
            own.update(p.detach().clone().numpy().tobytes())  # memory of NumPy arrays cannot be resized
        layer.reshard()
    return comm.allgather(own.digest())


@on_ranks(2, 4)
def test_identical() -> None:
    """All ranks compute with the same weights, and a rank's shard stays exact."""
    mesh = line()
    with connect(mesh) as comm:
        model = net(mesh)
        ReduceScatter("minmax4+ef", comm).install(model)
        AllGather("minmax4:rounding=stochastic", comm).install(model)
        for step in range(3):
            train(model, [step])
            before = bits(model)
            assert len(set(digests(model, comm))) == 1
            assert bits(model) == before


@on_ranks(2)
def test_chooses() -> None:
    """With "auto" each module has the faster one of none and the codec, by the profile or by measured calls."""
    mesh, kind = line(), {"collective": "reduce_scatter", "ways": ["one level"], "codec": "minmax4+ef"}
    for fast in ("none", "minmax4+ef"):
        ends = []
        for codec in ("auto:minmax4+ef", fast):
            with connect(mesh) as comm:
                comm._adopt(profile(comm, (fast, "one level"), **kind))
                model = net(mesh)
                made = ReduceScatter(codec, comm)
                made.install(model)
                train(model, range(3))
                state = made.state_dict()
                made.load_state_dict(state)
                ends.append((bits(model), sorted(state["keys"]), comm.calls))
        if fast != "none":  # that PyTorch itself reduces
            assert ends[0] == ends[1] and ends[0][1]
        assert ends[0][2] == 9
    with connect(mesh) as comm:
        model = net(mesh)
        made = ReduceScatter("auto", comm), AllGather("auto:minmax4", comm)
        for each in made:
            each.install(model)
        assert "auto:minmax8" in repr(made[0]) and "auto:minmax4" in repr(made[1])
        train(model, range(2))
        assert len(set(digests(model, comm))) == 1
        assert len(comm._chooser.profile.times) == 2
        raises("keeps no state", AllGather, "auto:minmax4+ef", comm)


@on_ranks(2)
def test_accumulates() -> None:
    """Gradients of several backward passes are reduced once, and a factor that divides them is PyTorch's."""
    mesh = line()
    with connect(mesh) as comm:
        found = []
        for codec in ("none", "minmax8:bucket=64"):
            model = net(mesh)
            model.set_gradient_divide_factor(3.0)
            model.set_force_sum_reduction_for_comms(True)
            ReduceScatter(codec, comm).install(model)
            model.set_requires_gradient_sync(False)
            loss_of(model, batch(0)).backward()
            calls = comm.calls
            model.set_requires_gradient_sync(True)
            loss_of(model, batch(1)).backward()
            assert calls == 0 and comm.calls == (0 if codec == "none" else 3)
            found.append(gradients(model))
        plain, ours = found
        assert 0 < (plain - ours).abs().max() < 0.02 * plain.abs().max()


@on_ranks(2)
def test_corrects() -> None:
    """With +ef the running mean of many results becomes exact; without, the error of a code stays in it."""
    mesh = line()
    steps, group = 60, mesh.get_group()
    with connect(mesh) as comm:
        inputs = [torch.randn(64 * comm.size, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
        wanted = sum(inputs).view(comm.size, -1)[comm.rank] / comm.size
        errors = []
        for codec in ("minmax1:bucket=64+ef", "minmax1:bucket=64"):
            reduce_scatter, total, out = ReduceScatter(codec, comm), torch.zeros(64), torch.empty(64)
            for _ in range(steps):
                reduce_scatter(out, inputs[comm.rank], group, dist.ReduceOp.AVG)
                total += out
            errors.append(float((total / steps - wanted).abs().max()))
        assert errors[0] < 0.2 < 0.5 < errors[1], errors


@on_ranks(2)
def test_refuses() -> None:
    mesh = line()
    group, out, x = mesh.get_group(), torch.zeros(3), torch.ones(3 * mesh.size())
    with connect(mesh) as comm:
        raises("no module that fully_shard() has wrapped", ReduceScatter("minmax8", comm).install, Linear(2, 2))
        raises("no module that fully_shard() has wrapped", AllGather("minmax8", comm).install, None)
        raises("keeps no state: use onebit", AllGather, "onebit+ef", comm)
        raises("comm must be a Communicator", ReduceScatter, "minmax8", group)
        raises("key must be a string", ReduceScatter, "minmax8", comm, key=3)
        sub = comm.split(comm.rank)
        other = ReduceScatter("minmax8", sub, key="a")
        raises(f"of {comm.size}, and the communicator is rank 0 of 1", other, out, x, group, dist.ReduceOp.SUM)
        with_momentum = ReduceScatter("minmax8+nesterov", comm, key="m")
        raises("without the momentum of", with_momentum, out.double(), x.double(), group, dist.ReduceOp.SUM)
        raises("without the momentum of", with_momentum, out, x, group, dist._make_nccl_premul_sum(0.5))
        reduce_scatter = ReduceScatter("minmax8+ef", comm, key="a")
        reduce_scatter(out, x, group, dist.ReduceOp.SUM)
        state = reduce_scatter.state_dict()
        wrong = (None, {}, state["keys"], state | {"keys": 3})
        for each in wrong:
            raises("state_dict() returned", reduce_scatter.load_state_dict, each)
        raises("state_dict() returns", reduce_scatter.load_state_dict, state | {"keys": {"a": 3}})
        lost = {"calls": state["calls"], "keys": {}}  # what torch.distributed.checkpoint would restore
        raises("no residual; torch.distributed.checkpoint loads only", reduce_scatter.load_state_dict, lost)
        raises(
            "has the key 'a'; this ReduceScatter has 'b'",
            ReduceScatter("minmax8+ef", comm, key="b").load_state_dict,
            state,
        )
        raises(
            "key='a' belongs to", reduce_scatter, torch.zeros(6), torch.ones(6 * comm.size), group, dist.ReduceOp.SUM
        )
        assert reduce_scatter.state_dict()["keys"]["a"]["values"]["residual"].equal(
            state["keys"]["a"]["values"]["residual"]
        )
        comm.quantized_allreduce(np.ones(100, np.float32), codec="onebit+ef", key="mine")
        reduce_scatter.load_state_dict({"calls": 0, "keys": {}})
        assert set(comm.state_dict()["keys"]) == {"mine"}
        sub.close()


@on_ranks(2)
def test_unused() -> None:
    """Parameters may have a gradient in some steps only, whether FSDP2 is told or not; one object serves one module."""
    mesh = line()
    with connect(mesh) as comm:
        for told in (True, False):
            model = fully_shard(Branch(), mesh=mesh)
            ReduceScatter("minmax4+ef", comm, key=str(told)).install(model)
            model.set_reduce_scatter_unused_params(told)
            for whole in (True, False, True):
                model(torch.ones(2, 4), whole).sum().backward()
                model.zero_grad()
        made = ReduceScatter("minmax4+ef", comm)
        for each in (model := Branch()).children():
            fully_shard(each, mesh=mesh).set_custom_reduce_scatter(made)
        loss = fully_shard(model, mesh=mesh)(torch.ones(2, 4), True).sum()
        raises("reduces the gradients of two modules", loss.backward)


@on_ranks(4)
def test_replicas() -> None:
    """HSDP: gradients are encoded inside a shard group, and PyTorch adds those of the replicas exactly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with connect(mesh["shard"]) as comm:
        plain, ours = net(mesh), net(mesh)
        ReduceScatter("none+ef", comm).install(ours)
        for model in (plain, ours):
            train(model, range(3))
        assert comm.calls == 9 and bits(plain) == bits(ours)
        ReduceScatter("minmax8:bucket=64+ef", comm, key="b").install(ours)
        train(ours, range(3))
    found = [None] * 4
    dist.all_gather_object(found, bits(ours))
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


@on_ranks(2)
def test_owners() -> None:
    """Two models on one communicator have residuals of their own, and an object belongs to one model."""
    mesh = line()
    with connect(mesh) as comm:
        models = [fully_shard(Experts(1), mesh=mesh) for _ in range(2)]
        models[1].SCALES = (0.01,)
        made, sums = [ReduceScatter("minmax2+ef", comm) for _ in models], [Sums(model) for model in models]
        for each, model in zip(made, models, strict=True):
            each.install(model)
        for _ in range(12):
            for each in sums:
                each.step()
        for each in sums:
            each.check()
        assert list(comm.state_dict()["keys"]) == ["fsdp/", "fsdp#2/"]
        states = [each.state_dict() for each in made]
        assert all(list(each["keys"]) == ["fsdp/"] for each in states)
        made[0].load_state_dict(states[1])  # a file has no number
        raises("installed already; make one for each model", made[0].install, models[1])
        raises("a ReduceScatter with key='fsdp' exists", ReduceScatter, "minmax2+ef", comm, key="fsdp")
        assert ReduceScatter("minmax2", comm, key="fsdp").key == "fsdp"  # without state nothing is mixed
        made[0].close()
        assert list(comm.state_dict()["keys"]) == ["fsdp#2/"]
        raises("this ReduceScatter is closed", sums[0].step)
        again = ReduceScatter("minmax2+ef", comm)
        assert again.key == "fsdp"
        again.load_state_dict(states[1])


@on_ranks(2, 4)
def test_sets() -> None:
    """Residuals follow their parameters where other ones have a gradient in each step, also through a file."""
    mesh = line()
    for how in ("used", "frozen", "without install", "lr"):
        with connect(mesh) as comm:
            model = fully_shard(Experts(), mesh=mesh)
            sums, made = Sums(model), ReduceScatter("minmax2:bucket=64+ef", comm)
            made.lr = 0.5 if how == "lr" else None
            model.set_custom_reduce_scatter(made) if how == "without install" else made.install(model)
            for number in range(3 * len(SETS)):
                used = SETS[number % len(SETS)]
                for i, expert in enumerate(model.experts):
                    expert.requires_grad_(how != "frozen" or i in used)
                sums.step(range(3) if how == "frozen" else used)
            sums.check()
            keys = comm.state_dict()["keys"]
            assert all("residual" in each["values"] for each in keys.values()) and len(keys) <= 3, [*keys]
    with connect(mesh) as comm, connect(mesh) as other:
        ends, state = [], {}
        for where in (comm, other):
            model = fully_shard(Experts(), mesh=mesh)
            sums, made = Sums(model), ReduceScatter("minmax2+ef", where)
            made.install(model)
            if where is other:
                made.load_state_dict(state)
                sums.steps = 9
            for number in range(sums.steps, 12):
                if number == 9:
                    state = made.state_dict()
                sums.step(SETS[number % len(SETS)])
            ends.append(made.state_dict())
        for key, entry in ends[0]["keys"].items():
            assert entry["values"]["residual"].equal(ends[1]["keys"][key]["values"]["residual"]), key


@on_ranks(2)
def test_old_files() -> None:
    """Where some parameters were frozen, a file without their names fits the same ones, and no others."""
    mesh, ends, state = line(), [], {}
    for number in range(3):
        with connect(mesh) as comm:
            model = Experts()
            model.experts[1].requires_grad_(False)
            sums, made = Sums(fully_shard(model, mesh=mesh)), ReduceScatter("minmax2+ef", comm)
            made.install(model)
            if number == 0:
                sums.step(range(3))
                state = made.state_dict()
                state["keys"] = {"fsdp/": state["keys"]["fsdp/:..experts.0.weight..experts.2.weight"]}
            else:
                made.load_state_dict(state)
            sums.steps = 1
            if number == 2:
                raises("load what state_dict() returned for them", sums.step, (0,))
                continue
            sums.step(range(3))
            ends.append(made.state_dict()["keys"])
    assert ends[0].keys() == ends[1].keys() == {"fsdp/:..experts.0.weight..experts.2.weight"}
    first, second = (next(iter(each.values()))["values"]["residual"] for each in ends)
    assert first.equal(second) and first.any()


@on_ranks(4)
def test_smaller_groups() -> None:
    """Weights that are gathered again in smaller groups are those that were decoded before."""
    mesh = line()
    with connect(mesh) as comm:
        found = []
        for reshard in (True, 2):
            model = net(mesh, reshard_after_forward=reshard)
            AllGather("minmax4", comm).install(model)
            train(model, range(3))
            found.append(bits(model))
        assert found[0] == found[1]
