"""Codecs that draw at random: unbiased, independent, and without replacement.

Every statistic is close to a standard normal number for a perfect generator, and bounded by 6: a perfect one fails
with probability 2e-9 each (chi-squares: 1e-8), and there are fewer than 10,000 of them, so below 1e-4 for the whole
file. Where a count is binomial, at least 100 are expected on either side. The seeds are fixed: the outcome is the same
in every run.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracle import RngCounter
from oracle_buckets import RandomK as RandomKOracle

from qccl import codecs
from qccl.codecs import Dithering, RandomK

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


@pytest.mark.parametrize(("k", "block"), [(1, 8), (3, 8), (10, 40), (13, 104), (32, 256)])
def test_random_k_draws_without_replacement_and_alike(k: int, block: int) -> None:
    """Every element as often as any other, and (for larger blocks) every pair."""
    draws = 4000
    codec = RandomKOracle(k, block, seed=5)
    counts, pairs = np.zeros(block), np.zeros((block, block))
    for call in range(draws):
        found = codec.indices(block, RngCounter(call=call))
        assert len(set(found.tolist())) == k
        counts[found] += 1
        pairs[np.ix_(found, found)] += 1
    expected = draws * k / block
    # of k draws without replacement the counts vary by the share (1 - k/n), and sum to a constant
    chi = ((counts - expected) ** 2).sum() / (expected * (1 - k / block)) * (block - 1) / block
    assert abs(chi - (block - 1)) / np.sqrt(2 * (block - 1)) < BOUND
    if block >= 100:
        p = k * (k - 1) / (block * (block - 1))
        upper = pairs[np.triu_indices(block, 1)]
        assert abs(((upper - draws * p) ** 2 / (draws * p * (1 - p))).mean() - 1) < 0.15
        assert np.abs(upper - draws * p).max() / np.sqrt(draws * p) < BOUND + 2  # few expected: skewed to the right


def test_random_k_differs_by_everything_that_keys_it() -> None:
    codec = RandomKOracle(32, 256, seed=5)
    places = [RngCounter(*counter) for counter in itertools.product((0, 1), (0, 1), (0, 1), (0, 256, 1 << 32))]
    drawn = [codec.indices(256, counter) for counter in places] + [
        RandomKOracle(32, 256, seed=6).indices(256, places[0])
    ]
    for a, b in itertools.combinations(drawn, 2):
        common = len(set(a.tolist()) & set(b.tolist()))
        assert common < 4 + BOUND * 2 and a.tolist() != b.tolist()  # 4 expected, deviation 1.75


def test_scaled_random_k_is_unbiased() -> None:
    calls, count = 3000, 128
    codec = RandomK(0.25, 128, seed=2, scale=True)
    x = np.random.default_rng(0).uniform(1, 2, count).astype(np.float32)
    total = np.zeros(count)
    for call in range(calls):
        total += codec.decode(codec.encode(x, call), count, "float32", call=call)
    error = (total / calls - x) / (x * np.sqrt(3 / calls))  # each is 4 x with probability 1/4
    assert np.abs(error).max() < BOUND


def test_the_call_is_needed_to_decode_random_k() -> None:
    codec = codecs.get("randomk:k=0.5,block=64")
    x = np.arange(1, 65, dtype=np.float32)
    wire = codec.encode(x, call=3)
    y = codec.decode(wire, 64, "float32", call=3)
    assert set(y[y != 0].tolist()) <= set(x.tolist()) and (y[y != 0] == x[y != 0]).all()
    assert (codec.decode(wire, 64, "float32") != y).any()
