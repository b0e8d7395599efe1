"""What tests of meetings share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from clocks import Clock

from qccl.base import deadline
from qccl.meeting import callers, meeting_host, rendezvous


@pytest.fixture
def one_meeting_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes, which number their own meetings; here they are threads of one."""
    monkeypatch.setattr(rendezvous, "_number", lambda place, size, job: 1)


@pytest.fixture
def end_deadlines(monkeypatch: pytest.MonkeyPatch, port: int) -> Callable[[], None]:
    """Ends the deadlines of the ranks that meet at ``port`` when it is called, and wakes rank 0.

    So they can have a long one, and what the test awaits before is not too late on a busy machine.
    """
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)

    def end() -> None:
        clock.ahead = 1000.0
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=60).close()

    return end


@pytest.fixture
def patient_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine rank 0 drops no slow rank, which would call again, and asks for no second proof."""
    for seconds in ("_FRESH_SECONDS", "_PROOF_SECONDS", "_PATIENCE_SECONDS"):
        monkeypatch.setattr(meeting_host, seconds, 120.0)
    monkeypatch.setattr(callers, "HELLO_SECONDS", 120.0)
