"""How far a compressed all-reduce may be from the exact one, derived from the codec's formula and the rounding points.

Everything is per element and in float64. ``values`` are the ranks' inputs to the same stretch of the vector, in rank
order, as float32 (float16 and bfloat16 convert exactly); all of them finite. A stretch begins and ends on bucket
boundaries, and belongs to one rank's shard: ``stretches()`` cuts a vector so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from qccl.bench.data import from_float32, to_float32
from qccl.codecs import Dithering, MinMax, OneBit, RandomK, TopK, Trellis
from qccl.collectives.layout import partition_for_all
from qccl.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.codecs.base import Codec

__all__ = ["allreduce_bound", "allreduce_exact", "hierarchical_bound", "plain_bound", "stretches"]

_ROUND32 = 2.0**-24  # largest relative error of one rounding to fp32
_TINY32 = 2.0**-149  # and its absolute one among subnormals


def allreduce_exact(values: Sequence[NDArray[np.float32]], op: str) -> NDArray[np.float64]:
    """The exact result (to float64's rounding) of op "sum", "avg", "min" or "max"."""
    combine = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    total = values[0].astype(np.float64)
    for v in values[1:]:
        combine(total, v, out=total)
    return total / len(values) if op == "avg" else total


def allreduce_bound(
    values: Sequence[NDArray[np.float32]], codec: Codec, dtype: DType, op: str, algorithm: str, owner: int
) -> NDArray[np.float64]:
    """Largest possible ``|allreduce - allreduce_exact|`` of algorithm "two_round" or "one_shot".

    Steps: each value that is sent as a code has the codec's error (in two_round the owner's own value is not); the
    sum in fp32 rounds once per addition, and once for the scale of avg; two_round then quantises the sum, whose range
    may be wider than the exact one by the errors so far; storing rounds to ``dtype``. One rank only copies.
    """
    size = len(values)
    if size == 1:
        return _storing(values[0].astype(np.float64), np.zeros(values[0].shape), dtype)
    sent = [algorithm != "two_round" or rank != owner for rank in range(size)]
    coded = [_coding(codec, v, dtype) if s else np.zeros(v.shape) for v, s in zip(values, sent, strict=True)]
    exact, error = allreduce_exact(values, op), _combined(coded, _magnitude(values), op)
    if op == "avg":
        error = error / size + _TINY32
    if algorithm == "two_round":
        error += _bound_near(codec, exact, error, dtype)
    return error + _storing(exact, error, dtype)


def hierarchical_bound(
    values: Sequence[NDArray[np.float32]],
    codec: Codec,
    intra: Codec,
    dtype: DType,
    op: str,
    algorithm: str,
    nodes: Sequence[Sequence[int]],
) -> NDArray[np.float64]:
    """The same of an all-reduce in two levels, whose nodes are given by their ranks; ``algorithm`` between them.

    Steps: each value that moves inside a node has the intra codec's error; the sum of the node rounds once per addition
    and is stored as ``dtype``; between nodes all is as in allreduce_bound, of the nodes' sums; the result moves inside
    nodes. Who need not move its own values is not considered.
    """
    size, several = len(values), any(len(ranks) > 1 for ranks in nodes)
    if size == 1:
        return np.zeros(values[0].shape)
    total = "sum" if op == "avg" else op
    sums, errors = [], []
    for ranks in nodes:
        mine = [values[rank] for rank in ranks]
        exact, error = allreduce_exact(mine, total), np.zeros(values[0].shape)
        if len(ranks) > 1:
            error = _combined([intra.error_bound(v) for v in mine], _magnitude(mine), total)
            error += _storing(exact, error, dtype)
        sums.append(exact)
        errors.append(error)
    if len(nodes) > 1:
        errors = [e + _bound_near(codec, s, e, dtype) for s, e in zip(sums, errors, strict=True)]
    exact, error = allreduce_exact(values, op), _combined(errors, _magnitude(sums), total)
    if op == "avg":
        error = error / size + _rounding(1) * (np.abs(exact) + error) + _TINY32
    if algorithm == "two_round" and len(nodes) > 1:
        error += _bound_near(codec, exact, error, dtype)
    error += _storing(exact, error, dtype)
    if several:
        error += _bound_near(intra, exact, error, dtype)
        error += _storing(exact, error, dtype)
    return error


def plain_bound(values: Sequence[NDArray[np.float32]], dtype: DType, op: str) -> NDArray[np.float64]:
    """Largest possible error of an all-reduce that adds in ``dtype``, in any order."""
    if op in ("min", "max"):
        return np.zeros(values[0].shape)
    additions = len(values)  # one less, and one for the second-order terms
    largest = _magnitude(values) * (1 + additions * _unit(dtype))
    return additions * (_unit(dtype) * largest + _tiny(dtype))


def stretches(count: int, shards: int, codecs: Sequence[Codec], longest: int) -> Iterator[tuple[int, int, int]]:
    """Cut a vector of so many shards into (shard, start, stop) of at most ``longest`` elements, or one bucket.

    Buckets are those of all ``codecs``; one with one range for a whole shard, the last, gets whole shards.
    """
    layout = partition_for_all(count, shards, codecs, longest)
    for shard in range(layout.parts):
        for k in range(layout.chunks):
            if chunk := layout.chunk(shard, k):
                yield shard, chunk.start, chunk.stop


def _combined(errors: Sequence[NDArray[np.float64]], magnitude: NDArray[np.float64], op: str) -> NDArray[np.float64]:
    """The error of min and max, or of a sum in fp32 (scaled, perhaps) of values that are so large together."""
    if op in ("min", "max"):
        return cast("NDArray[np.float64]", np.maximum.reduce(errors))
    error: NDArray[np.float64] = np.add.reduce(errors)
    return error + _rounding(len(errors) + 1) * (magnitude + error) + len(errors) * _TINY32


def _coding(codec: Codec, x: NDArray[np.float32], dtype: DType) -> NDArray[np.float64]:
    """The error of encoding values that need not be exact in ``dtype``, in which sparse codecs send them."""
    if not codec.sparse:
        return codec.error_bound(x)
    sent = to_float32(from_float32(x, dtype), dtype)
    bound: NDArray[np.float64] = codec.error_bound(sent if isinstance(codec, RandomK) else x) + np.abs(sent - x)
    return bound


def _storing(exact: NDArray[np.float64], error: NDArray[np.float64], dtype: DType) -> NDArray[np.float64]:
    """What rounding to the type of the elements adds."""
    return np.zeros(exact.shape) if dtype.itemsize == 4 else (np.abs(exact) + error) * _unit(dtype) + _tiny(dtype)


def _rounding(steps: int) -> float:
    """Relative error of ``steps`` roundings to fp32 in a row."""
    return steps * _ROUND32 / (1 - steps * _ROUND32)


def _bound_near(
    codec: Codec, exact: NDArray[np.float64], error: NDArray[np.float64], dtype: DType
) -> NDArray[np.float64]:
    """Largest possible error of encoding any values that lie within ``error`` of the exact ones.

    By what a codec's bound grows with. The range of a bucket: that is made as wide as it may be. The size of the values
    and of the greatest in the bucket: all are as large as they may be. ``onebit`` and ``topk`` may take a value for
    another side, or leave it out, so there it is all of the value, and for ``onebit`` what a side can stand for. The
    distance of ``dithering``'s natural levels is between a half and all of a value, so twice that of a larger one.
    Sparse codes have values in the type of the elements.
    """
    largest = np.abs(exact) + error
    if codec.sparse:
        rounding = _storing(exact, error, dtype)
        return rounding + (largest if isinstance(codec, TopK) else codec.error_bound(largest + rounding))
    match codec:
        case MinMax():
            return codec.error_bound(_widened(exact, error, codec.granule if codec.splittable else max(1, exact.size)))
        case Trellis():
            starts = np.arange(0, exact.size, codec.bucket)
            ends = np.minimum.reduceat(exact - error, starts), np.maximum.reduceat(exact + error, starts)
            return np.repeat(codec.error_within(*ends), codec.bucket)[: exact.size]
        case OneBit():
            sides = 1.0 if codec.reconstruct == "sign" else _greatest(largest, codec.bucket) * (1 + 2.0**-20)
            return largest + sides
        case Dithering(partition="natural"):
            return 2 * codec.error_bound(largest)
    return codec.error_bound(largest)


def _greatest(values: NDArray[np.float64], bucket: int) -> NDArray[np.float64]:
    """For each element the greatest one of its bucket."""
    if values.size == 0:
        return values
    return np.repeat(np.maximum.reduceat(values, np.arange(0, values.size, bucket)), bucket)[: values.size]


def _widened(exact: NDArray[np.float64], error: NDArray[np.float64], bucket: int) -> NDArray[np.float64]:
    """``exact`` with the ends of each bucket moved outwards as far as the values it stands for may lie."""
    starts = np.arange(0, exact.size, bucket)
    stops = np.append(starts[1:], exact.size)
    low, high = np.minimum.reduceat(exact - error, starts), np.maximum.reduceat(exact + error, starts)
    wide = exact.copy()
    wide[starts] = low
    several = stops - starts > 1  # a bucket of one element has no range, whatever its value
    wide[(stops - 1)[several]] = high[several]
    return wide


def _magnitude(values: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    """The sum of the absolute values."""
    total = np.zeros(values[0].shape)
    for v in values:
        total += np.abs(v)
    return total


def _unit(dtype: DType) -> float:
    """Largest relative error of rounding to ``dtype``."""
    return 2.0 ** -(dtype.mantissa_bits + 1)


def _tiny(dtype: DType) -> float:
    """Largest absolute error of rounding to a subnormal of ``dtype``."""
    return 2.0 ** (dtype.min_exponent - dtype.mantissa_bits - 1)
