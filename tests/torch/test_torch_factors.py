"""The arithmetic of low-rank compression: orthonormal rows and sums of outer products, with bits of their own order."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

from qccl.errors import ArgumentError

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from qccl.torch.factors import matrix_shape, orthonormal_rows, outer_sum

#: r rows of n numbers, also odd ones, and as many rows as columns
SHAPES = [(1, 1), (1, 7), (2, 3), (3, 3), (4, 1001), (5, 64)]


def rows_of(shape: tuple[int, int], scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng([*shape]).standard_normal(shape)).astype(np.float32)


def assert_orthonormal(found: np.ndarray) -> None:
    gram = found.astype(np.float64) @ found.T.astype(np.float64)
    assert np.abs(gram - np.eye(len(found))).max() <= 4 * math.sqrt(found.shape[1]) * 2.0**-24


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e38])
def test_rows_are_orthonormal_and_span_the_given_ones(shape, scale):
    given = rows_of(shape, min(scale, 1e37))
    found = orthonormal_rows(given, seed=1)
    assert found.dtype == np.float32
    assert_orthonormal(found)
    if scale > 1e-30:  # subnormal numbers have few digits
        x, q = given.astype(np.float64), found.astype(np.float64)
        assert np.abs(x - (x @ q.T) @ q).max() <= 1e-5 * np.abs(x).max()


@pytest.mark.parametrize("shape", [(2, 3), (4, 1001), (5, 64)])
def test_dependent_rows_are_replaced_by_random_ones(shape):
    """Zeros, equal rows, and rows that are multiples: all directions are used, and the first row stays."""
    for given in (np.zeros(shape), np.ones(shape), np.outer(np.arange(1, shape[0] + 1), rows_of((1, shape[1])))):
        found = orthonormal_rows(given.astype(np.float32), seed=3)
        assert_orthonormal(found)
        if given.any():
            first = given[0] / np.linalg.norm(given[0])
            assert np.abs(found[0] - first).max() <= 1e-6
        other = orthonormal_rows(given.astype(np.float32), seed=4)
        assert (found[-1] != other[-1]).any()


def test_more_rows_than_columns_are_refused():
    with pytest.raises(ArgumentError, match="4 rows of 3 elements"):
        orthonormal_rows(np.ones((4, 3), np.float32), seed=0)


def test_the_random_rows_are_those_of_splitmix64():
    """The published algorithm in Python's integers."""

    def splitmix(state: int) -> int:
        mask = (1 << 64) - 1
        x = state * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    count, seed = 9, 0x89ABCDEF
    (found,) = orthonormal_rows(np.zeros((1, count), np.float32), seed)
    expected = np.array([(splitmix((seed << 16) * count + i) >> 11) * 2.0**-52 - 1 for i in range(count)])
    assert np.array_equal(found, (expected / math.sqrt(math.fsum(expected**2))).astype(np.float32))


@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (3, 5, 2), (129, 1031, 4), (2, 70_000, 3)])
def test_a_sum_of_outer_products_adds_in_the_order_of_the_rows(n, m, r):
    """The bits are those of single float32 operations in NumPy, with any number of threads."""
    p, q = rows_of((r, n)), rows_of((r, m))
    expected = p[0][:, None] * q[0]
    for i in range(1, r):
        expected = expected + p[i][:, None] * q[i]
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            out = torch.full((n, m), math.nan)
            outer_sum(torch.from_numpy(p), torch.from_numpy(q), out)
            assert np.array_equal(out.numpy(), expected)
    finally:
        torch.set_num_threads(threads)


def test_the_rows_of_a_matrix_are_its_outermost_dimension_in_memory():
    conv = torch.zeros(8, 3, 5, 7)
    assert matrix_shape(conv) == (8, 105)
    assert matrix_shape(conv.to(memory_format=torch.channels_last)) == (8, 105)
    assert matrix_shape(torch.zeros(4, 6).t()) == (4, 6)
    assert matrix_shape(torch.zeros(3)) == (3, 1)
    assert matrix_shape(torch.zeros(0, 5)) == (1, 0)
    assert matrix_shape(torch.zeros(())) == (1, 1)
