"""Weights of decentralised averaging: the peers of each rank, and the weight of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qccl.errors import ArgumentError

__all__ = ["TOPOLOGIES", "matrix", "spectral_gap"]

Matrix = NDArray[np.float64]

_TOLERANCE = 1e-6


def matrix(weights: str | Sequence[Sequence[float]] | Any, size: int) -> Matrix:
    """The ``size`` x ``size`` matrix of a named topology, or a given matrix, checked.

    Raises ArgumentError unless it is symmetric, has no negative entry, and each row sums to 1.
    """
    if isinstance(weights, str):
        if weights not in TOPOLOGIES:
            raise ArgumentError(f"weights {weights!r} are not one of {', '.join(TOPOLOGIES)}, nor a matrix")
        return TOPOLOGIES[weights](size)
    try:
        w = np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"weights are neither the name of a topology nor a matrix of numbers: {error}") from error
    if w.shape != (size, size):
        raise ArgumentError(f"weights have shape {w.shape}; {size} ranks need ({size}, {size})")
    _check(w)
    return w


def _check(w: Matrix) -> None:
    if not (w >= 0).all():  # false for NaN, too
        i, j = np.argwhere(~(w >= 0))[0]
        raise ArgumentError(f"weights[{i}][{j}] is {w[i, j]:g}; weights must not be negative")
    sums = w.sum(axis=1)
    if (off := np.abs(sums - 1) > _TOLERANCE).any():
        row = int(np.flatnonzero(off)[0])
        raise ArgumentError(f"row {row} of the weights sums to {sums[row]:g}; every row must sum to 1")
    if (off := np.abs(w - w.T) > _TOLERANCE).any():
        i, j = np.argwhere(off)[0]
        raise ArgumentError(
            f"weights[{i}][{j}] is {w[i, j]:g} and weights[{j}][{i}] is {w[j, i]:g}; the matrix must be symmetric "
            f"(then its columns sum to 1, too, and the mean of the models is kept)"
        )


def spectral_gap(w: Matrix) -> float:
    """1 minus the second largest absolute eigenvalue: the fraction by which the ranks' differences shrink in a step.

    It is 0 if the graph is not connected. Decentralised SGD converges the faster the larger it is (Lian et al. 2017,
    arXiv 1705.09056).
    """
    values = np.sort(np.abs(np.linalg.eigvalsh(w)))
    return float(1.0 - values[-2]) if len(values) > 1 else 1.0


def _shifts(size: int, shifts: Sequence[int]) -> Matrix:
    """Equal weights for a rank and the ranks at ``shifts`` in both directions; each rank counts once."""
    peers = {shift % size for distance in shifts for shift in (distance, -distance)} | {0}
    return np.asarray(np.mean([np.roll(np.eye(size), shift, axis=1) for shift in peers], axis=0))


def _exponential(size: int) -> Matrix:
    return _shifts(size, [1 << j for j in range((size - 1).bit_length())])


def _hypercube(size: int) -> Matrix:
    if size & (size - 1):
        raise ArgumentError(f"a hypercube has a power of two of ranks, not {size}")
    distances = [0, *(1 << j for j in range(size.bit_length() - 1))]
    return np.asarray(np.mean([np.eye(size)[np.arange(size) ^ distance] for distance in distances], axis=0))


def _torus(size: int) -> Matrix:
    """A grid of ranks, as square as possible; each rank averages with its neighbours above, below, left and right."""
    rows = next(n for n in range(int(size**0.5), 0, -1) if size % n == 0)
    columns = size // rows
    w = np.eye(size)
    for rank in range(size):
        i, j = divmod(rank, columns)
        for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            w[rank, (i + di) % rows * columns + (j + dj) % columns] = 1
    return np.asarray(w / w.sum(axis=1, keepdims=True))


def _one_peer(size: int) -> Matrix:
    if size % 2 and size > 1:
        raise ArgumentError(f"one_peer needs an even number of ranks, not {size}")
    w = np.eye(size)
    for rank in range(size if size > 1 else 0):
        w[rank, [rank, rank ^ 1]] = 0.5
    return w


#: topology -> function that makes its matrix for a number of ranks
TOPOLOGIES: dict[str, Callable[[int], Matrix]] = {
    "ring": lambda size: _shifts(size, [1]),
    "complete": lambda size: np.full((size, size), 1 / size),
    "hypercube": _hypercube,
    "torus": _torus,
    "exponential": _exponential,
    "one_peer": _one_peer,
}
