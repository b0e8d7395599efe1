"""Numbers and booleans of Python, NumPy and arrays without axes, and times in words."""

from __future__ import annotations

import numpy as np
import pytest

from qccl.base.scalars import as_bool, as_integer, as_real, parse_seconds


class Index:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("value", "integer", "real", "boolean"),
    [
        (3, 3, 3, None),
        (-2.5, None, -2.5, None),
        (True, None, None, True),
        (np.int8(-3), -3, -3, None),
        (np.uint64(1 << 63), 1 << 63, 1 << 63, None),
        (np.float32(0.5), None, 0.5, None),
        (np.bool_(False), None, None, False),
        (np.array(4), 4, 4, None),
        (np.array(True), None, None, True),
        (np.array([4]), None, None, None),
        (Index(), 7, None, None),
        *((each, None, None, None) for each in ("3", b"3", None, 1j, [3])),
    ],
)
def test_conversions(value, integer, real, boolean):
    found = as_integer(value), as_real(value), as_bool(value)
    assert found == (integer, real, boolean)
    assert all(type(each) in (int, float, bool, type(None)) for each in found)


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), (" 1.5 S ", 1.5), ("300us", 3e-4)])
def test_times_in_words(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "20", "0s", "-1s", "1.s", "1 h", "1e3s", "٣s1", "9" * 400 + "s"])
def test_times_that_are_refused(text):
    with pytest.raises(ValueError, match="is not a time"):
        parse_seconds(text)
