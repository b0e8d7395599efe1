"""The memory of a call's tensors lives as long as the call uses it; plans and repeated calls look at it again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
import thread_ranks
import torch
from on_ranks import on_ranks
from swapped_memory import COUNT, call, refused

import qccl
from qccl.communicator.calls import Collectives

FEW = 300
_MMAP_THRESHOLD = -3  # of <malloc.h>


def grow(x: torch.Tensor) -> None:
    refused(RuntimeError, "not resizable", lambda: x.resize_(4 * COUNT))


def free_storage(x: torch.Tensor) -> None:
    refused(RuntimeError, "not resizable", lambda: x.untyped_storage().resize_(0))


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: setattr(x, "data", torch.zeros(1)),
    "set_": lambda x: x.set_(),
    "resize_": grow,
    "storage": free_storage,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(1)
def test_taken_away_in_the_middle_of_a_call(way: str) -> None:
    """In a process of its own: each tensor is a mapping, so a call that uses freed memory ends the process."""
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    for planned in (False, True):
        assert (call(lambda: torch.full((COUNT,), 2.0), WAYS[way], planned=planned) == 3).all()
    taken = threading.Event()

    def in_place(comm: qccl.Communicator) -> None:
        x = torch.ones(COUNT)
        if comm.rank:
            assert taken.wait(60)
            comm.quantized_allreduce(x)
            return
        work = comm.quantized_allreduce(x, async_op=True)
        WAYS[way](x)
        taken.set()
        work.wait(60)

    qccl.run_ranks(2, in_place)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@thread_ranks.on_ranks(2)
def test_only_calls_that_go_on_alone_forbid_resizing(comm: qccl.Communicator, dtype: str) -> None:
    x = torch.ones(100, dtype=getattr(torch, dtype), requires_grad=True)
    comm.quantized_allreduce(x)
    plan = comm.plan("allreduce", 100, dtype).bind(x)
    for _ in range(3):
        plan.run()
    assert x.untyped_storage().resizable()
    comm.quantized_allreduce(x, async_op=True).wait()
    assert not x.untyped_storage().resizable()


@pytest.mark.parametrize(("call", "runs"), [("start", 0), ("run", 3)])
@thread_ranks.on_ranks(2)
def test_a_bound_tensor_whose_memory_changed_is_refused(comm: qccl.Communicator, call: str, runs: int) -> None:
    for change in (
        lambda x: x.resize_(1 << 22),
        lambda x: x.set_(torch.zeros(100)),
        lambda x: setattr(x, "data", torch.zeros(100)),
    ):
        x = torch.ones(100)
        plan = comm.plan("allreduce", 100).bind(x)
        for _ in range(runs):
            plan.run()
        change(x)
        with pytest.raises(qccl.InvalidBufferError, match=r"x has other memory .* plan\.bind\(\) again"):
            getattr(plan, call)()
        y = torch.ones(100)
        plan.bind(y).start().wait()
        assert (y == 2).all()


@thread_ranks.on_ranks(2)
def test_views_that_stand_for_other_values_are_refused(comm: qccl.Communicator) -> None:
    views = {
        "resolve_neg": [torch.arange(4.0)._neg_view(), (torch.ones(1) * 2j).conj().imag],
        "resolve_conj": [(torch.ones(1) * 2j).conj()],
    }
    for method, each in views.items():
        for x in each:
            with pytest.raises(qccl.InvalidBufferError, match=rf"x\.{method}\(\)"):
                comm.quantized_allreduce(x)
            with pytest.raises(qccl.InvalidBufferError, match=rf"out\.{method}\(\)"):
                comm.quantized_allreduce(np.ones(4, np.float32), out=x)
            with pytest.raises(qccl.InvalidBufferError, match=rf"xs\[0\]\.{method}\(\)"):
                comm.quantized_allreduce_coalesced([x])
    x = views["resolve_neg"][0].resolve_neg()
    assert (comm.quantized_allreduce(x, codec="none") == torch.arange(4.0) * -2).all()


def test_tensors_without_their_memory_are_refused() -> None:
    freed = torch.zeros(4)
    part = freed[1:]
    freed.untyped_storage().resize_(0)

    def run(comm: qccl.Communicator) -> None:
        for x, message in (
            (freed, "no memory"),
            (part, "needs 12 bytes, but its storage has 0 bytes"),
            (torch._efficientzerotensor(4), "no memory"),
        ):
            with pytest.raises(qccl.InvalidBufferError, match=message):
                comm.quantized_allreduce(np.zeros(x.numel(), np.float32), out=x)

    qccl.run_ranks(1, run)


@pytest.mark.parametrize("call", ["run", "start"])
@thread_ranks.on_ranks(1)
def test_a_plan_whose_tensor_has_less_memory_at_the_same_address(comm, call):
    memory = np.ones(FEW, np.float32)
    x = torch.frombuffer(memory, dtype=torch.float32)
    plan = comm.plan("allreduce", FEW).bind(x)
    x.data = torch.frombuffer(memory, dtype=torch.float32, count=2)
    with pytest.raises(qccl.InvalidBufferError, match=f"needs {4 * FEW} bytes, but its storage has 8 bytes"):
        getattr(plan, call)()


def test_tensors_are_found_again(monkeypatch):
    """Without another preparation: tensors of 16 bits, and those that are parts of one."""
    prepared, usual = [], Collectives._prepare
    monkeypatch.setattr(Collectives, "_prepare", lambda comm, *given: prepared.append(comm) or usual(comm, *given))

    def run(comm):
        half, tensor = torch.ones(FEW, dtype=torch.bfloat16), torch.ones(9)
        for number in range(2):
            assert (comm.quantized_allreduce(half) == 1).all()
            works = comm.quantized_allreduce_coalesced(tensor.split(3), async_op=True)
            assert (torch.stack(works.wait()) == 1).all()
            if number == 0:
                before = len(prepared)
        assert len(prepared) == before > 0

    qccl.run_ranks(1, run)


@thread_ranks.on_ranks(2)
def test_a_tensor_that_changed_between_equal_calls(comm):
    x = torch.ones(FEW)
    comm.quantized_allreduce(x)
    x.data = torch.ones(FEW)  # other memory
    assert (comm.quantized_allreduce(x) == 2).all()
    with pytest.raises(qccl.InvalidBufferError, match="negated view"):
        comm.quantized_allreduce(torch._neg_view(x))
    y = torch.ones(FEW)
    comm.quantized_allreduce(y)
    with pytest.raises(qccl.InvalidBufferError, match="negated view"):  # at the same address
        comm.quantized_allreduce(y._neg_view())
    y.untyped_storage().resize_(8)
    with pytest.raises(qccl.InvalidBufferError, match="its storage has 8 bytes"):
        comm.quantized_allreduce(y)
    y.untyped_storage().resize_(0)
    with pytest.raises(qccl.InvalidBufferError, match="no memory"):
        comm.quantized_allreduce(y)
    assert (comm.quantized_allreduce(torch.ones(FEW)) == 2).all()
