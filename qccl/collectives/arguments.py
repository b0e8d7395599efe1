"""Checks of arguments other than arrays: each function returns the converted value or raises ArgumentError."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from qccl import codecs
from qccl.base.errors import ArgumentError
from qccl.base.scalars import as_integer, as_real
from qccl.codecs.base import Codec

__all__ = ["OPS", "CodecLike", "OpLike", "auto_codec", "check_group", "check_key", "check_trace", "checked_chunk"]
__all__ += ["checked_codec", "codec_text", "codecs_of", "count_of", "integer", "integers", "lossiest", "one_of"]
__all__ += ["op_of", "setup_timeout", "timeout_of"]

#: the arguments that qccl.codecs.get accepts, and "auto" and "auto:CODEC" as text where a call may choose
CodecLike = str | Mapping[str, Any] | Codec

#: reduction -> value of ncclRedOp_t
OPS = {"sum": 0, "max": 2, "min": 3, "avg": 4}
_ALIASES = {"mean": "avg"}

#: the arguments that op_of() accepts
OpLike = str | int | Any


def integer(value: Any, what: str) -> int:
    """Any integer except a bool."""
    number = as_integer(value)
    if number is None:
        raise ArgumentError(f"{what} must be an integer, not {value!r}")
    return number


def integers(values: Iterable[Any], what: str) -> tuple[int, ...]:
    """Any iterable of integers, but no dict, whose keys these would be, and no text."""
    if not isinstance(values, Iterable) or isinstance(values, Mapping | str | bytes | bytearray):
        raise ArgumentError(f"{what} must be a list of integers, not {values!r}")
    return tuple(integer(value, f"each of {what}") for value in values)


def auto_codec(codec: CodecLike) -> str | None:
    """The text CODEC of "auto:CODEC", empty for "auto" alone; None: a call does not choose its codec."""
    name, _, most = codec.partition(":") if isinstance(codec, str) else ("", "", "")
    return most.strip() if name.strip() == "auto" else None


def codecs_of(codec: CodecLike) -> tuple[CodecLike, ...]:
    """The codecs that a call may use: the given one; or "none" and CODEC for "auto:CODEC"; "auto" is "auto:minmax8"."""
    most = auto_codec(codec)
    return (codec,) if most is None else ("none", most or "minmax8")


def lossiest(codec: CodecLike) -> Codec:
    """The last codec of codecs_of(), which loses the most. Raises CodecError."""
    return codecs.get(codecs_of(codec)[-1])


def checked_codec(codec: CodecLike) -> CodecLike:
    """A Codec, or "auto:CODEC" as text: the forms that the table of calls finds fast. Raises CodecError."""
    found = lossiest(codec)
    return f"auto:{found.spec()}" if auto_codec(codec) is not None else found


def codec_text(codec: CodecLike) -> str:
    """A text that is equal for equal codecs, also with "auto". Raises CodecError."""
    found = checked_codec(codec)
    return found.spec() if isinstance(found, Codec) else str(found)


def count_of(count: int, what: str = "count") -> int:
    """An integer of at least 0."""
    number = integer(count, what)
    if number < 0:
        raise ArgumentError(f"{what} must be 0 or more, not {count!r}")
    return number


def checked_chunk(chunk: int | None) -> int | None:
    """The elements of a chunk; None means a default by size."""
    if chunk is not None and (chunk := integer(chunk, "chunk")) < 1:
        raise ArgumentError(f"chunk must be a positive number of elements, not {chunk!r}")
    return chunk


def op_of(op: OpLike) -> str:
    """The name of a reduction, given as a name, as NCCL's number, or as an object of torch.distributed or mpi4py."""
    given = _ALIASES.get(op, op) if isinstance(op, str) else _name_in_library(op) or as_integer(op)
    for name, number in OPS.items():
        if given in (name, number):
            return name
    allowed = ", ".join(f"{name} ({number})" for name, number in OPS.items())
    raise ArgumentError(
        f"op {op!r} is not supported; allowed are {allowed}, and the same operations of torch.distributed and mpi4py"
    )


def _name_in_library(op: Any) -> str | None:
    """The lower-case name of a reduction object of torch.distributed or mpi4py; None for anything else.

    A library that is not loaded cannot have made ``op``. torch's objects convert to integers other than NCCL's.
    """
    distributed, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
    reduce_op = getattr(distributed, "ReduceOp", None)  # some builds of torch lack it
    if reduce_op is not None and isinstance(op, (reduce_op, reduce_op.RedOpType)):
        return str(getattr(op, "op", op).name).lower()
    if mpi is not None and isinstance(op, mpi.Op):
        return next((name for name in ("sum", "min", "max") if op == getattr(mpi, name.upper())), None)
    return None


def one_of(value: str, allowed: Collection[str], what: str) -> str:
    """One of the ``allowed`` names."""
    if value not in allowed:
        raise ArgumentError(f"{what} {value!r} is not one of {', '.join(allowed)}")
    return value


def timeout_of(timeout: float | None, default: float | None = None) -> float:
    """A positive number of seconds, within the limit of threading; None means ``default``."""
    seconds = as_real(default if timeout is None else timeout)
    if seconds is None or not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"timeout must be a positive number of seconds (at most {threading.TIMEOUT_MAX:g}), not {timeout!r}"
        )
    return float(seconds)


def setup_timeout(timeout: float | None) -> float:
    """Seconds that the set-up of a communicator may take: its ``timeout``, or 60 if the program gave none."""
    return timeout_of(timeout, 60.0)


def check_trace(trace: Any) -> None:
    """Raise ArgumentError unless ``trace`` is a list, or None."""
    if trace is not None and not hasattr(trace, "append"):
        raise ArgumentError(f"trace must be a list, to which the call appends its events, not {trace!r}")


def check_key(codec: Codec, key: str | None) -> None:
    """Raise ArgumentError unless ``key`` is a string, or None for a codec without state."""
    if key is None and codec.state_names:
        raise ArgumentError(
            f"{codec.spec()} keeps its {' and '.join(codec.state_names)} from call to call, so it needs a name for the "
            f"array: pass key=, the same on all ranks and in all steps, such as key='layer1.weight'"
        )
    if key is not None and not isinstance(key, str):
        raise ArgumentError(f"key must be a string that names the array, not {key!r}")


def check_group(color: int | None, key: int) -> None:
    """Raise ArgumentError unless MPI accepts both for a split: 32-bit integers, and no negative colour."""
    if color is not None and not 0 <= integer(color, "color") < 1 << 31:
        raise ArgumentError(f"color must be 0 to 2**31 - 1, or None for no group; not {color!r}")
    if not -(1 << 31) <= integer(key, "key") < 1 << 31:
        raise ArgumentError(f"key must fit in 32 bits with sign, not {key!r}")
