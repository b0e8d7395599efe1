"""A schedule compiled for the host: what is refused, and runs that share a program and its workspace."""

from __future__ import annotations

import pytest
from threads import CODEC, Caller, outcomes

from qccl.base.errors import ArgumentError, EngineError
from qccl.collectives.schedule import Buffer, Encode, Role, Schedule, Span


def test_refusals_when_compiling():
    wire = Buffer(72, None, Role.WORK)

    def run(t):
        caller = Caller(t)
        encode = Encode(CODEC, Span("w", 0, 64), Span("w", 0, 72), 0)
        with pytest.raises(EngineError, match="a buffer of bytes"):
            caller.engine.compile(Schedule("s", t.rank, 2, {"w": wire}, (encode,)))
        with pytest.raises(ArgumentError, match="rank 0 of 3"):
            caller.engine.compile(Schedule("s", 0, 3, {}, ()))
        caller.close()
        return True

    assert outcomes(2, run) == [True, True]
