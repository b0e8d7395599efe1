"""Reference results: the bits that every rank must hold, computed without chunks, slots, schedules or engines.

The codec's kernels encode and decode each shard and round, one operation at a time, and NumPy adds. So a comparison
finds flipped bits, and kernels that got the wrong element, rank, round or call number. A decoded value that differs
from the encoded value by more than the codec's error bound becomes NaN here, which no result equals: so a comparison
also finds kernels that encode or decode wrongly.

``values`` are the ranks' finite inputs to one stretch of the vector, in rank order, as float32 (float16 and bfloat16
convert exactly). A stretch begins and ends at bucket boundaries and lies in one shard; ``start`` is the number of its
first element in random keys, and ``call`` the number of the collective. Codecs compute in fp32 for every element type,
so values are fp32 here, up to one rounding when a result is stored as ``dtype`` (see data.empty).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.base.dtypes import FLOAT32, DType
from qccl.codecs import NoCodec, RandomK, TopK
from qccl.codecs.floats import from_float32, to_float32
from qccl.codecs.operations import Operations

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.codecs import Codec

    Values = Sequence[NDArray[np.float32]]

__all__ = ["exact", "hierarchical", "moved", "reduced", "scattered"]


def exact(values: Values, op: str) -> NDArray[np.float64]:
    """The exact result (to float64's rounding) of op "sum", "avg", "min" or "max"."""
    combine = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    total = values[0].astype(np.float64)
    for v in values[1:]:
        combine(total, v, out=total)
    return total / len(values) if op == "avg" else total


def reduced(
    values: Values, codec: Codec, dtype: DType, op: str, owner: int, start: int, call: int, *, encoded: bool
) -> NDArray[Any]:
    """Combine the ranks' encoded values; ``owner`` does not encode its own values (-1: every rank does).

    ``encoded``: the owner encodes the result. A single rank only copies.
    """
    size = len(values)
    if size == 1:
        return from_float32(values[0], dtype)
    first, second = codec.rounds
    terms = [v if rank == owner else _sent(first, v, dtype, start, call, rank) for rank, v in enumerate(values)]
    total = _total(terms, op, _scale(op, size))
    if encoded:
        total = _coded(second, _as_summed(codec, total, dtype), start, call, 1, owner)
    return from_float32(total, dtype)


def hierarchical(
    values: Values,
    codec: Codec,
    intra: Codec,
    dtype: DType,
    op: str,
    algorithm: str,
    nodes: Sequence[Sequence[int]],
    shards: int,
    shard: int,
    start: int,
    call: int,
) -> NDArray[Any]:
    """Compute a hierarchical all-reduce; ``nodes`` lists each node's ranks, ``algorithm`` runs between nodes.

    The stretch lies in ``shard`` of ``shards``. A shard belongs to a part, and a part to one rank of each node.
    """
    if len(values) == 1:
        return from_float32(values[0], dtype)
    parts = shards // len(nodes) if algorithm == "two_round" else shards
    owners = [ranks[shard * parts // shards] for ranks in nodes]
    place = shard % len(nodes) if algorithm == "two_round" else -1
    total = _of_nodes(values, codec, intra, dtype, op, nodes, owners, place, start, call)
    if place >= 0 and len(nodes) > 1:
        total = _coded(codec.rounds[1], _as_summed(codec, total, dtype), start, call, 2, owners[place])
    total = to_float32(from_float32(total, dtype), dtype)
    if any(len(ranks) > 1 for ranks in nodes):
        total = _coded(intra, total, start, call, 3, owners[0])
    return from_float32(total, dtype)


def scattered(
    values: Values,
    codec: Codec,
    dtype: DType,
    op: str,
    nodes: Sequence[Sequence[int]],
    rank: int,
    start: int,
    call: int,
) -> NDArray[Any]:
    """Compute the part of ``rank`` in a reduce-scatter in two levels: in each node one rank sums for ``rank``."""
    mine = next(i for i, node in enumerate(nodes) if rank in node)
    place = nodes[mine].index(rank)
    owners = [node[place % len(node)] for node in nodes]
    return from_float32(_of_nodes(values, codec, NoCodec(), dtype, op, nodes, owners, mine, start, call), dtype)


def _of_nodes(
    values: Values,
    codec: Codec,
    intra: Codec,
    dtype: DType,
    op: str,
    nodes: Sequence[Sequence[int]],
    owners: Sequence[int],
    place: int,
    start: int,
    call: int,
) -> NDArray[np.float32]:
    """Combine the nodes' sums, which ``owners`` store as ``dtype`` and encode.

    Node ``place`` does not encode its own sum; on one node nothing is encoded.
    """
    scale, sums = _scale(op, len(values)), []
    for i, (ranks, owner) in enumerate(zip(nodes, owners, strict=True)):
        terms = [values[r] if r == owner else _sent(intra, values[r], dtype, start, call, r) for r in ranks]
        whole = _total(terms, op, scale if len(nodes) == 1 else None)
        whole = whole if len(ranks) == 1 else to_float32(from_float32(whole, dtype), dtype)
        keeps = i == place or len(nodes) == 1
        sums.append(whole if keeps else _sent(codec.rounds[0], whole, dtype, start, call, owner, 1))
    return sums[0] if len(nodes) == 1 else _total(sums, op, scale)


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
    added_to: NDArray[np.float32] | None = None,
) -> NDArray[Any]:
    """Compute the ``values`` of ``rank`` that another rank receives, as ``dtype``; unchanged if not ``moved``."""
    found = _sent(codec, values, dtype, index, call, rank, round_) if moved else values
    return from_float32(found if added_to is None else added_to + found, dtype)


def _coded(codec: Codec, x: NDArray[np.float32], index: int, call: int, round_: int, rank: int) -> NDArray[np.float32]:
    """Encode ``x`` (from element ``index`` on) like ``rank`` in a round of a call, and decode it.

    Elements outside of the codec's bound become NaN.
    """
    wire, decoded = np.empty(codec.encoded_nbytes(x.size, FLOAT32), np.uint8), np.empty_like(x)
    operations, place = Operations(codec, FLOAT32, call=call), (index, round_, rank)
    operations.encode(x, wire, place)()
    operations.decode(wire, decoded, place)()
    decoded[~(np.abs(decoded - x.astype(np.float64)) <= codec.error_bound(x))] = np.nan
    return decoded


def _sent(
    codec: Codec, x: NDArray[np.float32], dtype: DType, index: int, call: int, rank: int, round_: int = 0
) -> NDArray[np.float32]:
    """Do _coded() for values that may not be exact in ``dtype``; TopK rounds its exact values to ``dtype``."""
    decoded = _coded(codec, _as_kept(codec, x, dtype), index, call, round_, rank)
    return (
        to_float32(from_float32(decoded, dtype), dtype)
        if isinstance(codec, TopK) and codec.values == "exact"
        else decoded
    )


def _as_kept(codec: Codec, x: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """Round values to ``dtype`` if ``codec`` sends them so: NoCodec, and RandomK before its decoder scales them."""
    return to_float32(from_float32(x, dtype), dtype) if isinstance(codec, NoCodec | RandomK) else x


def _as_summed(codec: Codec, total: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """The sum that the second round encodes; with a codec for each round it was first stored as ``dtype``."""
    first, second = codec.rounds
    return to_float32(from_float32(total, dtype), dtype) if first != second else _as_kept(second, total, dtype)


def _scale(op: str, size: int) -> np.float32 | None:
    return np.float32(1 / size) if op == "avg" else None


def _total(terms: Values, op: str, scale: np.float32 | None) -> NDArray[np.float32]:
    total = reduce(lambda a, b: _combined(op, a, b), terms)
    return total if scale is None else total * scale


def _combined(op: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute ``a (op) b``. For equal values, such as +0 and -0, the result is the first; NaN if either is NaN."""
    if op in ("min", "max"):
        return np.where((b < a if op == "min" else b > a) | np.isnan(b), b, a)
    return a + b
