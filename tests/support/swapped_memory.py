"""Program of test_held_memory.py: takes an array's memory away from it in the middle of a call, in each way there is.

It prints a line for each way that did no harm. The test sets MALLOC_MMAP_THRESHOLD_, so that each array is a mapping of
its own: once freed, its memory is gone, and a call that still uses it ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

import qccl

COUNT = 1 << 17


def call(make: Callable[[], Any], take_away: Callable[[Any], None], *, planned: bool = False) -> np.ndarray:
    """The result of an all-reduce among two ranks, of which rank 0 takes the memory away before rank 1 joins in."""
    taken = threading.Event()

    def run(comm: qccl.Communicator) -> np.ndarray:
        y = np.zeros(COUNT, np.float32)
        if comm.rank:
            comm.plan("allreduce", COUNT, codec="none")
            assert taken.wait(60)
            return comm.quantized_allreduce(np.ones(COUNT, np.float32), out=y, codec="none")
        x = make()
        plan = comm.plan("allreduce", COUNT, codec="none")
        try:
            work = plan.bind(x, y).start() if planned else comm.quantized_allreduce(x, y, codec="none", async_op=True)
            take_away(x)
        finally:
            taken.set()
        return work.wait(60)

    return qccl.run_ranks(2, run)[0]


def in_place(take_away: Callable[[Any], None]) -> None:
    """The same, where the result goes into memory that was taken away."""
    taken = threading.Event()

    def run(comm: qccl.Communicator) -> None:
        x = torch.ones(COUNT)
        if comm.rank:
            assert taken.wait(60)
            comm.quantized_allreduce(x)
            return
        work = comm.quantized_allreduce(x, async_op=True)
        take_away(x)
        taken.set()
        work.wait(60)

    qccl.run_ranks(2, run)


def tensor() -> torch.Tensor:
    return torch.full((COUNT,), 2.0)


def replace_data(x: torch.Tensor) -> None:
    x.data = torch.zeros(1)


def set_nothing(x: torch.Tensor) -> None:
    x.set_()


def grow(x: torch.Tensor) -> None:
    refused(RuntimeError, "not resizable", lambda: x.resize_(4 * COUNT))


def free_storage(x: torch.Tensor) -> None:
    refused(RuntimeError, "not resizable", lambda: x.untyped_storage().resize_(0))


def resize_numpy(x: np.ndarray) -> None:
    refused(ValueError, "cannot resize", lambda: x.resize(4 * COUNT))


def donate(x: jax.Array) -> None:
    """What is computed next must not be written into the memory of x."""
    made = jax.jit(lambda a: a * 0 - 7, donate_argnums=0)(x)
    made.block_until_ready()


def refused(kind: type[Exception], message: str, act: Callable[[], object]) -> None:
    try:
        act()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError("the memory could be taken away")


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch data": (tensor, replace_data),
    "torch set_": (tensor, set_nothing),
    "torch resize_": (tensor, grow),
    "torch storage": (tensor, free_storage),
    "numpy resize": (lambda: np.full(COUNT, 2, np.float32), resize_numpy),
    "jax delete": (lambda: jax.numpy.full(COUNT, 2, np.float32).block_until_ready(), lambda x: x.delete()),
    "jax donation": (lambda: jax.numpy.full(COUNT, 2, np.float32).block_until_ready(), donate),
}

if __name__ == "__main__":
    for name, (make, take_away) in WAYS.items():
        for planned in (False, True):
            assert (call(make, take_away, planned=planned) == 3).all(), name
        if make is tensor:
            in_place(take_away)
        print(name, flush=True)
