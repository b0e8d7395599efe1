"""What the loops of low-rank compression make of hard matrices, as one digest: ``python factor_digest.py`` prints the
instruction set in use and the digest. It needs no PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from qccl import _host

#: rank, rows and columns: single elements, odd numbers, whole vectors, and as many rows as columns
SHAPES = ((1, 1, 1), (1, 9, 7), (2, 3, 17), (3, 16, 3), (5, 64, 33), (9, 31, 1001), (32, 130, 257), (40, 41, 40))


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    """Numbers from -0.5 to 0.5 by integer arithmetic alone, so that they never depend on NumPy's version."""
    x = np.arange(seed, seed + rows * columns, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return numbers.reshape(rows, columns)


def hard_matrices(rows: int, columns: int) -> Iterator[np.ndarray]:
    """Usual, tiny, subnormal, huge, unequal, dependent, zero and not finite rows."""
    usual = matrix(rows, columns, seed=rows)
    for scale in (1.0, 1e-30, 1e-40, 3e38):
        yield usual * np.float32(scale)
    yield usual * np.float32(10) ** (np.arange(rows, dtype=np.float32) % 60 - 30)[:, None]
    yield np.outer(1 + np.arange(rows), usual[0]).astype(np.float32)
    yield np.zeros_like(usual)
    for value in (np.nan, np.inf, -np.inf):
        found = usual.copy()
        found[rows // 2, columns // 2] = value
        yield found


def orthonormal(given: np.ndarray, seed: int) -> np.ndarray:
    out = np.empty_like(given)
    _host.orthonormal_rows(given.ctypes.data, out.ctypes.data, *given.shape, seed)
    return out


def product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Of p (rows x rank) and q (rank x columns)."""
    out = np.empty((len(p), q.shape[1]), np.float32)
    _host.outer_sum(p.ctypes.data, q.ctypes.data, out.ctypes.data, len(q), *out.shape, 1)
    return out


def results() -> Iterator[bytes]:
    for rank, rows, columns in SHAPES:
        if rank <= columns:
            for given in hard_matrices(rank, columns):
                yield orthonormal(given, seed=rank).tobytes()
        for p, q in zip(hard_matrices(rows, rank), hard_matrices(rank, columns), strict=True):
            yield product(p, q).tobytes()


def digest() -> str:
    with np.errstate(all="ignore"):
        return hashlib.sha256(b"".join(results())).hexdigest()


if __name__ == "__main__":
    print(_host.isa, digest())
