"""The element types of values: their names, sizes and NCCL's numbers for them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from qccl.errors import ArgumentError

__all__ = ["BFLOAT16", "DTYPES", "FLOAT16", "FLOAT32", "DType", "get"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: as NumPy, torch and JAX spell it.
        itemsize: bytes per element.
        code: number of the type in the kernels (``kernels/numeric.h``).
        nccl: value of ``ncclDataType_t``.
        mantissa_bits: stored fraction bits; half a unit in the last place is 2**-(mantissa_bits + 1).
        min_exponent: exponent of the smallest normal number.
    """

    name: str
    itemsize: int
    code: int
    nccl: int
    mantissa_bits: int
    min_exponent: int

    def __str__(self) -> str:
        return self.name


FLOAT32 = DType("float32", 4, 0, 7, 23, -126)
FLOAT16 = DType("float16", 2, 1, 6, 10, -14)
BFLOAT16 = DType("bfloat16", 2, 2, 9, 7, -126)
DTYPES = (FLOAT32, FLOAT16, BFLOAT16)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES} | {"float": FLOAT32, "half": FLOAT16}
_BY_NCCL = {dtype.nccl: dtype for dtype in DTYPES}


def get(spec: DType | str | int) -> DType:
    """The element type named by ``spec``: a name, NCCL's enum value, or a DType. Raises ArgumentError for others."""
    if isinstance(spec, DType):
        return spec
    found = _BY_NAME.get(spec) if isinstance(spec, str) else _BY_NCCL.get(spec)
    if found is not None:
        return found
    allowed = ", ".join(f"{d.name} (NCCL {d.nccl})" for d in DTYPES)
    close = difflib.get_close_matches(str(spec), _BY_NAME, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ArgumentError(f"dtype {spec!r} is not supported; the element types are {allowed}.{hint}")
