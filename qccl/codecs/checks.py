"""Checks of codecs' parameters, for ``__post_init__``. Each raises CodecError with the given and the allowed values.

Numbers are stored as Python's int or float, so that equal parameters make equal codecs, whatever type was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qccl.base.errors import CodecError
from qccl.base.removed import VALUES
from qccl.base.scalars import as_bool, as_integer
from qccl.codecs.base import MAX_BUCKET, Codec

__all__ = ["check_block", "check_bucket", "check_choice", "check_flag", "check_integer", "check_seed", "keep"]


def keep(codec: Codec, key: str, value: Any) -> None:
    """Store ``value`` as a parameter of a codec under construction."""
    object.__setattr__(codec, key, value)  # the dataclass is frozen


def check_integer(codec: Codec, key: str, least: int, most: int) -> None:
    """Check that a parameter is an integer from ``least`` to ``most``."""
    value = as_integer(getattr(codec, key))
    if value is None or not least <= value <= most:
        raise _refused(codec, key, f"the integers {least} to {most}")
    keep(codec, key, value)


def check_bucket(codec: Codec, key: str, most: int = MAX_BUCKET, other: str = "", step: int = 8) -> None:
    """Check that a parameter is a multiple of ``step``, or the word ``other`` unless that is empty."""
    if other and getattr(codec, key) == other:
        return
    value = as_integer(getattr(codec, key))
    if value is None or not step <= value <= most or value % step:
        raise _refused(codec, key, f"multiples of {step} from {step} to {most}" + (f', and "{other}"' if other else ""))
    keep(codec, key, value)


def check_block(codec: Codec, allowed: Sequence[int]) -> None:
    """Check that the block has one of the sizes ``allowed``."""
    value = as_integer(codec.block)  # type: ignore[attr-defined]
    if value not in allowed:
        raise _refused(codec, "block", ", ".join(map(str, allowed)))
    keep(codec, "block", value)


def check_choice(codec: Codec, key: str, allowed: Sequence[str]) -> None:
    """Check that a parameter is one of the words ``allowed``."""
    if (value := getattr(codec, key)) not in allowed:
        if instead := VALUES.get(f"{codec.name}:{key}={value}"):
            raise CodecError(f"{codec.name}: there is no {key}={value} any more; {instead}")
        raise CodecError(f"{codec.name}: {key}={value!r} is not known; allowed are {', '.join(allowed)}")


def check_flag(codec: Codec, key: str) -> None:
    """Check that a parameter is True or False."""
    value = as_bool(getattr(codec, key))
    if value is None:
        raise _refused(codec, key, "true and false")
    keep(codec, key, value)


def check_seed(codec: Codec) -> None:
    """Check that the seed is an unsigned integer of 64 bits."""
    value = as_integer(codec.seed)  # type: ignore[attr-defined]
    if value is None or not 0 <= value < 1 << 64:
        raise _refused(codec, "seed", "the integers 0 to 2**64 - 1")
    keep(codec, "seed", value)


def _refused(codec: Codec, key: str, allowed: str) -> CodecError:
    return CodecError(f"{codec.name}: {key}={getattr(codec, key)!r} is not possible; allowed are {allowed}")
