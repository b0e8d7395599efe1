"""Stochastic rounding: unbiased, and independent between elements, ranks, rounds, calls and seeds.

Every statistic here is close to a standard normal number (or a chi-square made into one) for a perfect generator. A
bound of 6 on each lets a perfect generator fail with probability 2e-9 per statistic (1e-8 for the chi-squares, which
have thousands of degrees of freedom), and there are less than 10,000 of them: below 1e-4 for the whole file. The seeds
are fixed, so the outcome is the same in every run.
"""

from __future__ import annotations

import kernel_calls
import numpy as np
import oracle
import pytest
from oracle import MinMax, RngCounter

BOUND = 6.0
COUNT = 1 << 18

COUNTERS = [
    RngCounter(call, round, rank, high << 32)
    for call in range(2)
    for round in range(2)
    for rank in range(3)
    for high in range(2)
]


def chi_square(cells: np.ndarray) -> float:
    """Pearson's statistic of equally likely cells, in standard deviations from its mean."""
    expected = cells.mean()
    return float((((cells - expected) ** 2).sum() / expected - (cells.size - 1)) / np.sqrt(2 * (cells.size - 1)))


def pair_cells(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Counts of the 64 x 64 cells of two streams' upper six bits."""
    return np.bincount(((a >> 26) << 6) | (b >> 26), minlength=1 << 12)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two streams as numbers in [-1, 1), in standard deviations."""
    x, y = (words.astype(np.float64) / 2**31 - 1 for words in (a, b))
    return float((x * y).sum() * 3 / np.sqrt(x.size))


@pytest.fixture(scope="module")
def streams() -> list[np.ndarray]:
    return [oracle.random_words(COUNT, seed, counter) for seed in (0, 1) for counter in COUNTERS]


def test_words_are_uniform(streams: list[np.ndarray]) -> None:
    """The upper 24 bits, which rounding uses: as 12-bit digits, and each bit by itself."""
    for words in streams:
        assert abs(chi_square(np.bincount(words >> 20, minlength=1 << 12))) < BOUND
        assert abs(chi_square(np.bincount((words >> 8) & 0xFFF, minlength=1 << 12))) < BOUND
        for bit in range(8, 32):
            assert abs(2 * int(((words >> bit) & 1).sum()) - COUNT) / np.sqrt(COUNT) < BOUND


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 256, 1024, 4096])
def test_elements_are_independent(lag: int, streams: list[np.ndarray]) -> None:
    for words in streams:
        assert abs(correlation(words[:-lag], words[lag:])) < BOUND
        assert abs(chi_square(pair_cells(words[:-lag], words[lag:]))) < BOUND


def test_streams_are_independent(streams: list[np.ndarray]) -> None:
    """Streams that differ in seed, call, round, rank or upper index half: each with each, at equal elements."""
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(correlation(a, b)) < BOUND
            assert abs(chi_square(pair_cells(a, b))) < BOUND


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_rounding_is_unbiased(bits: int) -> None:
    """The mean over many calls, per element and over all of them, is the value itself."""
    calls, count = 2000, 1024
    codec = MinMax(bits, 1024, stochastic=True, seed=1)
    x = np.random.default_rng(bits).uniform(-1, 1, count).astype(np.float32)
    x[:2] = -1, 1
    unit = 2 / codec.levels
    total = np.zeros(count)
    for call in range(calls):
        wire = kernel_calls.encode(codec, x, "float32", RngCounter(call=call))
        total += kernel_calls.decode(codec, wire, count, "float32")
    below = np.floor((x.astype(np.float64) + 1) / unit)
    fraction = (x.astype(np.float64) + 1) / unit - below
    error = total / calls - x.astype(np.float64)
    assert error[0] == error[1] == 0  # the ends of the range are exact
    deviation = unit * np.sqrt(fraction * (1 - fraction) / calls)
    often = (fraction > 0.05) & (fraction < 0.95)  # at least 100 expected on either side: close to normal
    assert (abs(error[often]) / deviation[often]).max() < BOUND
    assert abs(error.sum()) / np.sqrt((deviation**2).sum()) < BOUND


def test_same_key_same_bytes_other_key_other_bytes() -> None:
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)

    def wire(seed: int = 1, **counter: int) -> bytes:
        return kernel_calls.encode(MinMax(4, 1024, True, seed), x, "float32", RngCounter(**counter)).tobytes()

    assert wire() == wire()
    others = [wire(seed=2), wire(call=1), wire(round=1), wire(rank=1), wire(index=1024), wire(index=1 << 32)]
    assert len({wire(), *others}) == 7


def test_a_value_that_is_a_code_never_rounds_up() -> None:
    """Not even where the random number is zero, as it is for this element."""
    counter = RngCounter(index=1631927)
    assert oracle.random_words(1, 0, counter)[0] >> 8 == 0
    x = np.array([1, 0, 3], np.float32)
    wire = kernel_calls.encode(MinMax(2, 8, stochastic=True), x, "float32", counter)
    assert (kernel_calls.decode(MinMax(2, 8), wire, 3, "float32") == x).all()
