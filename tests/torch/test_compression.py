"""Gradients with qccl.torch.compress(), compared with those of plain DDP."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_models import (
    GROUPS,
    Branches,
    assert_close,
    assert_same_everywhere,
    backward,
    batches,
    bits,
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
from torch.nn import Linear, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qccl
import qccl.torch
from qccl import codecs

pytestmark = pytest.mark.starts_first


@on_ranks(2, 4)
def test_none_equals_plain() -> None:
    """On two ranks to the bit; otherwise up to the order of the sum: n - 1 additions and the scaling in fp32."""
    kinds = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True})
    size = dist.get_world_size()
    for options in kinds:
        plain, ours = wrapped(**options), wrapped(**options)
        with qccl.torch.compress(ours, "none", **GROUPS):
            for x in batches(4):
                backward(x, plain, ours)
                found = gradients(ours)
                for name, expected in gradients(plain).items():
                    if size == 2:
                        assert torch.equal(expected, found[name]), (options, name)
                    largest = expected.abs().max()
                    dist.all_reduce(largest, dist.ReduceOp.MAX)
                    bound = 2 * size * 2.0**-24 * size * float(largest)
                    assert (expected - found[name]).abs().max() <= bound, (options, name)


@on_ranks(2, 4)
def test_within_the_bound() -> None:
    """The errors of both encodings: of each rank's values, and of the mean."""
    for spec in ("minmax8", "minmax4:bucket=64", "cast:dtype=bfloat16"):
        codec = codecs.get(spec)
        plain, ours, alone = wrapped(), wrapped(), net()
        with qccl.torch.compress(ours, spec, **GROUPS) as handle:
            compressed = {n for g in handle._groups if g.codec == codec for n in g.names}
            assert compressed == {n for n, p in alone.named_parameters() if p.dim() > 1}
            for x in batches(3):
                backward(x, plain, ours, alone)
                found = gradients(ours)
                for name, p in alone.named_parameters():
                    mean = gradients(plain)[name].numpy().ravel()
                    error = np.abs(found[name].numpy().ravel() - mean)
                    bound = 1e-6 * np.abs(mean).max()
                    each = on_all(p.grad.numpy().ravel())
                    if name in compressed:
                        first = np.mean([codec.error_bound(values) for values in each], axis=0)
                        second = np.maximum(codec.error_bound(np.abs(mean) + 4 * first.max()), codec.error_bound(mean))
                        bound += 1.05 * (first + second.max())
                    assert (error <= bound).all(), (spec, name)


@on_ranks(4)
def test_replicas() -> None:
    """The same bits on all ranks, after 100 steps."""
    for codec in ("onebit:reconstruct=scale+ef", "minmax4:rounding=stochastic"):
        model = train(wrapped(), 100, codec=codec)
        assert_same_everywhere(model)
        assert bits(model) != bits(train(wrapped(), 100, codec="none"))


def has_same_bits(plain, ours):
    found = gradients(ours)
    return all(torch.equal(expected, found[name]) for name, expected in gradients(plain).items())


@on_ranks(2)
def test_warms_up() -> None:
    """The first steps are exact; the counter is a part of the state."""
    exact, ours = wrapped(), wrapped()
    with qccl.torch.compress(exact, "none", **GROUPS), qccl.torch.compress(ours, warmup_steps=2, **GROUPS) as handle:
        for i, x in enumerate(batches(3)):
            backward(x, exact, ours)
            assert has_same_bits(exact, ours) == (i < 2)
        handle.load_state_dict(handle.state_dict() | {"step": 1})
        backward(x, ours)
        assert has_same_bits(exact, ours)


@on_ranks(2)
def test_accumulates() -> None:
    """no_sync() adds this rank's gradients; the next backward() reduces the sum."""
    plain, ours = wrapped(), wrapped()
    with qccl.torch.compress(ours, "none", **GROUPS) as handle:
        for x, y in zip(batches(3), batches(3, seed=1), strict=True):
            for model in (plain, ours):
                model.zero_grad()
                with model.no_sync():
                    loss_of(model, x).backward()
                loss_of(model, y).backward()
            assert_close(plain, ours)
        assert handle.step == 3
        for _ in range(2):  # two backward passes in one step
            loss_of(ours, x).backward()
        assert handle.step == 5


def unused(model):
    """The parameters without a gradient."""
    return {name for name, gradient in gradients(model).items() if gradient is None}


@on_ranks(2)
def test_leaves_parameters_unused() -> None:
    plain, ours = (wrapped(net(Branches), find_unused_parameters=True) for _ in range(2))
    with qccl.torch.compress(ours, "none", **GROUPS):
        for x in batches(3):
            backward(x, plain, ours)
            assert_close(plain, ours)
            assert unused(ours) == {"branches.2.weight", "branches.2.bias"}
    assert_same_everywhere(train(wrapped(net(Branches), find_unused_parameters=True), 5, codec="minmax4+ef"))


@on_ranks(2)
def test_freezes() -> None:
    """Parameters that are frozen or replaced after the wrap are refused; those frozen later are reduced as zeros."""
    for change in (
        lambda model: model.first.requires_grad_(False),
        lambda model: setattr(model, "last", Linear(64, 5)),
        lambda model: model.inner.append(Linear(4, 4)),
    ):
        model = wrapped(find_unused_parameters=True)
        change(model.module)
        text = error_of(lambda: qccl.torch.compress(model, **GROUPS), qccl.ArgumentError)  # noqa: B023
        assert "have changed since it was wrapped in DDP: DDP reduces 14 of" in text, text
    frozen = net()
    frozen.first.requires_grad_(False)
    assert_same_everywhere(train(wrapped(frozen), 3, codec="minmax4+ef"))
    plain, ours = (wrapped(find_unused_parameters=True) for _ in range(2))
    with qccl.torch.compress(ours, "none", **GROUPS):
        for i, x in enumerate(batches(4)):
            for model in (plain, ours):
                model.module.inner[1].requires_grad_(i != 2)
                backward(x, model)
            assert_close(plain, ours)
            assert unused(ours) == ({"inner.1.weight", "inner.1.bias"} if i == 2 else set())


class Precise(torch.nn.Module):
    """Parameters of element types that codecs do not take."""

    def __init__(self):
        super().__init__()
        self.precise = Linear(16, 40, dtype=torch.float64)
        self.complex = torch.nn.Parameter(torch.randn(40, 40, dtype=torch.complex64))
        self.last = Linear(40, 4)

    def forward(self, x):
        x = self.precise(x.double()).to(torch.complex64) @ self.complex
        return self.last(x.real)


@on_ranks(2)
def test_other_element_types() -> None:
    assert_same_everywhere(train(wrapped(net().bfloat16().float()), 3, codec="minmax4+ef"))
    plain, ours = (wrapped(net().bfloat16()) for _ in range(2))
    with qccl.torch.compress(ours, **GROUPS) as handle:
        assert {group.dtype for group in handle._groups} == {"bfloat16"}
        for x in batches(3):
            backward(x.bfloat16(), plain, ours)
            for a, b in zip(gradients(plain).values(), gradients(ours).values(), strict=True):
                assert (a - b).abs().max() <= 0.02 * a.abs().max() + 1e-6
    ours = wrapped()
    with qccl.torch.compress(ours, **GROUPS), torch.autocast("cpu", torch.bfloat16):
        loss_of(ours, batches(1)[0]).backward()
        assert gradients(ours)["last.weight"].dtype == torch.float32
    plain, ours = (wrapped(net(Precise)) for _ in range(2))
    with qccl.torch.compress(ours, **GROUPS) as handle:
        exact = {name for group in handle._groups if group.codec is None for name in group.names}
        assert exact == {"precise.weight", "precise.bias", "complex"}
        for x in batches(2):
            backward(x, plain, ours)
            assert_close(plain, ours, exact)


@on_ranks(2)
def test_traces() -> None:
    """Calls run while the backward pass still computes, and all end before it returns."""
    model = DistributedDataParallel(Sequential(*[Linear(512, 512) for _ in range(12)]), bucket_cap_mb=1)
    events: list[qccl.base.trace.TraceEvent] = []
    with qccl.torch.compress(model, group_bytes=1 << 20, trace=events) as handle:
        inside, original = [], handle._reduce

        def reduce(bucket):
            entered = time.perf_counter()
            future = original(bucket)
            inside.append((entered, time.perf_counter()))
            return future

        handle._reduce = reduce
        x = torch.randn(64, 512)
        for number in range(40):  # beside other programs, the thread that ends calls may run too late in a step
            events.clear()
            inside.clear()
            begin = time.perf_counter()
            model(x).square().mean().backward()
            end = time.perf_counter()
            if number < 2:
                continue  # with DDP's first buckets
            assert len(inside) > 4 and len({event.args["call"] for event in events}) > 4
            assert all(begin <= event.start <= event.stop <= end for event in events)
            ends = [event.stop for event in events if event.stop < inside[-1][0]]
            in_no_hook = [stop for stop in ends if all(not enter <= stop <= leave for enter, leave in inside)]
            if all(on_all(bool(in_no_hook))):
                return
        raise AssertionError("no call ended while the backward pass computed, outside of the hooks")


class Recomputes(torch.nn.Module):
    """Two blocks whose activations are computed again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Sequential(Linear(16, 64), torch.nn.ReLU(), Linear(64, 16)) for _ in range(2))
        self.last, self.use_reentrant = Linear(16, 4), use_reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()  # reentrant checkpointing needs an input with a gradient
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


@on_ranks(2)
def test_checkpoints_activations() -> None:
    """Also the reentrant kind, with which DDP needs a static graph."""
    for use_reentrant in (False, True):
        models = [wrapped(net(lambda: Recomputes(use_reentrant)), static_graph=use_reentrant) for _ in range(2)]  # noqa: B023
        with qccl.torch.compress(models[1], "none", **GROUPS) as handle:
            for x in batches(3):
                backward(x, *models)
                assert_close(*models)
            assert handle.step == 3


@on_ranks(2)
def test_compiles() -> None:
    """torch.compile() of the DDP model, before compress() or after it, and of the module inside."""
    for is_first in (False, True):
        plain, ours = (DistributedDataParallel(net()) for _ in range(2))  # PyTorch refuses buckets below 1 MiB
        compiled = torch.compile(ours, backend="aot_eager")
        with qccl.torch.compress(compiled if is_first else ours, "none", **GROUPS) as handle:
            for x in batches(3):
                backward(x, plain)
                compiled.zero_grad()
                loss_of(compiled, x).backward()
                assert_close(plain, ours)
            assert handle.step == 3
            text = error_of(lambda: qccl.torch.compress(compiled, **GROUPS), qccl.ArgumentError)  # noqa: B023
            assert "already has a communication hook (reduce_bucket)" in text, text
    inner = DistributedDataParallel(torch.compile(net(), backend="aot_eager"))
    with qccl.torch.compress(inner, "minmax4+ef", **GROUPS) as handle:
        loss_of(inner, batches(1)[0]).backward()
        assert "_orig_mod.first.weight" in handle.state_dict()["residuals"]


@on_ranks(2)
def test_compiles_whole_steps() -> None:
    """The forward and the backward pass and the optimiser, compiled together; also with factors."""
    for codec, rank in (("minmax4+ef", 0), ("minmax8", 2)):
        ends = []
        for is_compiled in (False, True):
            model = DistributedDataParallel(net())
            optimizer = torch.optim.SGD(model.parameters(), 0.02)
            run = torch.compile(step, backend="eager") if is_compiled else step
            with qccl.torch.compress(model, codec, low_rank=rank, **GROUPS) as handle:
                for x in batches(4):
                    run(model, optimizer, x)
                assert handle.step == 4
            ends.append(bits(model))
        assert ends[0] == ends[1], codec
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        model = DistributedDataParallel(net())
    finally:
        torch._dynamo.config.optimize_ddp = True
    assert "optimize_ddp" in error_of(lambda: qccl.torch.compress(model), qccl.ArgumentError)
