"""A call over wan sends all that it can before it has the others' headers, which take long from another site."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import patience
import pytest
from wan_groups import group

import qccl
from qccl.trace import TraceEvent

COUNT = 1 << 20


@pytest.mark.parametrize("is_ahead", [True, False])
def test_sends_before_the_other_rank_calls(is_ahead, monkeypatch):
    """All chunks of the first round leave a rank while the other one has not called; or one window, if it may not."""
    monkeypatch.setattr("qccl.transports.wan.WanTransport.sends_ahead", [0, 1] if is_ahead else [])
    traces: list[list[TraceEvent]] = [[], []]
    began = [0.0, 0.0]
    done, called = threading.Barrier(3), threading.Event()

    def work(comm: qccl.Communicator, chosen: random.Random) -> int:
        if not began[comm.rank]:
            x = np.full(COUNT, comm.rank + 1, np.float32)
            comm.barrier()
            if comm.rank:  # rank 0's sends need none of its Python code any more
                assert called.wait(60)
                time.sleep(0.5 * patience.factor())
            began[comm.rank] = time.perf_counter()
            call = comm.quantized_allreduce(x, chunk=1 << 14, trace=traces[comm.rank], async_op=True)
            called.set()
            call.wait()
            assert (x == 3).all()
            done.wait(60)
        return 1

    with group(work=work):
        done.wait(60)
    sends = [event for event in traces[0] if event.queue == "send" and event.args["round"] == 0]
    early = [event for event in sends if event.start < began[1]]
    assert len(early) == len(sends) if is_ahead else 0 < len(early) < len(sends)
