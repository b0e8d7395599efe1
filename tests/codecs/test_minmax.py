"""The derived error bound of min-max: never exceeded, and at most about twice the error of the worst data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_calls import FINITE_KINDS, KINDS, errors, hard_values

from qccl.codecs import MinMax, NoCodec

ROUNDINGS = ("nearest", "stochastic")


@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_bound_holds(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for bits, rounding, bucket in itertools.product(range(1, 9), ROUNDINGS, (8, 256, "shard")):
        codec = MinMax(bits, bucket, rounding, seed=3)
        x = hard_values(kind, 2053, "float32", rng)
        excess = errors(codec, x) - codec.error_bound(x)
        assert excess.max() <= 0, f"{codec} on {kind}: element {excess.argmax()} by {excess.max()}"


@pytest.mark.parametrize("exponent", [-149, -140, -126, -101, -99, 0, 100, 126])
def test_bound_holds_at_every_scale(exponent: int) -> None:
    """Ranges around the thresholds where the arithmetic is rescaled, with an offset and without."""
    rng = np.random.default_rng(exponent + 200)
    for bits, rounding, offset in itertools.product((1, 2, 5, 8), ROUNDINGS, (0.0, 1.0, -100.0)):
        x = (np.ldexp(rng.uniform(-1, 1, 512) + offset, exponent) % np.float64(3.4e38)).astype(np.float32)
        codec = MinMax(bits, 64, rounding)
        assert (errors(codec, x) <= codec.error_bound(x)).all(), codec


@pytest.mark.parametrize("bits", range(1, 9))
def test_bound_is_reached_within_a_factor_of_two(bits: int) -> None:
    """Values halfway between codes for nearest; just off a code, drawn often, for stochastic."""
    levels = 2**bits - 1
    halfway = np.concatenate([[-1, 1], -1 + (2 * np.arange(levels) + 1) / levels]).astype(np.float32)
    codec = MinMax(bits, "shard")
    assert (errors(codec, halfway) / codec.error_bound(halfway))[2:].min() > 0.5
    near = np.concatenate([[-1, 1], np.full(1022, -1 + 2 / levels * 0.05)]).astype(np.float32)
    codec = MinMax(bits, 1024, "stochastic")
    assert (errors(codec, near) / codec.error_bound(near)).max() > 0.5


def test_bound_is_reached_within_a_factor_of_two_where_rounding_dominates() -> None:
    """A range of ten units in the last place around 1000: roundings are as large as half a step."""
    rng = np.random.default_rng(0)
    place = 2.0**-14
    x = np.float32(1000) + (rng.integers(0, 11, 1 << 16) * place).astype(np.float32)
    codec = MinMax(3, 64)
    assert (errors(codec, x) / codec.error_bound(x)).max() > 0.5


def test_constant_data_and_the_ends_of_the_range_are_exact() -> None:
    for value in (0.0, -0.0, 1e38, -1e38, 3.4e38, 1e-45, -7.25):
        x = np.full(100, value, np.float32)
        for bits in (1, 8):
            codec = MinMax(bits, 64)
            assert errors(codec, x).max() == 0 == codec.error_bound(x).max()
    x = np.random.default_rng(0).standard_normal(64 * 50).astype(np.float32)
    for bits, rounding in itertools.product(range(1, 9), ROUNDINGS):
        found = errors(MinMax(bits, 64, rounding), x).reshape(50, 64)
        buckets = x.reshape(50, 64)
        rows = np.arange(50)
        assert (found[rows, buckets.argmin(axis=1)] == 0).all()
        assert (found[rows, buckets.argmax(axis=1)] == 0).all()


def test_shapes_and_the_plain_codec() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    assert MinMax(4, 8).error_bound(x).shape == x.shape
    assert MinMax(4, 8).error_bound(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert (NoCodec().error_bound(x) == 0).all() and errors(NoCodec(), x.reshape(-1)).max() == 0
