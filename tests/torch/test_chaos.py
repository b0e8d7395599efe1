"""Some cases and groups of chaos.py over gloo."""

from __future__ import annotations

import pytest
from chaos_runs import run, run_cases

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_ranks_that_are_killed_stopped_or_interrupted():
    strikes = ("killed", "stopped for good", "interrupted")
    total, output = run_cases(6, "--transports", "gloo", "--strikes", ",".join(strikes), "--seed", "10", "--jobs", "2")
    assert set(total["styles"]) == {"closed", "caught", "uncaught", "with"}, output
    assert all(f"| {strike} |" in output for strike in strikes), output


def test_exceptions_at_random_moments():
    total, output = run("--seconds", "6", "--seed", "4", "--strikes", "exceptions", "--transports", "gloo")
    assert not total["wrong"] and total["gloo"]["exceptions"], output
