"""bench/recording.py: its program in native code, and its table; no time is asserted."""

import subprocess

import pytest
import recording

pytestmark = pytest.mark.slow


def test_the_program_prints_each_cost(tmp_path):
    program = recording.compiled(tmp_path)
    found = recording.costs(program, processes=2, blocks=10)
    assert list(found) == ["call", "records", "statistics"]
    for values in found.values():
        assert len(values) == 2
        assert values == sorted(values)
    assert found["call"][0] > 0  # calls were made
    refused = subprocess.run([program, "9"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "at least 10" in refused.stderr


def test_shares_are_of_the_calls_time():
    row = {"kind": "plan.run()", "ranks": 2, "us": 4.0}
    found = {"call": [900, 910], "records": [9, 10, 12], "statistics": [19, 20, 21]}
    assert recording.cells(row, found) == [
        "plan.run(), 2 ranks",
        "4.00 us",
        *("10.0 ns (9.0 to 12.0)", "0.30%"),
        *("20.0 ns (19.0 to 21.0)", "0.53%"),
    ]
