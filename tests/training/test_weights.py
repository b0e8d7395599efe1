"""Weights of decentralised averaging: doubly stochastic for every number of ranks, and checked where they are given."""

from __future__ import annotations

import numpy as np
import pytest

from qccl.base.errors import ArgumentError
from qccl.training.weights import TOPOLOGIES, matrix, spectral_gap


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_topologies(name: str) -> None:
    for size in range(1, 33):
        w = matrix(name, size)
        assert (w >= 0).all() and np.allclose(w.sum(axis=0), 1) and np.array_equal(w, w.T)
        assert spectral_gap(w) > 1e-3
        np.testing.assert_array_equal(matrix(w.tolist(), size), w)


def test_degrees() -> None:
    peers = {name: int((matrix(name, 16)[0] > 0).sum()) - 1 for name in TOPOLOGIES}
    assert peers == {"ring": 2, "complete": 15, "exponential": 7}


def test_gaps() -> None:
    assert spectral_gap(matrix("complete", 8)) == pytest.approx(1)
    assert spectral_gap(matrix("ring", 8)) == pytest.approx(1 - (1 + 2 * np.cos(2 * np.pi / 8)) / 3)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("torus", "'torus' are not one of ring, complete, exponential; for another topology give a symmetric matrix"),
        ([[1, 0]], r"shape \(1, 2\); 2 ranks need \(2, 2\)"),
        ([[0.5, 0.6], [0.6, 0.4]], "row 0 of the weights sums to 1.1; every row must sum to 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"weights\[0\]\[1\] is -0.5"),
        ([[float("nan"), 1], [1, 0]], r"weights\[0\]\[0\] is nan"),
        ([["a", 1], [1, 0]], "nor a matrix of numbers"),
        (None, "shape"),
    ],
)
def test_refused(weights, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        matrix(weights, 2)


def test_rows_alone_are_not_enough() -> None:
    with pytest.raises(
        ArgumentError, match=r"weights\[0\]\[1\] is 0.5 and weights\[1\]\[0\] is 0; the matrix must be symm"
    ):
        matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]], 3)
