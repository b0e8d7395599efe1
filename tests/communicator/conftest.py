from __future__ import annotations

import pytest

from qccl.communicator import measuring


@pytest.fixture
def short_measurements(monkeypatch):
    """Enough for a choice; a good one is not needed here."""
    monkeypatch.setattr(measuring, "_LIMIT", 0.05)
    monkeypatch.setattr(measuring, "_SLICE", 0.005)
