"""bench/peers.py: what a rank measures, and which rows are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import patience
import pytest
from plain_ranks import free_ports

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def ranks(system: str, folder: Path, ports: list[int], size: int = 2) -> list[dict]:
    """What the ranks write that reduce 5,000 values with a system."""
    task = {"system": system, "folder": str(folder), "cases": [{"count": 5000, "calls": 2}]}
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(ports[0]), "QCCL_PORT": str(ports[1])}
    command = [sys.executable, str(BENCH / "peer_rank.py"), json.dumps(task)]
    own = [os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    running = [subprocess.Popen(command, env=each) for each in own]
    try:
        assert [process.wait(60 * patience.factor()) for process in running] == [0] * size
    finally:
        for process in running:
            process.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(("system", "least", "most"), [("gloo bf16", 1e-3, 1e-2), ("qccl minmax8", 5e-3, 2e-2)])
def test_ranks_find_the_error_of_a_system(system, least, most, tmp_path):
    from peers import _row

    (first,), (second,) = ranks(system, tmp_path, free_ports(2))
    row = _row((first, second), 2)
    assert row["equal"] and row["count"] == 5000 and least < row["error"] < most and abs(row["bias"]) < 1e-2
    assert len(row["blocks"]) == 3 and row["seconds"] > 0


def test_what_a_system_raises_is_its_result(tmp_path):
    found = ranks("PCCL", tmp_path, free_ports(2))
    assert all("ModuleNotFoundError" in each["error"] for each in found)


def test_error_and_bias():
    from peer_rank import errors

    exact = np.array([3.0, 4.0])
    assert errors(np.float32([3, 4]), exact) == {"error": 0, "bias": 0}
    assert errors(np.float32([1.5, 2]), exact) == {"error": 0.5, "bias": -0.5}


def row(system: str, error: float, seconds: float, **more) -> dict:
    return (
        {"network": "1gbit", "ranks": 2, "count": 1 << 20, "system": system}
        | {"error": error, "seconds": seconds}
        | more
    )


def test_a_system_is_compared_with_the_fastest_codec_that_is_as_exact():
    from peer_report import comparisons, verdict

    rows = [
        row("gloo", 3e-8, 4.0),
        row("gloo bf16", 3e-3, 2.0),
        row("qccl none", 4e-8, 3.0),
        row("qccl cast", 2e-3, 2.5),
        row("qccl minmax8", 9e-3, 1.0),
        row("qccl none", 4e-8, 1.0, ranks=4),
    ]
    found = {theirs["system"]: own["seconds"] for theirs, own in comparisons({"rows": rows})}
    assert found == {"gloo": 3.0, "gloo bf16": 2.5}
    text = verdict({"rows": rows})
    assert (
        "compared 2 times" in text and "faster 1 times" in text and "| gloo bf16 | 2 x 1gbit | 4M | 2e+03 ms |" in text
    )


def test_a_system_that_qccl_cannot_match_is_not_compared():
    from peer_report import comparisons

    assert not list(comparisons({"rows": [row("other", 1e-4, 1.0), row("qccl minmax8", 9e-3, 0.5)]}))
