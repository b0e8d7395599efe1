"""Takes an array's memory away from it in the middle of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import qccl

__all__ = ["COUNT", "call", "refused"]

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


def refused(kind: type[Exception], message: str, act: Callable[[], object]) -> None:
    try:
        act()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError("the memory could be taken away")
