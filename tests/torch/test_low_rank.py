"""compress(low_rank=...): PowerSGD whose factors travel by a codec."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.distributed as dist
from ddp_models import (
    GROUPS,
    Branches,
    assert_same_everywhere,
    batches,
    gradients,
    loss_of,
    net,
    on_all,
    step,
    train,
    wrapped,
)
from on_ranks import on_ranks
from rank_calls import error_of
from torch.nn.parallel import DistributedDataParallel

import qccl
import qccl.torch
from qccl.collectives import allreduce

CODECS = ("none", "minmax8", "minmax4+ef", "minmax4:rounding=stochastic+ef", "topk:k=0.3+ef")


def by_factors(handle):
    return {name for group in handle._groups if group.rank for name in group.names}


class Given(torch.nn.Module):
    """Matrices of odd shapes, whose gradients are given."""

    SHAPES = ((33, 70), (129, 31), (8, 5, 4, 4), (64, 2), (17,))

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in self.SHAPES)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def random_gradients(seed):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [torch.randn(shape, generator=generator) for shape in Given.SHAPES]


def reduced(model, given):
    """The gradients that compress() leaves for these gradients of this rank."""
    model.zero_grad()
    model(given).backward()
    return [p.grad for p in model.parameters()]


def mean(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@on_ranks(2, 4)
def test_loses_nothing() -> None:
    for number, codec in enumerate(CODECS):
        check_loses_nothing(codec, has_rates=number % 2 == 1)


@on_ranks(2)
def test_loses_nothing_in_two_rounds(monkeypatch) -> None:
    """Then one rank alone knows what a part of the sum lost."""
    monkeypatch.setattr(allreduce, "_TWO_RANKS_NBYTES", 0)
    for has_rates in (False, True):
        check_loses_nothing("minmax4+ef", has_rates=has_rates)


def check_loses_nothing(codec: str, *, has_rates: bool) -> None:
    """The sum of all results and the mean of the residuals are the sum of all gradients, whatever the codec loses.

    All ranks have the same bits, with unequal numbers of threads. (Four ranks would wait long for two processors.)
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + dist.get_rank() % 2 if dist.get_world_size() == 2 else 1)
    model = DistributedDataParallel(Given(), bucket_cap_mb=0.01)
    with qccl.torch.compress(model, codec, low_rank=2, min_elements=100, group_bytes=10_000) as handle:
        assert by_factors(handle) == {"weights.0", "weights.1", "weights.2"}
        owed = [torch.zeros(shape, dtype=torch.float64) for shape in Given.SHAPES]
        for i in range(4):
            lr = handle.lr = (0.0, 0.5, 0.0, 0.2)[i] if has_rates else None
            given = random_gradients(i)
            found = reduced(model, given)
            assert len(set(on_all(b"".join(g.numpy().tobytes() for g in found)))) == 1
            for total, own, result in zip(owed, given, found, strict=True):
                total += (mean(own) - result) * (1 if lr is None else lr)
        kept = handle.state_dict()["residuals"]
        for i in range(3):
            lacking, found = owed[i], mean(kept[f"weights.{i}"])
            assert (found - lacking).abs().max() <= 3e-5 * lacking.abs().max() > 0, (codec, i)
    torch.set_num_threads(threads)


@on_ranks(2)
def test_projects() -> None:
    """The first result is the mean's projection on r directions; a mean of lower rank is exact."""
    model = DistributedDataParallel(Given())
    with qccl.torch.compress(model, "none", low_rank=3, min_elements=100):
        given = random_gradients(7)
        for own, result in list(zip(given, reduced(model, given), strict=True))[:2]:
            u, s, _ = torch.linalg.svd(result.double())
            assert s[3] <= 1e-5 * s[0] < s[2] * 100
            exact = mean(own)
            assert (u[:, :3] @ u[:, :3].T @ exact - result).abs().max() <= 1e-5 * exact.abs().max()
    model = DistributedDataParallel(Given())
    with qccl.torch.compress(model, "none", low_rank=3, min_elements=100):
        vectors = [torch.outer(torch.arange(1.0, 34), torch.arange(1.0, 71)), torch.zeros(129, 31)]
        exact = [*vectors, *random_gradients(0)[2:]]
        found = reduced(model, exact)
        assert (found[0] - exact[0]).abs().max() <= 1e-5 * exact[0].abs().max()
        assert not found[1].any()
        found = reduced(model, exact)  # after directions without any gradient
        assert (found[0] - exact[0]).abs().max() <= 1e-5 * exact[0].abs().max()


@on_ranks(2)
def test_gradients_that_are_not_finite() -> None:
    """A NaN or an infinity of one rank is not finite on any rank, and no state of the group changes."""
    for codec, bad in itertools.product(("none", "minmax8+ef", "topk:k=0.3+ef"), (torch.nan, torch.inf, -torch.inf)):
        model = DistributedDataParallel(Given())
        with qccl.torch.compress(model, codec, low_rank=2, min_elements=100) as handle:
            reduced(model, random_gradients(0))
            before = handle.state_dict()
            given = random_gradients(1)
            if dist.get_rank() == 1:
                given[0][5, 6] = bad
            found = reduced(model, given)
            assert not found[0].isfinite().any() and found[1].isfinite().all(), (codec, bad)
            after = handle.state_dict()
            for kind in ("residuals", "factors"):
                for i in range(3):
                    assert torch.equal(before[kind][f"weights.{i}"], after[kind][f"weights.{i}"]), (codec, bad, kind)
            assert all(g.isfinite().all() for g in reduced(model, random_gradients(2)))


@on_ranks(2)
def test_trains() -> None:
    """The loss falls to less than half, like exact gradients; also unused parameters, join(), bfloat16, no_sync()."""
    x, model = batches(1, seed=9)[0], wrapped()
    before = loss_of(model, x).item()
    for codec, rank in (("none", 0), ("minmax8+ef", 2)):
        model = train(wrapped(), 60, codec=codec, low_rank=rank)
        assert_same_everywhere(model)
        assert loss_of(model, x).item() < 0.5 * before, (codec, rank)
    assert_same_everywhere(train(wrapped(net(Branches), find_unused_parameters=True), 5, low_rank=2))
    model = wrapped()
    with qccl.torch.compress(model, low_rank=2, **GROUPS), model.join():  # a rank without batches sends its residuals
        for each in batches(2 + dist.get_rank()):
            step(model, torch.optim.SGD(model.parameters(), 0.02), each)
    model = wrapped(net().bfloat16())
    with qccl.torch.compress(model, "minmax8+ef:dtype=bfloat16", low_rank=2, **GROUPS) as handle:
        for x in batches(2):
            with model.no_sync():
                loss_of(model, x.bfloat16()).backward()
            loss_of(model, x.bfloat16()).backward()
        kept = handle.state_dict()["residuals"]["inner.0.weight"]
        assert handle.step == 2 and kept.any() and torch.equal(kept, kept.bfloat16().float())
        assert len(set(on_all(gradients(model)["inner.0.weight"].view(torch.uint8).numpy().tobytes()))) == 1


@on_ranks(2)
def test_any_default_type_and_device() -> None:
    """Programs change the types and devices in which PyTorch makes tensors by default."""
    for options in ({"codec": "minmax8", "low_rank": 2}, {"codec": "minmax4+ef"}):
        ends = []
        for dtype, device in ((torch.float32, None), (torch.bfloat16, None), (torch.float64, None), (None, "meta")):
            model, xs = wrapped(), batches(3)
            torch.set_default_dtype(dtype or torch.float32)
            torch.set_default_device(device)
            try:
                with qccl.torch.compress(model, **GROUPS | options) as handle:
                    for i, x in enumerate(xs):
                        loss_of(model, x).backward()
                        if i == 1:
                            handle.load_state_dict(handle.state_dict())
                            handle.load_state_dict(handle.full_state_dict(), strict=False)
                    residuals = {n: r.numpy().tobytes() for n, r in handle.state_dict()["residuals"].items()}
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            ends.append(({n: g.numpy().tobytes() for n, g in gradients(model).items()}, residuals))
        assert all(end == ends[0] for end in ends), options


@on_ranks(4)
def test_loads_at_another_size() -> None:
    """What four ranks have not delivered is what two ranks, and one, owe; one rank delivers it at once."""
    groups = {2: dist.new_group([0, 1]), 1: dist.new_group([0])}
    options = {"codec": "minmax4+ef", "low_rank": 2, "min_elements": 100}
    model = DistributedDataParallel(Given())
    with qccl.torch.compress(model, **options) as handle:
        for i in range(3):
            reduced(model, random_gradients(i))
        states, full = on_all(handle.state_dict()), handle.full_state_dict()
    for (size, group), saved in itertools.product(groups.items(), (states, full)):
        if dist.get_rank() >= size:
            continue
        model = DistributedDataParallel(Given(), process_group=group)
        with qccl.torch.compress(model, **options) as handle:
            handle.load_state_dict(saved)
            mine = handle.state_dict()
            for i in range(3):
                name = f"weights.{i}"
                owed = torch.stack([state["residuals"][name].double() for state in states]).mean(0)
                assert (mine["residuals"][name] - owed).abs().max() <= 1e-6 * owed.abs().max() > 0, (size, name)
                assert (mine["factors"][name] - states[0]["factors"][name]).abs().max() <= 1e-6
            given = random_gradients(4)
            found = reduced(model, given)
            if size == 1:
                for i in range(3):
                    assert torch.allclose(found[i], given[i] + mine["residuals"][f"weights.{i}"], atol=1e-6)
                    assert not handle.state_dict()["residuals"][f"weights.{i}"].any()


@on_ranks(2)
def test_refuses() -> None:
    compress, model = qccl.torch.compress, wrapped()
    refused = partial(error_of, kind=qccl.ArgumentError)
    assert "low_rank must be" in refused(lambda: compress(model, low_rank=-1))
    assert "low_rank and +nesterov exclude" in refused(lambda: compress(model, "minmax8+ef+nesterov", low_rank=2))
    text = error_of(lambda: compress(model, low_rank=1 + dist.get_rank(), **GROUPS), qccl.MismatchError)
    assert "rank 0 has low_rank:1:" in text and "has low_rank:2:" in text
    model = wrapped()
    with compress(model, low_rank=2, **GROUPS) as handle:
        fresh = handle.state_dict()
        assert fresh["factors"].keys() == by_factors(handle) and not fresh["factors"]["inner.0.weight"].any()
        loss_of(model, batches(1)[0]).backward()
        state = handle.state_dict()
        assert "has no factors" in refused(lambda: handle.load_state_dict(state | {"factors": {}}))
        with compress(wrapped(), low_rank=3, **GROUPS) as other:
            text = refused(lambda: other.load_state_dict(state))
        assert "low_rank:2:" in text and "here it is low_rank:3:" in text
        handle.lr = -0.1
        assert "lr must be the present" in error_of(
            lambda: loss_of(model, batches(1)[0]).backward(), qccl.ArgumentError
        )
    model = wrapped()
    with compress(model, low_rank=2, **GROUPS) as handle:
        loss_of(model, batches(1)[0]).backward()
        handle.lr = torch.tensor(0.1)
        assert "give lr in all calls or in none" in error_of(lambda: loss_of(model, batches(1)[0]).backward())
