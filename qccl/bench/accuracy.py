"""Error bounds of compressed all-reduces, derived from the codecs' error formulas and every rounding on the way.

All bounds are per element and in float64. ``values`` are the ranks' finite inputs to one stretch of the vector, in rank
order, as float32 (float16 and bfloat16 convert exactly). ``stretches()`` splits a vector into such stretches: each
begins and ends at bucket boundaries and lies in one shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from qccl.chunks import ChunkPolicy
from qccl.codecs import Dithering, MinMax, NoCodec, OneBit, RandomK, TopK, Trellis
from qccl.codecs.floats import from_float32, to_float32
from qccl.collectives.partitions import partition_for_all
from qccl.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.codecs import Codec

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

    Each encoded value has the codec's error (in two_round the owner does not encode its own values). The sum in fp32
    rounds once per addition, and once for avg's scale. two_round then encodes the sum, whose range may exceed the exact
    range by the errors so far. Storing rounds to ``dtype``. A single rank only copies.
    """
    size = len(values)
    if size == 1:
        return _storing(values[0].astype(np.float64), np.zeros(values[0].shape), dtype)
    sent = [algorithm != "two_round" or rank != owner for rank in range(size)]
    first, second = codec.rounds
    coded = [_coding(first, v, dtype) if s else np.zeros(v.shape) for v, s in zip(values, sent, strict=True)]
    exact, error = allreduce_exact(values, op), _combined(coded, _magnitude(values), op)
    if op == "avg":
        error = error / size + _TINY32
    if algorithm == "two_round":
        error += _between_rounds(codec, exact, error, dtype)
        error += _bound_near(second, exact, error, dtype)
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
    """The bound of a hierarchical all-reduce; ``nodes`` lists the ranks of each node, ``algorithm`` runs between nodes.

    Each value that moves inside a node has the intra codec's error. A node's sum rounds once per addition and is stored
    as ``dtype``. Between nodes allreduce_bound holds for the nodes' sums. The result then moves inside the nodes. The
    bound also counts errors of moves that a rank can skip, such as those of its own values.
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
            error = _combined([_coding(intra, v, dtype) for v in mine], _magnitude(mine), total)
            error += _storing(exact, error, dtype)
        sums.append(exact)
        errors.append(error)
    if len(nodes) > 1:
        errors = [e + _bound_near(codec.rounds[0], s, e, dtype) for s, e in zip(sums, errors, strict=True)]
    exact, error = allreduce_exact(values, op), _combined(errors, _magnitude(sums), total)
    if op == "avg":
        error = error / size + _rounding(1) * (np.abs(exact) + error) + _TINY32
    if algorithm == "two_round" and len(nodes) > 1:
        error += _between_rounds(codec, exact, error, dtype)
        error += _bound_near(codec.rounds[1], exact, error, dtype)
    error += _storing(exact, error, dtype)
    if several:
        error += _bound_near(intra, exact, error, dtype)
        error += _storing(exact, error, dtype)
    return error


def plain_bound(values: Sequence[NDArray[np.float32]], dtype: DType, op: str) -> NDArray[np.float64]:
    """Largest possible error of an all-reduce that adds in ``dtype``, in any order."""
    if op in ("min", "max"):
        return np.zeros(values[0].shape)
    additions = len(values)  # len(values) - 1, plus one for the second-order terms
    largest = _magnitude(values) * (1 + additions * _unit(dtype))
    return additions * (_unit(dtype) * largest + _tiny(dtype))


def stretches(count: int, shards: int, codecs: Sequence[Codec], longest: int) -> Iterator[tuple[int, int, int]]:
    """Split a vector of ``shards`` shards into (shard, start, stop), each at most ``longest`` elements or one bucket.

    Stretches are whole buckets of all ``codecs``. If the last codec has one bucket per shard, they are whole shards.
    """
    partition = partition_for_all([count], shards, codecs, ChunkPolicy.of_elements(longest))
    for shard in range(partition.parts):
        for k in range(partition.chunks):
            for chunk in partition.segments(shard, k):
                yield shard, chunk.start, chunk.stop


def _combined(errors: Sequence[NDArray[np.float64]], magnitude: NDArray[np.float64], op: str) -> NDArray[np.float64]:
    """The error of min or max, or of a sum in fp32 of values whose absolute values add up to ``magnitude``."""
    if op in ("min", "max"):
        return cast("NDArray[np.float64]", np.maximum.reduce(errors))
    error: NDArray[np.float64] = np.add.reduce(errors)
    return error + _rounding(len(errors) + 1) * (magnitude + error) + len(errors) * _TINY32


def _coding(codec: Codec, x: NDArray[np.float32], dtype: DType) -> NDArray[np.float64]:
    """The error of encoding ``x``; NoCodec and sparse codecs round it to ``dtype``, in which they send values."""
    if not codec.sparse and not isinstance(codec, NoCodec):
        return codec.error_bound(x)
    sent = to_float32(from_float32(x, dtype), dtype)
    bound: NDArray[np.float64] = codec.error_bound(sent if isinstance(codec, RandomK) else x) + np.abs(sent - x)
    return bound


def _between_rounds(
    codec: Codec, exact: NDArray[np.float64], error: NDArray[np.float64], dtype: DType
) -> NDArray[np.float64]:
    """The additional error of a sum that is stored before another codec encodes it."""
    first, second = codec.rounds
    return np.zeros(exact.shape) if first == second else _storing(exact, error, dtype)


def _storing(exact: NDArray[np.float64], error: NDArray[np.float64], dtype: DType) -> NDArray[np.float64]:
    """The additional error of rounding to ``dtype``."""
    return np.zeros(exact.shape) if dtype.itemsize == 4 else (np.abs(exact) + error) * _unit(dtype) + _tiny(dtype)


def _rounding(steps: int) -> float:
    """Relative error of ``steps`` roundings to fp32 in a row."""
    return steps * _ROUND32 / (1 - steps * _ROUND32)


def _bound_near(
    codec: Codec, exact: NDArray[np.float64], error: NDArray[np.float64], dtype: DType
) -> NDArray[np.float64]:
    """Largest possible error of encoding any values that lie within ``error`` of the exact ones.

    If a codec's bound grows with the range of a bucket, the range is made as wide as possible; if it grows with the
    values' magnitudes, all are made as large as possible. ``onebit`` may assign a value to the other side, and ``topk``
    may omit it, so their error is the whole value, plus for ``onebit`` the value that a side decodes to. The natural
    levels of ``dithering`` differ by between half of a value and the value, hence the factor of two. NoCodec and
    sparse codecs send values as ``dtype``.
    """
    largest = np.abs(exact) + error
    if codec.sparse or isinstance(codec, NoCodec):
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
    """For each element the maximum of its bucket."""
    if values.size == 0:
        return values
    return np.repeat(np.maximum.reduceat(values, np.arange(0, values.size, bucket)), bucket)[: values.size]


def _widened(exact: NDArray[np.float64], error: NDArray[np.float64], bucket: int) -> NDArray[np.float64]:
    """``exact``, with each bucket's range widened to the range that values within ``error`` may have."""
    starts = np.arange(0, exact.size, bucket)
    stops = np.append(starts[1:], exact.size)
    low, high = np.minimum.reduceat(exact - error, starts), np.maximum.reduceat(exact + error, starts)
    wide = exact.copy()
    wide[starts] = low
    several = stops - starts > 1  # the range of a bucket of one element is always 0
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
