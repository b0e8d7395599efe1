"""Dithering is unbiased.

Every statistic is close to a standard normal number for a perfect generator, and bounded by 6: a perfect one fails
with probability 2e-9 each. Where a count is binomial, at least 100 are expected on either side. The seeds are fixed:
the outcome is the same in every run.
"""

from __future__ import annotations

import numpy as np
import pytest

from qccl.codecs import Dithering

BOUND = 6.0


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(("k", "partition"), [(1, "linear"), (3, "linear"), (127, "linear"), (4, "natural")])
def test_dithering_is_unbiased(k: int, partition: str, norm: str) -> None:
    """The mean over many calls, per element and over all of them; a bucket of zeros is exact."""
    calls, count = 2000, 256
    codec = Dithering(k, partition, norm, 128, seed=1)
    x = np.random.default_rng(k).standard_normal(count).astype(np.float32)
    total, squares = np.zeros(count), np.zeros(count)
    for call in range(calls):
        y = codec.decode(codec.encode(x, call), count, "float32").astype(np.float64)
        total += y
        squares += (y - x) ** 2
    deviation = np.sqrt(squares / calls**2)
    size = np.abs(x.astype(np.float64)) / np.repeat(_norms(x, norm), 128)
    levels = np.array([0, *(2.0 ** (np.arange(1, k + 1) - k) if partition == "natural" else np.arange(1, k + 1) / k)])
    below = np.searchsorted(levels, size, "right") - 1
    gap = np.diff(levels, append=2)[below]
    chance = (size - levels[below]) / gap
    often = (chance > 0.05) & (chance < 0.95)
    assert often.sum() > 10
    error = total / calls - x
    assert (np.abs(error[often]) / deviation[often]).max() < BOUND
    assert abs(error.sum()) / np.sqrt((deviation**2).sum()) < BOUND
    assert (codec.decode(codec.encode(0 * x), count, "float32") == 0).all()


def _norms(x: np.ndarray, norm: str) -> np.ndarray:
    buckets = x.astype(np.float64).reshape(-1, 128)
    return np.abs(buckets).max(axis=1) if norm == "max" else np.linalg.norm(buckets, axis=1)
