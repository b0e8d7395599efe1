"""The all-reduce without chunks, slots, schedules or engines: the bits that every rank must hold.

Only shards and rounds are left. The codec's kernels encode and decode, one operation at a time, and NumPy adds; so it
shows when a bit was flipped on the way, or a kernel was given the wrong element, rank, round or call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl import _host
from qccl.bench.data import from_float32
from qccl.dtypes import FLOAT32, DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.codecs.base import Codec

__all__ = ["allreduce", "moved"]


def allreduce(
    values: Sequence[NDArray[np.float32]],
    codec: Codec,
    dtype: DType,
    op: str,
    algorithm: str,
    owner: int,
    start: int,
    call: int,
) -> NDArray[Any]:
    """The result, as ``dtype`` (see data.empty), of collective number ``call`` in the stretch from element ``start``.

    ``values`` and ``owner`` are as in accuracy.allreduce_bound. A codec computes in fp32, whatever the type of the
    elements; so all is fp32 here, up to the one rounding when the result is stored. One rank only copies.
    """
    size = len(values)
    if size == 1:
        return from_float32(values[0], dtype)
    is_two_round = algorithm == "two_round"
    terms = (
        v if is_two_round and rank == owner else _coded(codec, v, start, call, 0, rank) for rank, v in enumerate(values)
    )
    total = reduce(lambda a, b: _combined(op, a, b), terms)
    if op == "avg":
        total = total * np.float32(1 / size)
    if is_two_round:
        total = _coded(codec, total, start, call, 1, owner)
    return from_float32(total, dtype)


def moved(
    values: NDArray[np.float32],
    codec: Codec,
    dtype: DType,
    index: int,
    call: int,
    round_: int,
    rank: int,
    *,
    moved: bool,
) -> NDArray[Any]:
    """What others get of ``values`` of ``rank``, as ``dtype``; the values themselves where they were not moved."""
    return from_float32(_coded(codec, values, index, call, round_, rank) if moved else values, dtype)


def _coded(codec: Codec, x: NDArray[np.float32], index: int, call: int, round_: int, rank: int) -> NDArray[np.float32]:
    """What is left of ``x``, from element ``index`` on, when ``rank`` has sent it as codes in a round of a call."""
    wire = np.empty(codec.encoded_nbytes(x.size, FLOAT32), np.uint8)
    memory = _host.Memory(2)
    memory[0], memory[1], memory.call = x.ctypes.data, wire.ctypes.data, call
    _host.Encode(memory, codec.host(), FLOAT32.code, (0, 0), (1, 0), x.size, index, round_, rank)()
    return codec.decode(wire, x.size, FLOAT32)


def _combined(op: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """``a (op) b``; of equal values, as +0 and -0 are, the first stays."""
    if op in ("min", "max"):
        return np.where(b < a if op == "min" else b > a, b, a)
    return a + b
