"""Hard data, the same in every process."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
from kernel_calls import hard_values

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def hard_data(kind: str, length: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """``length`` values of one kind of trouble, different on each rank, the same in every process."""
    rng = np.random.default_rng([zlib.crc32(kind.encode()), length, rank])
    return hard_values(kind, length, dtype.name, rng).view(dtype)


def stored(x: np.ndarray) -> np.ndarray:
    """As the oracle wants it: bfloat16 as uint16."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
