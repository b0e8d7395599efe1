"""Some cases of chaos.py: ranks that are killed, stopped, interrupted, late or different."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import patience
import pytest
from start_ranks import needs_ucx

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.starts_first


def chaos(cases: int, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run so many cases, in which no rank does what it must not; the totals, and all that was printed."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "chaos.py"), "--cases", str(cases), *arguments]
    ended = subprocess.run(
        [*command, "--timeout", "3", "--grace", "30"],
        env=os.environ | patience.environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120 * patience.factor(),
        check=False,
    )
    assert ended.stdout, ended.stderr
    total = json.loads(ended.stdout.splitlines()[-1])
    assert total["cases"] == cases, ended.stderr
    assert (total["hangs"], total["wrong values"], total["other wrongs"]) == (0, 0, 0), ended.stderr
    return total, ended.stdout + ended.stderr


@needs_ucx
def test_nobody_hangs_and_explain_names_who_was_struck():
    """A second one may be named beside it: where two ranks of three differ, before the third has made the call."""
    total, output = chaos(40, "--seed", "3", "--jobs", "4", "--notice", str(30 * patience.factor()))
    assert total["inside"] >= 10 and total["to name"] >= 20, output
    assert total["named"] + total["among others"] >= 0.95 * total["to name"], output


@needs_ucx
def test_survivors_go_on_and_take_in_a_new_rank():
    """Over shared memory and TCP."""
    ranks = ("--transports", "ucx,ucx-tcp", "--faults", "killed", "--styles", "shrinks,grows")
    total, output = chaos(6, *ranks, "--seed", "1", "--notice", str(30 * patience.factor()))
    assert total["styles"] == {"shrinks": 3, "grows": 3} and total["to name"] == 6, output


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_ranks_over_gloo_that_are_killed_stopped_or_interrupted():
    faults = ("killed", "stopped for good", "interrupted")
    total, output = chaos(6, "--transports", "gloo", "--faults", ",".join(faults), "--seed", "10", "--jobs", "2")
    assert set(total["styles"]) == {"closed", "caught", "uncaught", "with"}, output
    assert all(f"| {fault} |" in output for fault in faults), output
