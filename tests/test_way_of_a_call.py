"""A repeated call enters the functions that docs/architecture.md lists, and no others."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import qccl
from qccl.transports.loopback import LoopbackGroup

ROOT = Path(__file__).parents[1]
COUNT = 64
MOST = 9

METHODS: dict[str, Callable[[Any, Any, Any], object]] = {
    "quantized_allreduce": lambda comm, x, out: comm.quantized_allreduce(x, out),
    "quantized_allreduce_coalesced": lambda comm, x, out: comm.quantized_allreduce_coalesced([x, out]),
    "quantized_reduce_scatter": lambda comm, x, out: comm.quantized_reduce_scatter(x, out, counts=[COUNT]),
    "quantized_all_gather": lambda comm, x, out: comm.quantized_all_gather(x, out, counts=[COUNT]),
    "quantized_all_to_all": lambda comm, x, out: comm.quantized_all_to_all(
        x, out, send_counts=[COUNT], recv_counts=[COUNT]
    ),
    "quantized_broadcast": lambda comm, x, out: comm.quantized_broadcast(x, out),
    "quantized_reduce": lambda comm, x, out: comm.quantized_reduce(x, out),
    "hierarchical_allreduce": lambda comm, x, out: comm.hierarchical_allreduce(x, out, node_ids=[0]),
    "peer_exchange": lambda comm, x, out: comm.peer_exchange(x, send_to=[], replicas={}, applied=out),
}
WITH_STATE = {
    "quantized_allreduce": lambda comm, x, out: comm.quantized_allreduce(x, out, codec="minmax8+ef", key="a"),
    "quantized_reduce_scatter": lambda comm, x, out: comm.quantized_reduce_scatter(x, out, codec="onebit+ef", key="s"),
    "peer_exchange": lambda comm, x, out: comm.peer_exchange(
        x, send_to=[], replicas={}, applied=out, codec="minmax4+ef", key="p"
    ),
}


def section() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page[page.index("## The way of a call") : page.index("## The parts")]


def listed() -> list[str]:
    """The functions of the table, in their order, where the collective's method is that of all-reduce."""
    return re.findall(r"^\| `([\w.<>]+)` \(", section(), re.MULTILINE)


def entered(call: Callable[[], object]) -> list[str]:
    """The functions of qccl that a call enters in this thread, when it is made for the third time.

    Those of the loopback transport are left out: it is written in Python, others are not.
    """
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and "/qccl/" in frame.f_code.co_filename and not name.startswith("Loopback"):
            found.append(name)

    call()
    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def on_one_rank(call: Callable[[Any, Any, Any], object]) -> list[str]:
    """The same on one rank, where the call need not wait for others."""
    x, out = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    with qccl.Communicator.from_transport(LoopbackGroup(1).transport(0)) as comm:
        return entered(lambda: call(comm, x, out))


def listed_for(method: str, *, with_state: bool = False) -> list[str]:
    names = [name for name in listed() if with_state or name != "Session._with_state"]
    return [name.replace("quantized_allreduce", method) for name in names]


@pytest.mark.parametrize("method", METHODS)
def test_a_repeated_call(method):
    found = on_one_rank(METHODS[method])
    assert found == listed_for(method) and len(found) <= MOST


@pytest.mark.parametrize("method", WITH_STATE)
def test_a_repeated_call_with_state(method):
    found = on_one_rank(WITH_STATE[method])
    assert found == listed_for(method, with_state=True) and len(found) <= MOST


def test_a_repeated_call_on_pointers():
    def call(comm, x, out):
        qccl.quantized_allreduce(x.ctypes.data, out.ctypes.data, COUNT, "float32", "sum", comm)

    found = on_one_rank(call)
    own = ["quantized_allreduce", "Collectives._call", "HostMemory.recheck"]
    assert found == [*own, *listed_for("")[2:]] and len(found) <= MOST
    assert all(name.split(".")[-1] in section() for name in found)


def test_a_plan_that_runs_again():
    plans = {}

    def call(comm, x, out):
        if not plans:
            plans[0] = comm.plan("allreduce", COUNT).bind(x, out)
        plans[0].run()

    found = on_one_rank(call)
    assert found == ["Plan.run", "Plan._ready", *listed_for("")[2:]]
    assert len(found) <= MOST and all(name in section() for name in found)


def test_a_call_on_several_ranks_enters_no_other_functions_of_calls():
    def run(comm):
        x = np.ones(COUNT, np.float32)
        names = entered(lambda: comm.quantized_allreduce(x)) if comm.rank == 0 else None
        if comm.rank:
            for _ in range(3):
                comm.quantized_allreduce(x)
        comm.barrier()  # until here nobody leaves
        return names

    found = qccl.run_ranks(2, run)[0]
    assert found == listed_for("quantized_allreduce")
