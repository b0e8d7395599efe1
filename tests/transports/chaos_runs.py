"""Runs tests/tools/chaos.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import patience

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """The totals, and all that was printed."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tools" / "chaos.py"), *arguments],
        env=os.environ | patience.environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120.0 * patience.factor(),
        check=False,
    )
    assert ended.stdout, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stdout + ended.stderr


def run_cases(cases: int, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run so many cases, in which no rank does what it must not."""
    factor = patience.factor()
    limits = {"--timeout": 3 * factor, "--grace": 30 * factor, "--notice": 30 * factor}
    flags = [text for flag, seconds in limits.items() for text in (flag, str(seconds))]
    total, output = run("--cases", str(cases), *arguments, *flags)
    assert total["cases"] == cases, output
    assert (total["hangs"], total["wrong values"], total["other wrongs"]) == (0, 0, 0), output
    return total, output
