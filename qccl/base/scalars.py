"""Convert numbers and booleans of Python or NumPy, zero-dimensional arrays, and times in words, to Python's types."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

__all__ = ["MOST_RANKS", "as_bool", "as_integer", "as_real", "parse_seconds"]

#: most ranks of a group: a larger number is a mistake, and would take all memory
MOST_RANKS = 1 << 20
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def as_integer(value: Any) -> int | None:
    """``value`` as an int; None if it is not an integer, or is a boolean."""
    if type(value) is int:  # the usual case: every call takes this path
        return value
    value = _plain(value)
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # not an integer, or an array with axes, which has __index__, too
        return None


def as_real(value: Any) -> int | float | None:
    """``value`` as an int or float; None if it is neither, or is a boolean."""
    value = _plain(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def as_bool(value: Any) -> bool | None:
    """``value`` as a bool; None if it is not a boolean."""
    value = _plain(value)
    return value if isinstance(value, bool) else None


def parse_seconds(text: str) -> float:
    """Seconds of "20ms", "1.5 s", "300us". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a time; give a positive number with us, ms or s, such as 20ms")
    return seconds


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar or zero-dimensional array (JAX's learning rates are such); return others unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
