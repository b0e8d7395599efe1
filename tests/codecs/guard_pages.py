"""Every kernel on buffers that touch an inaccessible page, first on one side, then on the other: a stray access ends
the process. A script of its own, so that the test which starts it survives.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import factor_digest
import kernel_calls
import oracle
from codec_table import ALL

from qccl import _host
from qccl.base import dtypes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_NO_ACCESS = 0


class Fenced:
    """Pages of memory between two inaccessible ones."""

    def __init__(self, nbytes: int) -> None:
        self._size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + 2 * mmap.PAGESIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE
        for page in (self._start - mmap.PAGESIZE, self._start + self._size):
            if _libc.mprotect(page, mmap.PAGESIZE, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, content: np.ndarray, at_end: bool) -> int:
        """Copy ``content`` against the upper or the lower fence; its address."""
        address = self._start + (self._size - content.nbytes if at_end else 0)
        ctypes.memmove(address, content.ctypes.data, content.nbytes)
        return address


def run(codec: oracle.Codec, dtype: str, count: int, at_end: bool, fences: list[Fenced]) -> None:
    """Encode, decode, accumulate and reduce; the wires that are decoded are random bytes."""
    rng = np.random.default_rng(count)
    code = dtypes.get(dtype).code
    values = np.zeros(count, oracle.storage(dtype))
    nbytes = kernel_calls.wire_nbytes(codec, count, dtype)
    wires = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(3)]
    memory = _host.Memory(6)
    for i, content in enumerate([values, *wires, values, values]):
        memory[i] = fences[i].place(content, at_end)
    loops, op = kernel_calls.kernel(codec), int(codec is None or isinstance(codec, oracle.MinMax))
    at = [(i, 0) for i in range(6)]
    _host.Decode(memory, loops, code, at[1], at[4], count, False)()
    _host.Decode(memory, loops, code, at[2], at[4], count, True)()
    _host.Reduce(memory, loops, code, [at[1], at[2]], at[0], 1, at[3], at[5], count, 0, 1.0, 0, 0, 0)()
    _host.Reduce(memory, loops, code, [at[1], at[2]], None, 0, None, at[5], count, op, 0.5, 0, 0, 0)()
    _host.Encode(memory, loops, code, at[0], at[3], count, 0, 0, 0)()


def run_factors(rank: int, rows: int, columns: int, at_end: bool, fences: list[Fenced]) -> None:
    """Orthonormal rows and a sum of outer products, of matrices from factor_digest."""
    p, q = factor_digest.matrix(rows, rank, 1), factor_digest.matrix(rank, columns, 2)
    at = [
        fence.place(x, at_end) for fence, x in zip(fences, (p, q, np.zeros((rows, columns), np.float32)), strict=False)
    ]
    _host.outer_sum(*at, rank, rows, columns, 1)
    if rank <= columns:
        out = fences[2].place(np.zeros_like(q), at_end)
        _host.orthonormal_rows(at[1], out, rank, columns, 1)


def main() -> None:
    fences = [Fenced(5000 * 4) for _ in range(6)]
    codecs: list[oracle.Codec] = [None, *(codec for codec in ALL if codec.bucket <= 1024)]
    codecs += [
        oracle.MinMax(bits, bucket, stochastic)
        for bits, bucket, stochastic in itertools.product(range(1, 9), (8, 64, 1024, "shard"), (False, True))
    ]
    counts = (1, 2, 3, 7, 8, 9, 15, 63, 64, 65, 1023, 1025, 2048, 2051)
    for codec, dtype, count, at_end in itertools.product(codecs, dtypes.DTYPES, counts, (False, True)):
        run(codec, dtype.name, count, at_end, fences)
    sizes = (1, 2, 7, 8, 15, 16, 17, 33)
    for rank, rows, columns, at_end in itertools.product(sizes, sizes, sizes, (False, True)):
        run_factors(rank, rows, columns, at_end, fences)
    print("no stray access")


if __name__ == "__main__":
    main()
