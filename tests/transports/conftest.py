"""What tests of meetings share."""

from __future__ import annotations

import pytest

from qccl.transports import rendezvous


@pytest.fixture
def one_meeting_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes, which number their own meetings; here they are threads of one."""
    monkeypatch.setattr(rendezvous, "_number", lambda place, size, job: 1)
