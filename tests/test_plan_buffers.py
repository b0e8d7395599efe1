"""Plans of calls of several arrays, which are made from specs and bound by the names of their buffers."""

from __future__ import annotations

import numpy as np
import pytest

import qccl
from qccl.collectives import CoalescedSpec, PeerExchangeSpec
from qccl.schedule import buffer_name


def test_many_arrays() -> None:
    def run(comm: qccl.Communicator) -> None:
        sizes = (5, 3000)
        plan = comm.plan_of(CoalescedSpec.from_arguments(sum(sizes), "float32", "none", None, each=sizes))
        xs = [np.full(size, comm.rank + 1, np.float32) for size in sizes]
        outs = [np.empty_like(x) for x in xs]
        arrays = {buffer_name("input", i): x for i, x in enumerate(xs)}
        arrays |= {buffer_name("output", i): out for i, out in enumerate(outs)}
        assert plan.bind_buffers(arrays, outs).run() is outs
        assert all((out == 3).all() for out in outs) and all((x == comm.rank + 1).all() for x in xs)
        with pytest.raises(
            qccl.ArgumentError, match=r"the buffers of this call are \['input 0', .*, not \['input 0'\]"
        ):
            plan.bind_buffers({"input 0": xs[0]})
        with pytest.raises(qccl.ArgumentError, match="has 3000 elements, and allreduce_coalesced"):
            plan.bind_buffers(arrays | {"input 0": xs[1]})

    qccl.run_ranks(2, run, timeout=20)


def test_replicas_and_state() -> None:
    def run(comm: qccl.Communicator) -> None:
        other = 1 - comm.rank
        peers = {"send_to": [other], "receive_from": [other], "applied": True}
        spec = PeerExchangeSpec.from_arguments(4, "float32", "minmax8+ef", None, **peers)
        with pytest.raises(qccl.ArgumentError, match="pass key="):
            comm.plan_of(spec)
        plan = comm.plan_of(spec, "x")
        z, applied, replica = (np.full(4, value, np.float32) for value in (comm.rank + 1, 0, 0))
        plan.bind_buffers({"input": z, "applied": applied, buffer_name("replica", other): replica}, applied).run()
        assert (
            (applied == comm.rank + 1).all()
            and (replica == other + 1).all()
            and list(comm.state_dict()["keys"]) == ["x"]
        )

    qccl.run_ranks(2, run, timeout=20)
