"""Futures of PyTorch of a call: Work.get_future()."""

from __future__ import annotations

import threading

import pytest
import torch
from thread_ranks import on_ranks

from qccl.base.errors import PeerLost

COUNT = 100_000
SECONDS = 60.0


@on_ranks(2)
def test_futures(comm, begun: threading.Event):
    x, y = torch.ones(COUNT), torch.full((10,), 2.0)
    future = comm.quantized_allreduce(x, async_op=True).get_future()
    both = comm.quantized_allreduce_coalesced([x, y], async_op=True).get_future()
    assert future.wait() is x and [each[0].item() for each in both.wait()] == [4, 4]
    assert future.then(lambda f: f.value()[0].item()).wait() == 4
    done = comm.quantized_allreduce(y, async_op=True)
    done.wait()
    assert done.get_future().done()
    if comm.rank:
        begun.wait(SECONDS)
        comm.abort("a reason")
        return
    future = comm.quantized_allreduce(x, async_op=True).get_future()
    begun.set()
    with pytest.raises(PeerLost, match="a reason"):
        future.wait()
