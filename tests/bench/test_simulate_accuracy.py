"""bench/simulate_accuracy.py: the fit, the errors and the summary, from a saved document; nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import simulate_accuracy as program

from qccl.bench.doctor.simulated import Constants, Processor

pytestmark = pytest.mark.slow

SPEEDS = {"minmax8": [0.2e-9, 0.2e-9]}
#: a machine that is not that of the defaults
SLOW = replace(Constants(), latency=0.5e-3, message=30e-6)


def document(factor: float = 1.0) -> dict[str, Any]:
    """Calls that took as long as the simulator says of that machine; on 4 ranks ``factor`` times as long."""
    processor = Processor(SLOW, {codec: (encode, decode) for codec, (encode, decode) in SPEEDS.items()})
    rows: list[dict[str, Any]] = [
        {"ranks": ranks, "network": network, "cores": cores, "codec": codec, "size": size}
        for ranks, cores in ((2, 2), (2, 1), (4, 2))
        for network in ("1gbit", "100mbit 25ms")
        for codec in ("minmax8", "none")
        for size in (2048, 1 << 17, 1 << 20)
    ]
    for row in rows:
        row["seconds"] = program.call_seconds(row, processor) * (factor if row["ranks"] == 4 else 1.0)
    return {"machine": {"cores": 2}, "speeds": SPEEDS, "rows": rows}


def test_constants_of_two_ranks_hold_for_four() -> None:
    """The fit sees the calls on two ranks alone; those measured on four take half as long as computed."""
    given = document(factor=0.5)
    rows = program.computed(given)
    assert max(abs(row["error"]) for row in rows if row["ranks"] == 2) < 0.1
    errors = [row["error"] for row in rows if row["ranks"] == 4]
    assert sum(errors) / len(errors) == pytest.approx(1.0, abs=0.3)
    assert given["constants"]["latency"] == pytest.approx(SLOW.latency, rel=0.3)


def test_the_summary_has_the_worst_call_of_each_network() -> None:
    rows = [
        {
            "ranks": ranks,
            "network": network,
            "cores": 2,
            "codec": "none",
            "size": 2048,
            "seconds": 1e-3,
            "computed": 1e-3 * (1 + error),
        }
        | {"error": error}
        for ranks, network, errors in ((2, "1gbit", [0.5]), (4, "1gbit", [0.1, -0.2, 0.12]), (4, "1gbit 5ms", [0.05]))
        for error in errors
    ]
    assert [line[:8] for line in program.summary(rows)] == [
        ("2", "2", "1gbit", "none", "1", "50%", "+50%", "none, 2K"),
        ("4", "2", "1gbit", "none", "3", "12%", "-20%", "none, 2K"),
        ("4", "2", "1gbit", "5ms", "1", "5%", "+5%", "none, 2K"),
    ]
    assert "12% without a delay (3 calls), 5% with one (1 calls)" in program.verdict(rows)


def test_a_run_that_goes_on_measures_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, int]] = []
    monkeypatch.setattr(program, "_timed", lambda *given: asked.append((*given[:2], given[3])) or [])
    monkeypatch.setattr(program.os, "sched_getaffinity", lambda process: {0, 1})
    given = {"ranks": "2,4", "networks": "1gbit,1gbit 5ms", "codecs": "none"}
    have = {"rows": [{"ranks": 2, "network": "1gbit", "cores": 2}]}
    assert len(list(program._measured(have, given))) == 4
    assert asked == [(2, "1gbit", 1), (2, "1gbit 5ms", 2), (4, "1gbit", 2), (4, "1gbit 5ms", 2)]


def test_calls_that_follow_each_other_take_the_time_of_their_bytes() -> None:
    """A burst passes the lab's limiter at once, but not in every call."""
    row = {"ranks": 2, "network": "100mbit", "codec": "none", "size": 16 << 10, "cores": 2}
    assert program.call_seconds(row, Processor()) >= (16 << 10) / 12.5e6
