"""gpu-check's modules, which lie in tests/gpu, and fake GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import fake_kernels
import pytest

MODULES = Path(__file__).parents[1] / "gpu"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules, imported for one test only: their names are common words."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(MODULES), *sys.path])
    yield
    for name in {path.stem for path in MODULES.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def world() -> Iterator[fake_cuda.World]:
    """Fake GPUs, which the libraries show."""
    world = fake_cuda.World(1)
    with fake_cuda.installed(world, fake_kernels.work):
        yield world
