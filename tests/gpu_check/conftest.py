"""gpu-check's modules, which lie in tests/gpu, and its fake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PLACES = (Path(__file__).parents[1] / "gpu", Path(__file__).parent)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules, imported for one test only: their names are common words."""
    before = set(sys.modules)
    for place in PLACES:
        monkeypatch.syspath_prepend(place)
    yield
    for name in {path.stem for place in PLACES for path in place.glob("*.py")} - before:
        sys.modules.pop(name, None)
