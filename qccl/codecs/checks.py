"""Checks of codecs' parameters; each raises CodecError with what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from qccl.codecs.base import MAX_BUCKET
from qccl.errors import CodecError

__all__ = ["check_bucket", "check_choice", "check_flag", "check_integer", "check_seed", "is_integer"]


def is_integer(value: object) -> bool:
    """Whether ``value`` is an int and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_integer(codec: str, key: str, value: object, least: int, most: int) -> None:
    """An integer from ``least`` to ``most``."""
    if not (isinstance(value, int) and is_integer(value) and least <= value <= most):
        raise CodecError(f"{codec}: {key}={value!r} is not possible; allowed are the integers {least} to {most}")


def check_bucket(codec: str, key: str, value: object, most: int = MAX_BUCKET) -> None:
    """A multiple of 8."""
    if not (isinstance(value, int) and is_integer(value) and 8 <= value <= most and value % 8 == 0):
        raise CodecError(f"{codec}: {key}={value!r} is not possible; allowed are multiples of 8 from 8 to {most}")


def check_choice(codec: str, key: str, value: object, allowed: Sequence[str]) -> None:
    """One of some words."""
    if value not in allowed:
        raise CodecError(f"{codec}: {key}={value!r} is not known; allowed are {', '.join(allowed)}")


def check_flag(codec: str, key: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise CodecError(f"{codec}: {key}={value!r} is not possible; allowed are true and false")


def check_seed(codec: str, value: object) -> None:
    """A word of 64 bits."""
    if not (isinstance(value, int) and is_integer(value) and 0 <= value < 1 << 64):
        raise CodecError(f"{codec}: seed={value!r} is not possible; allowed are the integers 0 to 2**64 - 1")
