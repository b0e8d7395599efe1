"""The state of qccl.torch.compress(): from step to step, saved and restored."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_models import GROUPS, Mixed, backward, batches, bits, gradients, net, on_all, step, wrapped
from on_ranks import on_ranks
from rank_calls import error_of
from torch.nn import ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel

import qccl
import qccl.torch
from qccl.torch.state import schedule_of


@on_ranks(2)
def test_leaves_nothing_behind() -> None:
    """A handle on the communicator of a closed one begins without its residuals, unless they are loaded."""
    with qccl.Communicator.from_torch() as comm:
        for is_loaded in (False, False, True):
            if is_loaded:
                comm.load_state_dict(comm.state_dict())
            model = wrapped()
            handle = qccl.torch.compress(model, "minmax2+ef", min_elements=0, comm=comm)
            assert any(each.any() for each in handle.state_dict()["residuals"].values()) == is_loaded
            backward(batches(1)[0], model)
            assert any(each.any() for each in handle.state_dict()["residuals"].values())
            handle.close()


@on_ranks(1)
def test_of_one_rank_loads_as_a_list() -> None:
    model = wrapped()
    handle = qccl.torch.compress(model, "minmax2+ef", min_elements=0)
    backward(batches(1)[0], model)
    saved = handle.state_dict()
    handle.load_state_dict([saved])
    assert handle.step == 1 and handle.state_dict()["groups"] == saved["groups"]


@on_ranks(2)
def test_loads_in_place(tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes into what a fresh handle has: zeros of the right shapes."""
    import torch.distributed.checkpoint as dcp

    folder, spec, rank = tmp_path / "dcp", "minmax2+ef", dist.get_rank()
    ends = []
    for is_resumed in (False, True):
        model = wrapped()
        handle = qccl.torch.compress(model, spec, **GROUPS)
        fresh = handle.state_dict()
        assert fresh["residuals"].keys() == {n for n, p in model.module.named_parameters() if p.dim() > 1}
        assert not any(t.any() for t in fresh["residuals"].values())
        for i, x in enumerate(batches(5)):
            if i == 3:
                whole = handle.state_dict()
                saved = {"model": model.module.state_dict(), f"rank {rank}": handle, "all": handle.full}
                if not is_resumed:
                    dcp.save(saved, checkpoint_id=folder)
                    full = handle.full_state_dict()
                    continue_with = [p.detach().clone() for p in model.parameters()]
                else:
                    handle.close()
                    model = wrapped()
                    handle = qccl.torch.compress(model, spec, **GROUPS)
                    saved = {"model": model.module.state_dict(), f"rank {rank}": handle}
                    dcp.load(saved, checkpoint_id=folder)
                    model.module.load_state_dict(saved["model"])
                    assert all(map(torch.equal, continue_with, model.parameters())) and handle.step == 3
                    assert any(t.any() for t in handle.state_dict()["residuals"].values())
            step(model, torch.optim.SGD(model.parameters(), 0.02), x)
        ends.append((bits(model), {n: t.numpy().tobytes() for n, t in handle.state_dict()["residuals"].items()}))
        if is_resumed:
            dcp.load({"all": handle.full}, checkpoint_id=folder)
            again = handle.full_state_dict()
            assert again["step"] == 3 and again["calls"] == full["calls"]
            for name, owed in full["residuals"].items():  # the same total, after two roundings to fp32
                assert (again["residuals"][name] - owed).abs().max() <= 2.0**-23 * owed.abs().max() > 0, name
        refuses_lost_residuals(handle, whole)
        handle.close()
    assert ends[0] == ends[1]


def refuses_lost_residuals(handle, state) -> None:
    refused = partial(error_of, kind=qccl.ArgumentError)
    name = next(iter(state["residuals"]))
    some = {n: t for n, t in state["residuals"].items() if n != name}
    before = handle.state_dict()
    for lost, text in (({}, "of step 3, has no residuals of"), (some, f"has no residuals of {name}; load the whole")):
        assert text in refused(lambda: handle.load_state_dict(state | {"residuals": lost}))  # noqa: B023
    extra = {"residuals": state["residuals"] | {"else": torch.zeros(1)}}
    assert "has residuals of else" in refused(lambda: handle.load_state_dict(state | extra))
    after = handle.state_dict()
    assert before["step"] == after["step"]
    assert all(torch.equal(before["residuals"][n], t) for n, t in after["residuals"].items())
    handle.load_state_dict(state | {"step": 0, "residuals": {}})  # nothing is owed before the first step
    assert not any(t.any() for t in handle.state_dict()["residuals"].values())


@on_ranks(2)
def test_keeps_the_order_of_memory() -> None:
    """A residual has its parameter's shape, also where memory has another order of axes."""
    model = Sequential(torch.nn.Conv2d(3, 8, 3), ReLU(), torch.nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    model = wrapped(model)
    with qccl.torch.compress(model, "minmax1:bucket=64+ef", group_bytes=1 << 20, min_elements=0) as handle:
        model(torch.randn(2, 3, 8, 8) + dist.get_rank()).square().mean().backward()
        state = handle.state_dict()
        for name, p in model.module.named_parameters():
            if p.dim() == 4:
                kept = state["residuals"][name]
                assert kept.shape == p.shape and kept.stride() == p.stride()
        before = {name: t.clone() for name, t in state["residuals"].items()}
        contiguous = {name: t.contiguous() for name, t in state["residuals"].items()}
        handle.load_state_dict(state | {"residuals": contiguous})
        assert all(torch.equal(before[name], t) for name, t in handle.state_dict()["residuals"].items())


class Weighs(torch.nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return (self.weight * x).sum()


@on_ranks(2)
def test_keeps_the_order_of_buckets() -> None:
    """DDP's buckets have parameters that are not dense in memory row-major: so factors and residuals have them."""
    images = torch.zeros(64, 16, 5, 3).to(memory_format=torch.channels_last)
    for weight in (
        torch.zeros(60, 256).t()[:200],
        images[:, :12],
        torch.zeros(60, 200).t(),
        torch.zeros(80, 90)[:, 9:],
    ):
        generator = torch.Generator().manual_seed(0)
        rows, columns = len(weight), weight[0].numel()
        column, row = torch.randn(rows, 1, generator=generator), torch.randn(1, columns, generator=generator)
        given = (column @ row).view(weight.shape)
        for codec, rank in (("none", 1), ("topk:k=0.05+ef", 0)):
            model = DistributedDataParallel(Weighs(weight))
            with qccl.torch.compress(model, codec, low_rank=rank, min_elements=100) as handle:
                model(given).backward()
                lacking = given - model.module.weight.grad
                full = handle.full_state_dict()
                residual = full["residuals"]["weight"]
                assert torch.allclose(residual, lacking, atol=1e-5), (weight.stride(), codec)
                assert (lacking.abs().max() < 1e-5) == (codec == "none"), weight.stride()
                handle.load_state_dict(full)
                assert torch.equal(handle.full_state_dict()["residuals"]["weight"], residual)


@on_ranks(2)
def test_is_copied() -> None:
    """A copy of a model, or what torch.load() makes of it, has no codec: a warning says so, and compress() takes it."""

    def pickled(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    model = wrapped()
    with qccl.torch.compress(model, "minmax2+ef", **GROUPS) as handle:
        for copied in (copy.deepcopy, pickled):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                other = copied(model)
            texts = [str(each.message) for each in found]
            assert len([text for text in texts if "call compress() on it" in text]) == 1, texts
            before, x = handle.step, batches(1)[0]
            with qccl.torch.compress(other, "minmax2+ef", **GROUPS) as another:
                backward(x, other)
                assert (another.step, handle.step) == (1, before)
            model.zero_grad()
            handle.load_state_dict(handle.state_dict() | {"step": 0, "residuals": {}})
            backward(x, model)
            for name, gradient in gradients(model).items():
                assert torch.equal(gradient, gradients(other)[name]), name


@on_ranks(2)
def test_unfreezes() -> None:
    """Parameters that stay keep what they owe when others are unfrozen, wrapped and compressed; others begin anew."""
    module, options = net(), {"codec": "topk:k=0.05+ef", **GROUPS}
    module.inner[1].requires_grad_(False)
    model = wrapped(module)
    handle = qccl.torch.compress(model, **options)
    for x in batches(3):
        backward(x, model)
    full, own = handle.full_state_dict(), handle.state_dict()
    module.inner[1].requires_grad_(True)
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            backward(batches(1)[0], model)
        texts = [str(each.message) for each in found]
        assert len(texts) == expected, texts
        assert not texts or texts[0].startswith("inner.1.weight, inner.1.bias needed no gradients when"), texts
    handle.close()
    with qccl.torch.compress(wrapped(module), **options) as handle:
        refused = partial(error_of, kind=qccl.ArgumentError)
        text = refused(lambda: handle.load_state_dict(full))
        assert "it lacks inner.1.bias, inner.1.weight; pass" in text and "load_state_dict(state, strict=False)" in text
        assert "strict=False takes a full_state_dict()" in refused(lambda: handle.load_state_dict(own, strict=False))
        assert "not a state" in refused(lambda: handle.load_state_dict(full | {"groups": 3}, strict=False))
        missing, unexpected = handle.load_state_dict(full, strict=False)
        assert (missing, unexpected, handle.step) == (["inner.1.weight"], [], 3)
        again = handle.full_state_dict()
        for name, owed in again["residuals"].items():
            wanted = full["residuals"].get(name, torch.zeros(()))
            assert owed.any() == (name in full["residuals"])
            assert (owed - wanted).abs().max() <= 2.0**-22 * wanted.abs().max(), name
        assert handle.load_state_dict(again, strict=False) == handle.load_state_dict(handle.state_dict()) == ([], [])
    module.inner[1].requires_grad_(False)
    module.inner[2] = torch.nn.Linear(64, 64)
    with qccl.torch.compress(wrapped(module), **options | {"codecs": {"first.*": "onebit+ef"}}) as handle:
        assert "it also has inner.1.bias" in refused(lambda: handle.load_state_dict(again))
        missing, unexpected = handle.load_state_dict(again, strict=False)
        assert set(missing) == {"first.weight", "first.bias"} and set(unexpected) == {"first.weight", "inner.1.weight"}


@on_ranks(4)
def test_loads_at_another_size() -> None:
    """What four ranks have not delivered, two ranks deliver, whatever the algorithm; momenta become their mean."""
    pair = dist.new_group([0, 1])
    spec = "minmax4:bucket=64+ef"
    options = {"codec": spec, "codecs": {"inner.0.*": f"{spec}+nesterov:mu=0.5"}, "min_elements": 100}
    for kind, algorithm in ((Mixed, "one_shot"), (partial(Mixed, 512), "two_round")):
        plain, model = wrapped(net(kind)), wrapped(net(kind))
        lacking = {name: torch.zeros_like(p, requires_grad=False) for name, p in net(kind).named_parameters()}
        with qccl.torch.compress(model, **options) as handle:
            for x in batches(3):
                backward(x, plain, model)
                for name, exact in gradients(plain).items():
                    lacking[name] += exact - gradients(model)[name]
            states, full = on_all(handle.state_dict()), handle.full_state_dict()
            algorithms = {(size, schedule_of(handle._groups[0], 0, (0,) * size).name) for size in (2, 4)}
        assert algorithms == {(2, algorithm), (4, algorithm)}
        if dist.get_rank() >= 2:
            continue
        for saved in (states, full):
            model = wrapped(net(kind), process_group=pair)
            with qccl.torch.compress(model, **options) as handle:
                deliver(handle, model, states, saved, lacking)


def deliver(handle, model, states, saved, lacking):
    """Load the states of four ranks on two, and add up the results of steps whose gradients are zeros."""
    refused = partial(error_of, kind=qccl.ArgumentError)
    assert "rank 0 of 4" in refused(lambda: handle.load_state_dict(states[0]))
    assert "ranks 0 of 4, 1 of 4" in refused(lambda: handle.load_state_dict(states[:2]))
    assert "'step'" in refused(lambda: handle.load_state_dict([states[0] | {"step": 2}, *states[1:]]))
    handle.load_state_dict(saved)
    mine = handle.state_dict()
    assert (mine["rank"], mine["size"], mine["step"]) == (dist.get_rank(), 2, 3)
    assert mine["calls"] == states[0]["calls"]
    assert set(mine["momenta"]) == {"inner.0.weight", "inner.0.bias"}
    for name, momentum in mine["momenta"].items():
        mean = torch.stack([state["momenta"][name].double() for state in states]).mean(0)
        assert torch.allclose(momentum.double(), mean, rtol=1e-6, atol=1e-9)
    found = {name: torch.zeros_like(values) for name, values in lacking.items()}
    for x in batches(20):
        model.zero_grad()
        (0 * model(x)).sum().backward()
        for name, gradient in gradients(model).items():
            found[name] += gradient
    for name in mine["residuals"].keys() - mine["momenta"].keys():
        largest = lacking[name].abs().max()
        assert largest > 0 and (found[name] - lacking[name]).abs().max() <= 1e-3 * largest, name


@on_ranks(2)
def test_begins_and_ends_at_a_rate_of_zero() -> None:
    """As warm-ups and cosines do: such a step changes no weights, so what earlier steps owe stays owed."""
    plain, ours = wrapped(), wrapped()
    with qccl.torch.compress(ours, "minmax2+ef", **GROUPS) as handle:
        owed = {name: torch.zeros_like(p) for name, p in net().named_parameters()}
        for lr, x in zip((0.0, 0.1, 0.2, 0.0, 0.3, 0.0), batches(6), strict=True):
            handle.lr = lr
            before = handle.state_dict()["residuals"]
            backward(x, plain, ours)
            for name, exact in gradients(plain).items():
                owed[name] += lr * (exact - gradients(ours)[name])
            after = handle.full_state_dict()["residuals"]
            for name, residual in handle.state_dict()["residuals"].items():
                assert torch.equal(residual, before[name]) == (lr == 0), (name, lr)
                assert torch.allclose(after[name], owed[name], atol=1e-6), (name, lr)
