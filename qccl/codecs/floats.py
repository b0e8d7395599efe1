"""Conversion of float32, float16 and bfloat16 arrays to float32 and back; bfloat16 is stored as NumPy's uint16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.base.dtypes import BFLOAT16, DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["from_float32", "storage", "to_float32"]


def storage(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds the elements."""
    return np.dtype(np.uint16 if dtype is BFLOAT16 else dtype.name)


def from_float32(x: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Values rounded to the nearest of ``dtype``, ties to even; NaNs must be quiet ones."""
    if dtype is not BFLOAT16:
        return x.astype(dtype.name)
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def to_float32(x: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """The same values as float32, exactly."""
    if dtype is not BFLOAT16:
        return x.astype(np.float32)
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
