"""What both engines check of a schedule and of the addresses of its runs, before anything begins."""

from __future__ import annotations

import pytest
from threads import Caller, outcomes

from qccl.dtypes import FLOAT32
from qccl.engine.checks import caller_buffers, check_addresses
from qccl.errors import ArgumentError, EngineError
from qccl.schedule import Buffer, Exchange, Role, Schedule, Span, Transfer

BUFFERS = {
    "x": Buffer(64, FLOAT32, Role.INPUT),
    "out": Buffer(64, FLOAT32, Role.OUTPUT),
    "w": Buffer(64, None, Role.WORK),
}


@pytest.mark.parametrize("is_send", [True, False])
def test_transfers_are_in_the_workspace(is_send):
    def schedule(rank: int, name: str) -> Schedule:
        transfer = (Transfer(1 - rank, Span(name, 0, 64)),)
        return Schedule("s", rank, 2, BUFFERS, (Exchange(*((transfer, ()) if is_send else ((), transfer))),))

    assert caller_buffers(schedule(0, "w")) == {"x": BUFFERS["x"], "out": BUFFERS["out"]}
    with pytest.raises(EngineError, match="operation 0 transfers 'x'; transfers must be in work buffers"):
        caller_buffers(schedule(0, "x"))

    def run(t):
        caller = Caller(t)
        with pytest.raises(EngineError, match="transfers must be in work buffers"):
            caller.engine.compile(schedule(t.rank, "out"))
        caller.close()

    assert outcomes(2, run) == [None] * 2


@pytest.mark.parametrize("addresses", [{}, {"x": 0}, {"x": 0, "out": 0, "w": 0}])
def test_each_buffer_of_the_caller_has_an_address(addresses):
    needed = {"x": BUFFERS["x"], "out": BUFFERS["out"]}
    check_addresses({"out": 1, "x": 0}, needed)
    with pytest.raises(ArgumentError, match=r"addresses are needed for \['out', 'x'\], not for"):
        check_addresses(addresses, needed)

    def run(t):
        caller = Caller(t)
        with pytest.raises(ArgumentError, match=r"needed for \['input', 'output'\], not for \['input'\]"):
            caller.run_on(caller.program(10), {"input": 0}, caller.text(10))
        caller.close()

    assert outcomes(1, run) == [None]
