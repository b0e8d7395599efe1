"""Hard data, the same in every process."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def hard_data(kind: str, length: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """``length`` values of one kind of trouble, different on each rank, the same in every process."""
    rng = np.random.default_rng([zlib.crc32(kind.encode()), length, rank])
    x = rng.standard_normal(length).astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    if kind == "nonfinite":  # here and there, so that some buckets stay whole
        spots = rng.integers(0, max(length, 1), size=min(length, 3))
        x[spots] = np.array([np.nan, np.inf, -np.inf], np.float32)[: len(spots)]
    elif kind == "zeros":
        x[:] = 0
        x[::3] = -0.0
    elif kind == "subnormal":
        x *= np.float32(float(ml_dtypes.finfo(dtype).tiny) / 4)
    elif kind == "constant":
        x[:] = -1.7 * (rank + 1)
    elif kind == "negative":
        x = -np.abs(x) - 3
    elif kind == "huge":  # max - min overflows; the sum of some ranks too, which must then not be finite
        x = np.clip(x, -1, 1) * np.float32(min(limit, 1e38) * 0.99)
    elif kind == "outliers":
        x[rng.random(length) < 1e-3] *= 1000
    return x.astype(dtype)


def stored(x: np.ndarray) -> np.ndarray:
    """As the oracle wants it: bfloat16 as uint16."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
