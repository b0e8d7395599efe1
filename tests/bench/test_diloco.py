"""bench/diloco.py: a rank's timing, on threads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import qccl

PATH = Path(__file__).parents[2] / "bench" / "diloco.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under a name of its own: docs/examples has another one of this name."""
    monkeypatch.setattr(sys, "path", [str(PATH.parent), *sys.path])
    spec = importlib.util.spec_from_file_location("bench_diloco", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_a_rank_times_steps_with_and_without_outer_steps(bench: Any, kind: str) -> None:
    task = {"way": [6, kind, "minmax4+ef"], "delay": 2, "link": None, "compute": 0.0, "shapes": [[64, 8], [8], [8, 64]]}
    for found in qccl.run_ranks(2, lambda comm: bench._time(task, comm)):
        assert len(found["blocks"]) == len(found["alone"]) and min(found["blocks"] + found["alone"]) > 0
