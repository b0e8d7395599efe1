"""Weights of decentralised averaging: the peers of each rank, and the weight of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qccl.base.errors import ArgumentError

__all__ = ["TOPOLOGIES", "matrix", "spectral_gap"]

Matrix = NDArray[np.float64]

_TOLERANCE = 1e-6


def matrix(weights: str | Sequence[Sequence[float]] | Any, size: int) -> Matrix:
    """Make the ``size`` x ``size`` matrix of a named topology, or check a given matrix.

    Raises ArgumentError unless it is symmetric, has no negative entry, and each row sums to 1.
    """
    if isinstance(weights, str):
        if weights not in TOPOLOGIES:
            raise ArgumentError(
                f"weights {weights!r} are not one of {', '.join(TOPOLOGIES)}; for another topology give a symmetric "
                f"matrix whose rows sum to 1"
            )
        return _shifts(size, TOPOLOGIES[weights](size))
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


#: the distances to a rank's peers, by topology, as functions of the number of ranks
TOPOLOGIES: dict[str, Callable[[int], Sequence[int]]] = {
    "ring": lambda size: [1],
    "complete": range,
    "exponential": lambda size: [1 << j for j in range((size - 1).bit_length())],
}
