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


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_ucx), "wan"])
def test_a_rank_that_shrinks_after_a_call_ends_it_on_no_other_rank(transport):
    """At that moment the others still wait for the last bytes of the call."""
    program = [sys.executable, str(ROOT / "tests" / "support" / "far_ranks.py"), "shrink"]
    network = ["--ranks", str(RANKS), "--link", "100mbit", "--delay", "25ms"]
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
