"""The arithmetic of low-rank compression whose results must have the same bits on all ranks.

The order in which a matrix product adds depends on the processor and on the number of threads, and ranks may have
different ones. The functions here add in an order of their own, by single additions, multiplications, divisions and
square roots, which IEEE 754 rounds alike everywhere.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from qccl.errors import ArgumentError

__all__ = ["matrix_shape", "orthonormal_rows", "outer_sum"]

#: a row is dependent on earlier ones if no more than this share of its norm is left without them: about what float32
#: rounds off
_DEPENDENT = 1e-6
#: elements of the blocks of outer_sum(), which fit into a processor's cache
_BLOCK = 1 << 15


def matrix_shape(parameter: Any) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix: its outermost dimension in memory, and the product of the others."""
    like = torch.empty_like(parameter, device="meta", requires_grad=False)
    if not like.numel() or not like.dim():
        return 1, like.numel()
    outermost = max(range(like.dim()), key=lambda d: (like.stride(d), like.shape[d]))
    rows = like.shape[outermost]
    return rows, like.numel() // rows


def orthonormal_rows(rows: np.ndarray, seed: int) -> np.ndarray:
    """Orthonormal rows that span the given ones, by Gram-Schmidt in double precision; float32 in, float32 out.

    Each row is projected twice, which leaves an error of the order of rounding (Giraud, Langou and Rozloznik 2005, "The
    loss of orthogonality in the Gram-Schmidt orthogonalization process"). A row that depends on earlier ones, such as a
    row of zeros, is replaced by a random one, which follows from ``seed`` and its place alone.

    Raises ArgumentError if there are more rows than columns. All values must be finite.
    """
    number, count = rows.shape
    if number > count:
        raise ArgumentError(f"{number} rows of {count} elements cannot be orthogonal; take at most {count}")
    found = np.zeros(rows.shape, np.float64)
    for i in range(number):
        row, attempts = rows[i].astype(np.float64), itertools.count()
        rest = _without(_without(row, found[:i]), found[:i])
        while not _norm(rest) > _DEPENDENT * _norm(row):
            row = _random_row(count, (seed << 16) + (i << 8) + next(attempts))
            rest = _without(_without(row, found[:i]), found[:i])
        found[i] = rest / _norm(rest)
    return found.astype(np.float32)


def outer_sum(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Set ``out`` (n x m) to the sum of the outer products of the rows of ``p`` (r x n) and ``q`` (r x m), in order.

    That is the product of the transposed ``p`` and ``q``. All are float32.
    """
    height = max(1, _BLOCK // out.shape[1])
    scratch = torch.empty(min(height, out.shape[0]), out.shape[1])
    for start in range(0, out.shape[0], height):
        part = out[start : start + height]
        product = scratch[: len(part)]
        columns = p[:, start : start + height, None]
        torch.mul(columns[0], q[0], out=part)
        for i in range(1, len(p)):
            torch.mul(columns[i], q[i], out=product)
            part.add_(product)


def _without(row: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """The row without its projections on the orthonormal rows of ``basis``."""
    for factor, each in zip(_sum(basis * row), basis, strict=True):
        row = row - factor * each
    return row


def _norm(row: np.ndarray) -> float:
    return math.sqrt(_sum(row * row))


def _sum(x: np.ndarray) -> Any:
    """The sum over the last axis, from the first element to the last one."""
    return np.add.accumulate(x, axis=-1)[..., -1]


def _random_row(count: int, seed: int) -> np.ndarray:
    """Numbers from -1 to 1, by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom generators")."""
    first = seed * count % (1 << 64)
    x = (np.arange(count, dtype=np.uint64) + np.uint64(first)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
