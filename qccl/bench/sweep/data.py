"""Inputs that each rank can compute for all ranks, so that results are checked without exchanging the inputs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.base.dtypes import DType
from qccl.codecs.floats import from_float32, storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["empty", "gaussian"]

#: the period of the values: a prime, so that a misplaced bucket, chunk or shard is noticed
_PERIOD = 262_139


def empty(count: int, dtype: DType) -> NDArray[Any]:
    """Make an array of ``count`` elements without values."""
    return np.empty(count, storage(dtype))


def gaussian(rank: int, start: int, stop: int, dtype: DType, seed: int) -> NDArray[Any]:
    """Make elements ``start`` to ``stop`` of a rank's input: standard normal values rounded to ``dtype``."""
    pool = _pool(rank, dtype, seed)
    result = np.empty(stop - start, pool.dtype)
    for at in range(start - start % _PERIOD, stop, _PERIOD):
        first, last = max(at, start), min(at + _PERIOD, stop)
        result[first - start : last - start] = pool[first - at : last - at]
    return result


@cache
def _pool(rank: int, dtype: DType, seed: int) -> NDArray[Any]:
    rng = np.random.Generator(np.random.SFC64([seed, rank]))
    return from_float32(rng.standard_normal(_PERIOD, dtype=np.float32), dtype)
