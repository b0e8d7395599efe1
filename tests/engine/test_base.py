"""What both engines check of a schedule and of the addresses of its runs, before anything begins."""

from __future__ import annotations

import pytest
from threads import Caller

from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError, EngineError
from qccl.collectives.schedule import Buffer, Exchange, Role, Schedule, Span, Transfer
from qccl.engine.base import caller_buffers
from qccl.transports.loopback import LoopbackGroup

BUFFERS = {
    "x": Buffer(64, FLOAT32, Role.INPUT),
    "out": Buffer(64, FLOAT32, Role.OUTPUT),
    "w": Buffer(64, None, Role.WORK),
}


@pytest.fixture
def caller():
    made = Caller(LoopbackGroup(1).transport(0))
    yield made
    made.close()


@pytest.mark.parametrize("is_send", [True, False])
def test_transfers_are_in_the_workspace(is_send, caller):
    def schedule(name: str) -> Schedule:
        transfer = (Transfer(0, Span(name, 0, 64)),)
        return Schedule("s", 0, 1, BUFFERS, (Exchange(*((transfer, ()) if is_send else ((), transfer))),))

    assert caller_buffers(schedule("w")) == {"x": BUFFERS["x"], "out": BUFFERS["out"]}
    for refuses in (caller_buffers, caller.engine.compile):
        with pytest.raises(EngineError, match="operation 0 transfers 'x'; transfers must be in work buffers"):
            refuses(schedule("x"))


def test_each_buffer_of_the_caller_has_an_address(caller):
    program = caller.program(10)
    for addresses in ({}, {"input": 0}, {"input": 0, "output": 0, "w": 0}):
        with pytest.raises(ArgumentError, match=r"addresses are needed for \['input', 'output'\], not for"):
            caller.run_on(program, addresses, caller.text(10))
