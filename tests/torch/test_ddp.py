"""Refusals of qccl.torch.compress(), and the loss of a rank."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from ddp_models import GROUPS, batches, bits, loss_of, net, step, wrapped
from on_ranks import check, in_group, on_ranks, run
from rank_calls import error_of
from torch.nn.parallel import DistributedDataParallel

import qccl
import qccl.torch


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ZeroDivisionError("in the backward pass")


@on_ranks(2)
def test_refuses() -> None:
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
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    assert "hook (test_refuses.<locals>.<lambda>)" in refused(lambda: compress(hooked))
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
    assert "wrap the model in DDP again" in refused(lambda: compress(model))
    x = batches(1)[0]
    loss_of(model, x).backward()
    state = handle.state_dict()
    first, *others = state["groups"]
    groups = [first | {"codec": "minmax8"}, *others]
    name, shape, strides = first["parameters"][0]
    rest = first["parameters"][1:]
    renamed = [first | {"parameters": [["another", shape, strides], *rest]}, *others]
    turned = [first | {"parameters": [[name, shape, strides[::-1]], *rest]}, *others]
    moved = [first | {"parameters": rest}, first | {"parameters": first["parameters"][:1]}, *others]
    for wrong, text in (
        (groups, f"the codec of its group 0 is minmax8, and here it is {first['codec']}; pass the same"),
        (renamed, f"it lacks {name} and it also has another"),
        (
            turned,
            f"group 0 has {name!r} of shape {tuple(shape)} and strides {tuple(strides[::-1])}, and the group here",
        ),
        (moved, f"it has {len(groups) + 1} groups of parameters, and here there are {len(groups)}"),
        (others, f"it lacks {name}"),
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
    dist.barrier()  # a rank that closes first ends the calls that others still have under way
    handle.close()
    model = wrapped()
    compress(model, **GROUPS).close()
    assert "is closed" in error_of(lambda: loss_of(model, x).backward())


#: of the run that dies() stops
HOW = {
    "codec": "minmax4:rounding=stochastic+ef",
    "codecs": {"inner.1.*": "topk:k=0.1+ef+nesterov:mu=0.9", "inner.2.*": "randomk:k=0.3+ef"},
    **GROUPS,
}


@in_group
def dies(tmp_path: Path) -> None:
    """The last rank ends in the middle of a backward pass; backward() raises on the others."""
    model = wrapped()
    handle = qccl.torch.compress(model, **HOW)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    *before, x = batches(4)
    for each in before:
        step(model, optimizer, each)
    torch.save({"model": model.module.state_dict(), "qccl": handle.state_dict()}, checkpoint(tmp_path))
    dist.barrier()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        original = handle._reduce
        handle._reduce = lambda bucket: os._exit(0) if bucket.is_last() else original(bucket)
    begin = time.perf_counter()
    text = error_of(lambda: loss_of(model, x).backward())
    assert f"rank {last} was lost" in text and time.perf_counter() - begin < 20 * patience.factor(), text
    assert f"rank {last} was lost" in error_of(handle.state_dict)
    os._exit(0)  # the process group of torch lacks a rank, too


@in_group
def goes_on(tmp_path: Path) -> None:
    """From the checkpoint of dies(), other processes end in the bits of a run that nobody stopped.

    After the stop DDP begins with its first buckets again, which have other parameters than the later ones.
    """
    ends, buckets = [], []
    for saved in (None, torch.load(checkpoint(tmp_path))):
        model = wrapped()
        with qccl.torch.compress(model, **HOW) as handle:
            if saved is not None:
                model.module.load_state_dict(saved["model"])
                handle.load_state_dict(saved["qccl"])
                assert handle.step == 3
            reduce = handle._reduce
            handle._reduce = lambda bucket: buckets.append(len(bucket.parameters())) or reduce(bucket)  # noqa: B023
            optimizer = torch.optim.SGD(model.parameters(), 0.02)
            for x in batches(7)[handle.step :]:
                buckets.append("step")
                step(model, optimizer, x)
        ends.append(bits(model))
    assert ends[0] == ends[1]
    first, *_, last = " ".join(map(str, buckets)).split("step")[1:]
    assert first != last


def checkpoint(folder: Path) -> Path:
    """This rank's file."""
    return folder / f"{dist.get_rank()}.pt"


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_dies(tmp_path: Path, transport: str) -> None:
    assert [ended.status for ended in run(dies, 3, {"tmp_path": tmp_path}, transport=transport)] == [0] * 3
    check(run(goes_on, 3, {"tmp_path": tmp_path}))
