"""The arithmetic of low-rank compression: orthonormal rows and sums of outer products, with bits of their own order."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import factor_digest
import numpy as np
import pytest
import torch
from factor_digest import hard_matrices, matrix, product

from qccl import _host
from qccl.base.errors import ArgumentError
from qccl.torch.factors import matrix_shape, orthonormal_rows, outer_sum

#: r rows of n numbers, also odd ones, and as many rows as columns
SHAPES = [(1, 1), (1, 7), (2, 3), (3, 3), (4, 1001), (5, 64), (9, 17), (32, 257), (33, 33)]


def rows_of(shape: tuple[int, int], scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng([*shape]).standard_normal(shape)).astype(np.float32)


def products(x: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Scalar products with each row, added in the order that orthonormal_rows() documents."""
    blocks = -(-len(x) // 8)
    terms = np.zeros((len(basis), 8 + 8 * blocks))  # the sums begin with zeros
    terms[:, 8 : 8 + len(x)] = x * basis
    sums = np.add.accumulate(terms.reshape(len(basis), 1 + blocks, 8), axis=1)[:, -1]
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    return sums[:, 0]


def splitmix_row(count: int, seed: int) -> np.ndarray:
    """The published algorithm in Python's integers."""
    mask, found = (1 << 64) - 1, []
    for state in range(seed * count, seed * count + count):
        x = state * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        found.append(((x ^ (x >> 31)) >> 11) * 2.0**-52 - 1)
    return np.array(found)


def norm(x: np.ndarray) -> float:
    return math.sqrt(products(x, x[None])[0])


def expected_rows(given: np.ndarray, seed: int) -> np.ndarray:
    """Gram-Schmidt as orthonormal_rows() documents it, by single operations in NumPy."""

    def rest_of(row: np.ndarray) -> np.ndarray:
        for _ in range(2):
            for factor, each in zip(products(row, found[:i]), found[:i], strict=True):
                row = row - factor * each
        return row

    found = np.zeros(given.shape)
    for i in range(len(given)):
        row, attempts = given[i].astype(np.float64), itertools.count()
        while not norm(rest_of(row)) > 1e-6 * norm(row):
            row = splitmix_row(len(row), (seed << 16) + (i << 8) + next(attempts))
        found[i] = rest_of(row) / norm(rest_of(row))
    return found.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_bits_of_single_operations(shape):
    for given in hard_matrices(*shape):
        with np.errstate(all="ignore"):
            expected = expected_rows(given, seed=0x89ABCDEF)
        assert orthonormal_rows(given, seed=0x89ABCDEF).tobytes() == expected.tobytes()


def test_a_row_that_is_not_finite_counts_as_zeros():
    given = rows_of((5, 64))
    given[2] = 0
    expected = orthonormal_rows(given, seed=1)
    for value in (math.nan, math.inf, -math.inf):
        given[2] = rows_of((1, 64))
        given[2, 7] = value
        assert np.array_equal(orthonormal_rows(given, seed=1), expected)


def test_rows_may_lie_apart_and_stay():
    given = rows_of((6, 66))[::2, ::3]
    before = given.copy()
    assert np.array_equal(orthonormal_rows(given, seed=1), orthonormal_rows(before, seed=1))
    assert np.array_equal(given, before)
    assert orthonormal_rows(np.zeros((0, 5), np.float32), seed=1).shape == (0, 5)


def test_other_rows_are_refused():
    with pytest.raises(ArgumentError, match="4 rows of 3 elements"):
        orthonormal_rows(np.ones((4, 3), np.float32), seed=0)
    for other in (np.ones(3, np.float32), np.ones((2, 3)), np.ones((2, 3), ">f4")):
        with pytest.raises(ArgumentError, match="pass a matrix of float32"):
            orthonormal_rows(other, seed=0)


@pytest.mark.parametrize(
    ("n", "m", "r"), [(1, 1, 1), (3, 5, 2), (16, 16, 32), (129, 1031, 4), (2, 70_000, 3), (70_000, 2, 3)]
)
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
            assert out.numpy().tobytes() == expected.tobytes()
    finally:
        torch.set_num_threads(threads)


def test_a_sum_that_is_not_a_number_has_one_bit_pattern():
    """Processors differ in the sign of a NaN that inf - inf makes."""
    p, q = torch.tensor([[3e38, 1.0], [3e38, 1.0]]), torch.tensor([[3e38, 1.0], [-3e38, 1.0]])
    out = torch.zeros(2, 2)
    outer_sum(p, q, out)
    assert out.view(torch.int32)[0, 0] == 0x7FC00000
    assert out[0, 1] == math.inf and out[1, 0] == 0 and out[1, 1] == 2


def test_sums_of_tensors_that_do_not_fit_are_refused():
    p, q = torch.ones(2, 3), torch.ones(2, 4)
    for out, error in ((torch.zeros(4, 3), "have the shapes"), (torch.zeros(4, 3).t(), "contiguous")):
        with pytest.raises(ArgumentError, match=error):
            outer_sum(p, q, out)
        assert not out.any()
    for other in (p[:1], torch.ones(3), p.double()):
        with pytest.raises(ArgumentError):
            outer_sum(other, q, torch.zeros(3, 4))
    with pytest.raises(ArgumentError, match="r of 1 or more"):
        outer_sum(p[:0], q[:0], torch.zeros(3, 4))
    outer_sum(p[:, :0], q, torch.zeros(0, 4))  # nothing to do
    for swapped in (p, p.t().contiguous().t()):  # any strides of p and q
        out = torch.zeros(3, 4)
        outer_sum(swapped, q, out)
        assert (out == 2).all()


#: of factor_digest.digest(); another value means that ranks with another version of qccl would get other bits
DIGEST = "16c41701332e1d7dd584d6a07c47217d51e5e307bf8e520ecc32f9b67d3a5279"


@pytest.mark.parametrize("isa", _host.usable_isas)
def test_every_instruction_set_makes_the_same_bits(isa):
    done = subprocess.run(
        [sys.executable, factor_digest.__file__],
        env=os.environ | {"QCCL_ISA": isa},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [isa, DIGEST]


def test_flush_to_zero_of_the_caller_changes_nothing():
    given = next(itertools.islice(hard_matrices(4, 33), 2, None))
    p, q = matrix(5, 3, seed=1), 1e-38 * matrix(3, 20, seed=2)
    assert 0 < np.abs(given).max() < np.finfo(np.float32).tiny > np.abs(product(p, q)).max() > 0
    expected = factor_digest.orthonormal(given, 1).tobytes(), product(p, q).tobytes()
    if not torch.set_flush_denormal(True):
        pytest.skip("PyTorch cannot flush subnormal numbers to zero on this processor")
    try:
        found = factor_digest.orthonormal(given, 1).tobytes(), product(p, q).tobytes()
    finally:
        torch.set_flush_denormal(False)
    assert found == expected


def test_the_rows_of_a_matrix_are_its_outermost_dimension_in_memory():
    conv = torch.zeros(8, 3, 5, 7)
    assert matrix_shape(conv) == (8, 105)
    assert matrix_shape(conv.to(memory_format=torch.channels_last)) == (8, 105)
    assert matrix_shape(torch.zeros(4, 6).t()) == (4, 6)
    assert matrix_shape(torch.zeros(6, 9).t()[:4]) == (4, 6)  # not dense: row-major in DDP's bucket
    assert matrix_shape(torch.zeros(3)) == (3, 1)
    assert matrix_shape(torch.zeros(0, 5)) == (1, 0)
    assert matrix_shape(torch.zeros(())) == (1, 1)
