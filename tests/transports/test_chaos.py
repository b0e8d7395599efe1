"""Some cases of chaos.py: ranks that are killed, stopped, interrupted, late or different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import patience
from start_ranks import needs_ucx

ROOT = Path(__file__).parents[2]
pytestmark = needs_ucx


def test_nobody_hangs_and_explain_names_who_was_struck():
    """A second one may be named beside it: where two ranks of three differ, before the third has made the call."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "chaos.py"), "--cases", "40", "--seed", "3"]
    ended = subprocess.run(
        [*command, "--jobs", "4", "--timeout", "3"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120 * patience.factor(),
        check=False,
    )
    assert ended.stdout, ended.stderr
    total = json.loads(ended.stdout.splitlines()[-1])
    assert total["cases"] == 40, ended.stderr
    assert (total["hangs"], total["wrong values"], total["other wrongs"]) == (0, 0, 0), ended.stderr
    assert total["inside"] >= 10 and total["to name"] >= 20, ended.stdout
    assert total["named"] + total["among others"] >= 0.95 * total["to name"], ended.stdout + ended.stderr
