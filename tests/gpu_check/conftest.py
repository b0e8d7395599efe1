"""gpu-check's modules, which lie in tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = Path(__file__).parents[1] / "gpu"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules, imported for one test only: their names are common words."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(MODULES)
    yield
    for name in {path.stem for path in MODULES.glob("*.py")} - before:
        sys.modules.pop(name, None)
