"""Nothing of the tests may outlive them: faulthandler ends a process that hangs, with its stacks."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends within its time: 120 s, 600 s for those marked slow or lab."""
    patient = request.node.get_closest_marker("slow") or request.node.get_closest_marker("lab")
    faulthandler.dump_traceback_later(600 if patient else 120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
