"""bench/recording.py: its program in native code, and its table; no time is asserted."""

import subprocess

import pytest
import recording

pytestmark = pytest.mark.slow


def test_the_program_prints_each_cost_with_its_limits(tmp_path):
    program = recording.compiled(tmp_path)
    found = recording.costs(program, blocks=10)
    assert list(found) == ["call", "records", "statistics"]
    for middle, low, high in found.values():
        assert low <= middle <= high
    assert found["call"][1] > 0  # calls were made
    refused = subprocess.run([program, "9"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "at least 10" in refused.stderr


def test_shares_are_of_the_calls_time():
    row = {"kind": "plan.run()", "ranks": 2, "us": 4.0}
    found = {"call": [900, 890, 910], "records": [10, 9, 12], "statistics": [20, 19, 21]}
    assert recording.cells(row, found) == [
        "plan.run(), 2 ranks",
        "4.00 us",
        *("10.0 ns (9.0 to 12.0)", "0.25%"),
        *("20.0 ns (19.0 to 21.0)", "0.50%"),
    ]
