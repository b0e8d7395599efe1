"""Some cases and groups of chaos.py: ranks that are killed, stopped, interrupted, late or different."""

from __future__ import annotations

import pytest
from chaos_runs import run, run_cases
from start_ranks import needs_ucx

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, pytest.mark.slow, needs_ucx]


def test_nobody_hangs_and_explain_names_who_was_struck():
    """A second one may be named beside it: where two ranks of three differ, before the third has made the call."""
    total, output = run_cases(40, "--seed", "3", "--jobs", "4")
    assert total["inside"] >= 10 and total["to name"] >= 20, output
    assert total["named"] + total["among others"] >= 0.95 * total["to name"], output


@pytest.mark.parametrize(
    ("strikes", "transports"),
    [("kill,join,stop for a moment,stop for good", "ucx"), ("exceptions", "ucx,wan")],
    ids=["losses", "exceptions"],
)
def test_groups_go_on(strikes, transports):
    total, output = run("--seconds", "9", "--seed", "4", "--strikes", strikes, "--transports", transports)
    assert not total["wrong"] and all(total[name]["rounds"] for name in transports.split(",")), output
