"""Element types: their names, their sizes, and their numbers in NCCL and in the kernels."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from qccl.base.errors import ArgumentError
from qccl.base.scalars import as_integer

__all__ = ["BFLOAT16", "BYTES", "DTYPES", "FLOAT16", "FLOAT32", "DType", "DTypeLike", "get"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: the name in NumPy, torch and JAX.
        itemsize: bytes per element.
        code: the number in the kernels (``kernels/shared/numeric.h``).
        nccl: the value of ``ncclDataType_t``.
        mantissa_bits: stored bits of the fraction; half a unit in the last place is 2**-(mantissa_bits + 1).
        min_exponent: the exponent of the smallest normal number.
    """

    name: str
    itemsize: int
    code: int
    nccl: int
    mantissa_bits: int
    min_exponent: int

    def __hash__(self) -> int:
        return self.code

    def __str__(self) -> str:
        return self.name


#: the arguments that get() accepts
DTypeLike = DType | str | int | Any

FLOAT32 = DType("float32", 4, 0, 7, 23, -126)
FLOAT16 = DType("float16", 2, 1, 6, 10, -14)
BFLOAT16 = DType("bfloat16", 2, 2, 9, 7, -126)
DTYPES = (FLOAT32, FLOAT16, BFLOAT16)
#: the type of arrays that hold codes (codecs.Encoded), which have no arithmetic
BYTES = DType("uint8", 1, 3, 1, 0, 0)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES} | {"float": FLOAT32, "half": FLOAT16}
_BY_NCCL = {dtype.nccl: dtype for dtype in DTYPES}


def get(spec: DTypeLike) -> DType:
    """The DType for a name, a value of ncclDataType_t, a DType, or a type of NumPy, torch or JAX.

    Raises ArgumentError for anything else.
    """
    if isinstance(spec, DType):
        return spec
    number = as_integer(spec)
    found = _BY_NAME.get(_name(spec)) if number is None else _BY_NCCL.get(number)
    if found is not None:
        return found
    allowed = ", ".join(f"{d.name} (NCCL {d.nccl})" for d in DTYPES)
    close = difflib.get_close_matches(str(spec), _BY_NAME, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ArgumentError(f"dtype {spec!r} is not supported; the element types are {allowed}.{hint}")


def _name(spec: Any) -> str:
    """The name in a text, an ``x.dtype``, a class such as ``numpy.float32``, or a ``torch.float32``."""
    name = spec if isinstance(spec, str) else getattr(spec, "name", None) or getattr(spec, "__name__", None)
    return (name if isinstance(name, str) else str(spec)).removeprefix("torch.")
