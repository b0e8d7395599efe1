"""The arithmetic of low-rank compression whose results must have the same bits on all ranks.

PyTorch's matrix products add in an order that depends on the processor and on the number of threads, which may differ
between ranks. kernels/host/factor_loops.cpp adds in a fixed order, by single additions, multiplications, divisions
and square roots, which IEEE 754 rounds alike everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qccl import _host
from qccl.base.errors import ArgumentError
from qccl.torch.models import like_in_bucket

__all__ = ["matrix_shape", "orthonormal_rows", "outer_sum"]


def matrix_shape(parameter: Any) -> tuple[int, int]:
    """The rows and columns of a parameter as a matrix: its outermost dimension in DDP's bucket, and the others."""
    like = like_in_bucket(parameter, device="meta")
    if not like.numel() or not like.dim():
        return 1, like.numel()
    outermost = max(range(like.dim()), key=lambda d: (like.stride(d), like.shape[d]))
    rows = like.shape[outermost]
    return rows, like.numel() // rows


def orthonormal_rows(rows: np.ndarray, seed: int) -> np.ndarray:
    """Orthonormalise rows (r x n) by Gram-Schmidt in double precision; float32 in, float32 out.

    Each row is projected twice, which leaves an error of the order of rounding (Giraud, Langou and Rozloznik 2005, "The
    loss of orthogonality in the Gram-Schmidt orthogonalization process"). A row that depends on earlier rows, such as a
    row of zeros, is replaced by a random row, and so is a row that is not finite. The random row follows from ``seed``
    (32 bits) and the row's place alone. A row depends on earlier rows if their projections leave at most a millionth of
    its norm.

    Scalar products have eight partial sums: sum l adds the elements l, l + 8, ... Then sums l and l + 4 are added, then
    l and l + 2, then the last two.

    Raises ArgumentError if there are more rows than columns, and for anything else than a matrix of float32.
    """
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise ArgumentError(f"rows is an array of shape {rows.shape} and {rows.dtype}; pass a matrix of float32")
    number, count = rows.shape
    if number > count:
        raise ArgumentError(f"{number} rows of {count} elements cannot be orthogonal; take at most {count}")
    given, found = np.require(rows, np.float32, ["C", "ALIGNED"]), np.empty(rows.shape, np.float32)
    _host.orthonormal_rows(given.ctypes.data, found.ctypes.data, number, count, seed)
    return found


def outer_sum(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Set ``out`` (n x m) to the sum of the outer products of the rows of ``p`` (r x n) and ``q`` (r x m), in order.

    It is the product of the transposed ``p`` and ``q``. All are float32 on the CPU. ``out`` is contiguous, and overlaps
    neither of the others. As many threads as PyTorch uses share the rows.

    Raises ArgumentError for other shapes and element types, and for r = 0.
    """
    tensors, shapes = (p, q, out), [tuple(x.shape) for x in (p, q, out)]
    fit = all(len(shape) == 2 for shape in shapes) and len(p) == len(q) and shapes[2] == (p.shape[1], q.shape[1])
    if not fit or not len(p):
        raise ArgumentError(f"p, q and out have the shapes {shapes}; pass r x n, r x m and n x m, with r of 1 or more")
    if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in tensors) or not out.is_contiguous():
        raise ArgumentError("p, q and out must be float32 on the CPU, and out contiguous")
    if not out.numel():
        return
    by_rows, factors = p.t().contiguous(), q.contiguous()
    threads, (rows, columns) = torch.get_num_threads(), out.shape
    _host.outer_sum(by_rows.data_ptr(), factors.data_ptr(), out.data_ptr(), len(p), rows, columns, threads)
