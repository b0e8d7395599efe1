"""Ranks with a delay between them, each in a network namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from start_ranks import needs_ucx

from qccl.bench import lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(lab.obstacle() is not None, reason=lab.obstacle() or "there is a lab"),
]

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
#: rank 0 is near the others, which are far from each other: it ends a call before they do
SITES = """
delay = "5ms"

[sites.near]
ranks = [0]
link = "100mbit"

[sites.east]
ranks = [1]
link = "100mbit"

[sites.west]
ranks = [2]
link = "100mbit"

[[between]]
sites = ["east", "west"]
delay = "60ms"
"""


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_ucx), "wan"])
def test_a_rank_that_shrinks_after_a_call_ends_it_on_no_other_rank(transport, tmp_path):
    """At that moment the others still wait for the last bytes of the call."""
    (tmp_path / "sites.toml").write_text(SITES)
    program = [sys.executable, str(ROOT / "tests" / "support" / "far_ranks.py"), "shrink"]
    network = ["--ranks", str(RANKS), "--sites", str(tmp_path / "sites.toml")]
    environment = os.environ | patience.environment() | {"QCCL_TRANSPORT": transport, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "qccl.bench", "run", *network, "--", *program],
        env=environment | {"QCCL_TOKEN": "a token of this test alone"} if transport == "wan" else environment,
        capture_output=True,
        text=True,
        timeout=120 * patience.factor(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [f"rank {rank} of {RANKS} over {transport} is done" for rank in range(RANKS)]
    assert all(line in done.stdout for line in lines), done.stdout + done.stderr
