"""Numbers and truth values as callers have them: Python's, NumPy's, or arrays without axes, made Python's own."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["as_bool", "as_integer", "as_real"]


def as_integer(value: Any) -> int | None:
    """Any integer; None for what is none, or is a truth value."""
    if type(value) is int:  # nearly always; every call of a collective comes here
        return value
    value = _plain(value)
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also of an array with axes, which has the method
        return None


def as_real(value: Any) -> int | float | None:
    """Any real number that is an integer or a binary float; None for what is none, or is a truth value."""
    value = _plain(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def as_bool(value: Any) -> bool | None:
    """A truth value; None for what is none."""
    value = _plain(value)
    return value if isinstance(value, bool) else None


def _plain(value: Any) -> Any:
    """A scalar of NumPy, or an array without axes (as JAX makes learning rates), as Python's; the rest as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
