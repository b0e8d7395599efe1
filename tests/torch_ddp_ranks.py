"""What the ranks of tests/test_torch_ddp.py do: ``torch_ddp_ranks.py FUNCTION...``."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel

import qccl
import qccl.torch
from qccl import codecs
from qccl.torch.state import _schedule

#: DDP makes many buckets, and qccl several groups
SMALL = {"bucket_cap_mb": 0.01}
GROUPS = {"group_bytes": 40_000, "min_elements": 100}


def net(kind=None):
    """A model with the same parameters on all ranks; the order of use differs from that of the parameters."""
    torch.manual_seed(0)
    return (kind or Mixed)()


class Mixed(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.last = Linear(width, 4)
        self.first = Linear(16, width)
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.ModuleList(Linear(width, width) for _ in range(4))

    def forward(self, x):
        x = self.norm(self.first(x).relu())
        for layer in reversed(self.inner):
            x = x + layer(x).relu()
        return self.last(x)


def wrapped(model=None, **options):
    return DistributedDataParallel(net() if model is None else model, **SMALL, **options)


def batches(count, seed=0, width=16):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [torch.randn(8, width, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def gradients(model):
    return {name: p.grad for name, p in model.module.named_parameters()}


def train(model, steps, lr=0.02, **options):
    with qccl.torch.compress(model, **GROUPS | options):
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for x in batches(steps):
            step(model, optimizer, x)
    return model


def bits(model):
    return b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())


def on_all(item):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found


def assert_same_everywhere(model):
    assert len(set(on_all(bits(model)))) == 1


def error_of(act, kind=Exception):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def none_equals_plain() -> None:
    """On two ranks to the bit; otherwise up to the order of the sum: n - 1 additions and the scaling in fp32."""
    kinds = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True})
    size = dist.get_world_size()
    for options in kinds:
        plain, ours = wrapped(**options), wrapped(**options)
        with qccl.torch.compress(ours, "none", **GROUPS):
            for x in batches(4):
                for model in (plain, ours):
                    model.zero_grad()
                    loss_of(model, x).backward()
                found = gradients(ours)
                for name, expected in gradients(plain).items():
                    if size == 2:
                        assert torch.equal(expected, found[name]), (options, name)
                    largest = expected.abs().max()
                    dist.all_reduce(largest, dist.ReduceOp.MAX)
                    bound = 2 * size * 2.0**-24 * size * float(largest)
                    assert (expected - found[name]).abs().max() <= bound, (options, name)


def within_the_bound() -> None:
    """The errors of both encodings: of each rank's values, and of the mean."""
    for spec in ("minmax8", "minmax4:bucket=64", "cast:dtype=bfloat16"):
        codec = codecs.get(spec)
        plain, ours, alone = wrapped(), wrapped(), net()
        with qccl.torch.compress(ours, spec, **GROUPS) as handle:
            compressed = {n for g in handle._groups if g.codec == codec for n in g.names}
            assert compressed == {n for n, p in alone.named_parameters() if p.dim() > 1}
            for x in batches(3):
                for model in (plain, ours, alone):
                    model.zero_grad()
                    loss_of(model, x).backward()
                found = gradients(ours)
                for name, p in alone.named_parameters():
                    mean = gradients(plain)[name].numpy().ravel()
                    errors = [codec.error_bound(each) for each in on_all(p.grad.numpy().ravel())]
                    first = np.mean(errors, axis=0) if name in compressed else 0 * mean
                    second = codec.error_bound(np.abs(mean) + 4 * first.max()) if name in compressed else first
                    second = np.maximum(second, codec.error_bound(mean)) if name in compressed else second
                    error = np.abs(found[name].numpy().ravel() - mean)
                    assert (error <= 1.05 * (first + second.max()) + 1e-6 * np.abs(mean).max()).all(), (spec, name)


def replicas() -> None:
    """The same bits on all ranks, after 100 steps."""
    for codec in ("onebit:reconstruct=scale+ef", "minmax4:rounding=stochastic"):
        model = train(wrapped(), 100, codec=codec)
        assert_same_everywhere(model)
        assert bits(model) != bits(train(wrapped(), 100, codec="none"))


class Recorder:
    """Remembers which parameters each bucket of each step had."""

    def __init__(self, handle):
        self.passes, original = [], handle._reduce

        def reduce(bucket):
            if bucket.index() == 0:
                self.passes.append([])
            self.passes[-1].append(tuple(p.numel() for p in bucket.parameters()))
            return original(bucket)

        handle._reduce = reduce


def resumes() -> None:
    """After a stop at step 3 DDP begins with its first buckets again, and the bits are those of a run without it."""
    folder = Path(os.environ["FOLDER"])
    path = folder / f"{dist.get_rank()}.pt"
    specs = ("minmax2+ef", "topk:k=0.1+ef+nesterov:mu=0.9", "minmax4:rounding=stochastic", "randomk:k=0.3+ef")
    for spec in specs:
        ends = []
        for is_resumed in (False, True):
            model = wrapped()
            handle = qccl.torch.compress(model, spec, codecs={"inner.1.*": "onebit+ef"}, **GROUPS)
            recorder = Recorder(handle)
            optimizer = torch.optim.SGD(model.parameters(), 0.02)
            for i, x in enumerate(batches(7)):
                if i == 3 and is_resumed:
                    torch.save({"model": model.module.state_dict(), "qccl": handle.state_dict()}, path)
                    handle.close()
                    model = wrapped()
                    saved = torch.load(path)  # with its default, weights_only=True
                    model.module.load_state_dict(saved["model"])
                    optimizer = torch.optim.SGD(model.parameters(), 0.02)
                    handle = qccl.torch.compress(model, spec, codecs={"inner.1.*": "onebit+ef"}, **GROUPS)
                    handle.load_state_dict(saved["qccl"])
                    assert handle.step == 3
                step(model, optimizer, x)
            assert recorder.passes[0] != recorder.passes[2] and len(recorder.passes[2]) > 3
            state = handle.state_dict()
            ends.append((bits(model), {k: {n: t.numpy().tobytes() for n, t in state[k].items()} for k in KINDS}))
            handle.close()
        assert ends[0] == ends[1], spec
        shapes = {name: p.shape for name, p in net().named_parameters()}
        assert all(t.shape == shapes[n] for kind in KINDS for n, t in state[kind].items())
        assert len(state["residuals"]) == (7 if "+ef" in spec else 2)


KINDS = ("residuals", "momenta")


def warms_up() -> None:
    """The first steps are exact; the counter is a part of the state."""
    exact, ours = wrapped(), wrapped()
    with qccl.torch.compress(exact, "none", **GROUPS), qccl.torch.compress(ours, warmup_steps=2, **GROUPS) as handle:
        for i, x in enumerate(batches(3)):
            for model in (exact, ours):
                model.zero_grad()
                loss_of(model, x).backward()
            same = all(
                torch.equal(a, b) for a, b in zip(gradients(exact).values(), gradients(ours).values(), strict=True)
            )
            assert same == (i < 2)
        handle.load_state_dict(handle.state_dict() | {"step": 1})
        ours.zero_grad()
        loss_of(ours, x).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(exact).values(), gradients(ours).values(), strict=True))


def accumulates() -> None:
    """no_sync() adds this rank's gradients; the next backward() reduces the sum."""
    plain, ours = wrapped(), wrapped()
    with qccl.torch.compress(ours, "none", **GROUPS) as handle:
        for x, y in zip(batches(3), batches(3, seed=1), strict=True):
            for model in (plain, ours):
                model.zero_grad()
                with model.no_sync():
                    loss_of(model, x).backward()
                loss_of(model, y).backward()
            for a, b in zip(gradients(plain).values(), gradients(ours).values(), strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        assert handle.step == 3
        for _ in range(2):  # two backward passes in one step
            loss_of(ours, x).backward()
        assert handle.step == 5


class Branches(torch.nn.Module):
    """Rank 0 uses one branch, the others use the other one; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(Linear(16, 32) for _ in range(3))
        self.last = Linear(32, 4)

    def forward(self, x):
        return self.last(self.branches[min(dist.get_rank(), 1)](x))


def leaves_parameters_unused() -> None:
    plain, ours = (wrapped(net(Branches), find_unused_parameters=True) for _ in range(2))
    with qccl.torch.compress(ours, "none", **GROUPS):
        for x in batches(3):
            for model in (plain, ours):
                model.zero_grad()
                loss_of(model, x).backward()
            for name, expected in gradients(plain).items():
                found = gradients(ours)[name]
                assert (expected is None) == (found is None) == ("branches.2" in name)
                assert expected is None or torch.allclose(expected, found, rtol=1e-5, atol=1e-6)
    assert_same_everywhere(train(wrapped(net(Branches), find_unused_parameters=True), 5, codec="minmax4+ef"))


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


def freezes() -> None:
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
                model.zero_grad()
                loss_of(model, x).backward()
            found = gradients(ours)
            for name, expected in gradients(plain).items():
                assert (expected is None) == (found[name] is None) == (i == 2 and name.startswith("inner.1"))
                assert expected is None or torch.allclose(expected, found[name], rtol=1e-5, atol=1e-6), name


def other_element_types() -> None:
    assert_same_everywhere(train(wrapped(net().bfloat16().float()), 3, codec="minmax4+ef"))
    plain, ours = (wrapped(net().bfloat16()) for _ in range(2))
    with qccl.torch.compress(ours, **GROUPS) as handle:
        assert {group.dtype for group in handle._groups} == {"bfloat16"}
        for x in batches(3):
            for model in (plain, ours):
                model.zero_grad()
                loss_of(model, x.bfloat16()).backward()
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
            for model in (plain, ours):
                model.zero_grad()
                loss_of(model, x).backward()
            for name in exact:
                assert torch.allclose(gradients(plain)[name], gradients(ours)[name], rtol=1e-5, atol=1e-6), name


def keeps_the_order_of_memory() -> None:
    """A residual has its parameter's shape, also where memory has another order of axes."""
    model = Sequential(torch.nn.Conv2d(3, 8, 3), ReLU(), torch.nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    model = wrapped(model)
    with qccl.torch.compress(model, "minmax1:bucket=64+ef", group_bytes=1 << 20, min_elements=0) as handle:
        alone = [torch.zeros_like(p) for p in model.parameters()]
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
        assert len(alone) == 4


def loads_at_another_size() -> None:
    """What four ranks have not delivered, two ranks deliver, whatever the algorithm; momenta become their mean."""
    pair = dist.new_group([0, 1])
    spec = "minmax4:bucket=64+ef"
    options = {"codec": spec, "codecs": {"inner.0.*": f"{spec}+nesterov:mu=0.5"}, "min_elements": 100}
    for kind, algorithm in ((Mixed, "one_shot"), (partial(Mixed, 512), "two_round")):
        plain, model = wrapped(net(kind)), wrapped(net(kind))
        lacking = {name: torch.zeros_like(p, requires_grad=False) for name, p in net(kind).named_parameters()}
        with qccl.torch.compress(model, **options) as handle:
            for x in batches(3):
                for each in (plain, model):
                    each.zero_grad()
                    loss_of(each, x).backward()
                for name, exact in gradients(plain).items():
                    lacking[name] += exact - gradients(model)[name]
            states = on_all(handle.state_dict())
            algorithms = {(size, _schedule(handle._groups[0], 0, size).name) for size in (2, 4)}
        assert algorithms == {(2, algorithm), (4, algorithm)}
        if dist.get_rank() >= 2:
            continue
        model = wrapped(net(kind), process_group=pair)
        with qccl.torch.compress(model, **options) as handle:
            deliver(handle, model, states, lacking)


def deliver(handle, model, states, lacking):
    """Load the states of four ranks on two, and add up the results of steps whose gradients are zeros."""
    refused = partial(error_of, kind=qccl.ArgumentError)
    assert "rank 0 of 4" in refused(lambda: handle.load_state_dict(states[0]))
    assert "ranks 0 of 4, 1 of 4" in refused(lambda: handle.load_state_dict(states[:2]))
    assert "'step'" in refused(lambda: handle.load_state_dict([states[0] | {"step": 2}, *states[1:]]))
    handle.load_state_dict(states)
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


def traces() -> None:
    """Calls run while the backward pass still computes, and all end before it returns."""
    model = DistributedDataParallel(Sequential(*[Linear(512, 512) for _ in range(12)]), bucket_cap_mb=1)
    events: list[qccl.trace.TraceEvent] = []
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


def changes_the_rate() -> None:
    model = wrapped()
    with qccl.torch.compress(model, "minmax2+ef", **GROUPS) as handle:
        for i, x in enumerate(batches(3)):
            handle.lr = 0.1 / (i + 1)
            model.zero_grad()
            loss_of(model, x).backward()
        assert handle.state_dict()["lr"] is True
        handle.lr = None
        assert "give lr in all calls or in none" in error_of(lambda: loss_of(model, x).backward())


def joins() -> None:
    """Ranks with fewer batches take part with zeros."""
    model = wrapped()
    with qccl.torch.compress(model, **GROUPS):
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        with model.join():
            for x in batches(3 + dist.get_rank()):
                step(model, optimizer, x)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ZeroDivisionError("in the backward pass")


def refuses() -> None:
    """Clear errors, and nothing is changed."""
    compress, model = qccl.torch.compress, wrapped()
    refused = partial(error_of, kind=qccl.ArgumentError)
    assert "DistributedDataParallel, not Mixed; wrap it first" in refused(lambda: compress(net()))
    assert "exclude must be a list" in refused(lambda: compress(model, exclude="*"))
    assert "codecs must be a dict of codecs" in refused(lambda: compress(model, codecs=[("first.*", "none")]))
    assert "group_bytes must be a positive number" in refused(lambda: compress(model, group_bytes=0))
    assert "'nothing.*' matches no parameter" in refused(lambda: compress(model, exclude=["nothing.*"]))
    assert "first.weight" in refused(lambda: compress(model, codecs={"firs": "none"}))
    assert "there is no codec" in refused(lambda: compress(model, "minimax8"))
    assert "there is no codec" in refused(lambda: compress(model, codecs={"first.*": "minimax"}))
    assert "+nesterov exclude" in refused(lambda: compress(model, "minmax8+nesterov", warmup_steps=1))
    assert "warmup_steps" in refused(lambda: compress(model, warmup_steps=-1))
    sparse = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    assert "sparse=False" in refused(lambda: compress(sparse))
    alone = qccl.run_ranks(1, lambda comm: refused(lambda: compress(model, comm=comm)))
    assert "rank 0 of 1" in alone[0]
    mine = "minmax8" if dist.get_rank() else "minmax4"
    found = error_of(lambda: compress(model, mine, **GROUPS), kind=qccl.MismatchError)
    assert "rank 0 has minmax4 for" in found and "and rank 1 has minmax8 for" in found
    found = error_of(lambda: compress(model, warmup_steps=dist.get_rank()), kind=qccl.MismatchError)
    assert "rank 0 has warmup_steps=0, and rank 1 has warmup_steps=1" in found
    with qccl.Communicator.from_torch() as comm:
        first = compress(wrapped(), comm=comm)
        assert "belongs to another handle" in refused(lambda: compress(model, comm=comm))
        first.close()
        compress(wrapped(), comm=comm).close()

    handle = compress(model, "minmax4+ef", **GROUPS)
    assert "wrap it in DDP again" in refused(lambda: compress(model))
    x = batches(1)[0]
    loss_of(model, x).backward()
    state = handle.state_dict()
    first, *others = state["groups"]
    groups = [first | {"codec": "minmax8"}, *others]
    name, shape, strides = first["parameters"][0]
    renamed = [first | {"parameters": [["another", shape, strides], *first["parameters"][1:]]}, *others]
    for wrong, text in (
        (groups, f"the codec of its group 0 is minmax8, and here it is {first['codec']}; pass the same"),
        (renamed, f"group 0 has 'another' of shape {tuple(shape)} and strides"),
        (renamed, f"the group here {name!r} of shape"),
        ([first | {"parameters": first["parameters"][:-1]}, *others], "group 0 has nothing, and the group here"),
        (others, f"it has {len(others)} groups of parameters, and here there are {len(others) + 1}"),
    ):
        assert text in refused(lambda: handle.load_state_dict(state | {"groups": wrong})), text  # noqa: B023
    for wrong in (state | {"groups": groups}, {"rank": 0}, 3, state | {"calls": -1}, []):
        refused(lambda: handle.load_state_dict(wrong))  # noqa: B023
    name = next(iter(state["residuals"]))
    wrong = {"residuals": state["residuals"] | {name: torch.zeros(3)}}
    assert name in refused(lambda: handle.load_state_dict(state | wrong))
    again = handle.state_dict()
    assert all(torch.equal(again["residuals"][n], t) for n, t in state["residuals"].items())
    assert handle.step == again["step"] == 1

    with torch.no_grad():  # an exception before DDP has all gradients
        model.module.first.register_forward_hook(lambda module, inputs, out: Fails.apply(out))
    error_of(lambda: loss_of(model, x).backward(), ZeroDivisionError)
    assert "between steps" in refused(handle.state_dict)
    assert "finished reduction" in error_of(lambda: loss_of(model, x), RuntimeError)  # DDP's own
    handle.close()
    model = wrapped()
    compress(model, **GROUPS).close()
    assert "is closed" in error_of(lambda: loss_of(model, x).backward())


def dies() -> None:
    """The last rank ends in the middle of a backward pass; backward() raises on the others."""
    model = wrapped()
    handle = qccl.torch.compress(model, "minmax4+ef", **GROUPS)
    x = batches(1)[0]
    loss_of(model, x).backward()
    dist.barrier()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        original = handle._reduce
        handle._reduce = lambda bucket: os._exit(0) if bucket.is_last() else original(bucket)
    begin = time.perf_counter()
    text = error_of(lambda: loss_of(model, x).backward())
    assert f"rank {last} was lost" in text and time.perf_counter() - begin < 20, text
    assert f"rank {last} was lost" in error_of(handle.state_dict)
    os._exit(0)  # the process group of torch lacks a rank, too


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        globals()[name]()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name} {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
