"""Checks of a call: its result has the bits of reference.py, and its input and the guard elements are unchanged."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qccl.bench.options import KINDS, neighbours
from qccl.bench.sweep import data, reference
from qccl.bench.sweep.calls import PlainCall
from qccl.codecs.floats import to_float32
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.partitions import partition

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.bench.sweep.arrays import GuardedArray
    from qccl.bench.sweep.calls import QuantizedCall
    from qccl.communicator.communicator import Communicator

    AnyCall = QuantizedCall | PlainCall

__all__ = ["check", "stretches_of"]

#: elements of a check in one step
_STRETCH = 1 << 17


def check(
    comm: Communicator, call: AnyCall, run: Callable[[], object], x: GuardedArray, out: GuardedArray, checks: int
) -> tuple[int | None, float | None]:
    """Collective: check ``checks`` calls on different values. Returns the wrong elements and the relative L2 error.

    ``run`` makes the call from ``x`` to ``out``, which are the same object in place.
    """
    if checks == 0:
        return None, None
    kind = KINDS[call.case.kind]
    compare: Any = compare_shared if kind.is_allreduce else compare_parts
    found: list[tuple[float, float, float]] = []
    for seed in range(checks):
        x.fill(comm.rank, seed)
        if kind.adds:
            out.fill(comm.size + comm.rank, seed)
        elif out is not x:
            out.poison()
        call.forget()
        number = comm.calls  # the next call's number, which keys its random numbers
        run()
        result, beside = out.get()
        if out is not x:
            beside += x.changed(comm.rank, seed)
        found += [(beside, 0.0, 0.0), *compare(comm, call, result, seed, number)]
    mine = struct.pack("<ddd", *_sums(found))
    wrong, squares, reference = _sums([struct.unpack("<ddd", item) for item in comm.allgather(mine)])
    return int(wrong), math.sqrt(squares / reference) if reference else 0.0


def _sums(rows: Iterable[tuple[float, ...]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def compare_shared(
    comm: Communicator, call: AnyCall, out: NDArray[Any], seed: int, number: int
) -> Iterator[tuple[float, float, float]]:
    """Yield wrong elements, and the squares of error and exact result, of the stretches that this rank compares.

    The ranks share the work: each compares a part of its own result with the reference. That is enough if all results
    have the same bits. If their digests differ, the rank gathers all ranks' results of its part.
    """
    case = call.case
    digests = comm.allgather(hashlib.blake2b(out.data, digest_size=16).digest())
    differ = call.identical and len(set(digests)) > 1
    for turn, (shard, start, stop, index) in enumerate(stretches_of(call)):
        results = [out[start:stop]]
        if differ:
            results = [np.frombuffer(item, out.dtype) for item in comm.allgather(results[0].tobytes())]
        if turn % comm.size == comm.rank:
            values = _values(call, range(comm.size), start, stop, seed)
            exact = reference.exact(values, case.op)
            errors = [to_float32(result, case.dtype) - exact for result in results]
            if isinstance(call, PlainCall):
                bad = ~(np.abs(errors[0]) <= call.bound(values))  # NaN counts as wrong
            else:
                expected = call.expected(values, shard, index, number)
                bad = np.logical_or.reduce([_differ(result, expected) for result in results])
            yield _sums_of(bad, errors[0], exact)


def stretches_of(call: AnyCall, longest: int = _STRETCH) -> Iterator[tuple[int, int, int, int]]:
    """Yield shard, first element, end and index of each stretch of the vector, of at most ``longest`` elements.

    Stretches are whole buckets of all the call's codecs, at least one; if a codec has one bucket per shard, they are
    whole shards of an array.
    """
    found = partition(call.each, call.shards, call.codecs, ChunkPolicy.of_elements(longest))
    arrays = list(accumulate(call.each, initial=0))
    for shard in range(found.parts):
        for part in found.segments(shard):
            yield shard, arrays[part.array] + part.start, arrays[part.array] + part.stop, part.index


class _CheckedPart(NamedTuple):
    """Elements ``start`` to ``stop`` of a result, made from the elements from ``first`` on of the inputs of ``ranks``.

    ``owner`` has combined them; ``key`` is the first element's number in random keys.
    """

    start: int
    stop: int
    ranks: range
    first: int
    owner: int
    key: int


def compare_parts(
    comm: Communicator, call: QuantizedCall, result: NDArray[Any], seed: int, number: int
) -> Iterator[tuple[float, float, float]]:
    """Do compare_shared() for this rank's own output, if ranks get different results."""
    case, kind = call.case, KINDS[call.case.kind]
    for part in _parts(call, comm.rank, comm.size):
        found, before = result[part.start : part.stop], None
        values = _values(call, part.ranks, part.first, part.first + part.stop - part.start, seed)
        if kind.combines:
            exact, expected = reference.exact(values, case.op), call.expected(values, part.owner, part.key, number)
        else:
            exact, source = values[0].astype(np.float64), part.ranks[0]
            round_number = comm.rank if case.kind == "all_to_all" else 0
            moved = (comm.size > 1 or kind.adds) and not (case.kind == "all_to_all" and source == comm.rank)
            if kind.adds:
                own = data.gaussian(comm.size + comm.rank, part.start, part.stop, case.dtype, seed)
                before = to_float32(own, case.dtype)
            given = (values[0], call.codec, case.dtype, part.key, number, round_number, source)
            expected = reference.moved(*given, moved=moved, added_to=before)
        error = to_float32(found, case.dtype) - exact - (0.0 if before is None else before)
        yield _sums_of(_differ(found, expected), error, exact)


def _parts(call: QuantizedCall, rank: int, size: int) -> Iterator[_CheckedPart]:
    """Split the output of ``rank`` at bucket boundaries, for collectives other than the all-reduces."""
    count, root, codec, every = call.case.count, call.case.root, call.codec, range(size)
    each = count // size
    keys = -(-each // call.granule) * call.granule
    match call.case.kind:
        case "reduce":
            parts = stretches_of(call) if rank == root else ()
            yield from (_CheckedPart(start, stop, every, start, shard, index) for shard, start, stop, index in parts)
            return
        case "reduce_scatter":
            whole = [_CheckedPart(0, each, every, rank * each, rank, rank * keys)]
        case "all_gather":
            whole = [_CheckedPart(r * each, (r + 1) * each, range(r, r + 1), 0, r, r * keys) for r in every]
        case "all_to_all":
            whole = [_CheckedPart(r * each, (r + 1) * each, range(r, r + 1), rank * each, r, 0) for r in every]
        case "broadcast":
            whole = [_CheckedPart(0, count, range(root, root + 1), 0, root, 0)]
        case _:  # peer_exchange
            sources = enumerate((rank, *neighbours(rank, size)))
            whole = [_CheckedPart(i * count, (i + 1) * count, range(r, r + 1), 0, r, 0) for i, r in sources]
    step = max(codec.granule, _STRETCH // codec.granule * codec.granule) if codec.splittable else 1 << 62
    for part in whole:
        for at in range(0, part.stop - part.start, step):
            start, stop = part.start + at, min(part.start + at + step, part.stop)
            yield _CheckedPart(start, stop, part.ranks, part.first + at, part.owner, part.key + at)


def _values(call: AnyCall, ranks: range, start: int, stop: int, seed: int) -> list[NDArray[np.float32]]:
    dtype = call.case.dtype
    inputs = [to_float32(data.gaussian(rank, start, stop, dtype, seed), dtype) for rank in ranks]
    return call.contributions(inputs)


def _differ(found: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.bool_]:
    bits = f"u{found.dtype.itemsize}"
    different: NDArray[np.bool_] = found.view(bits) != expected.view(bits)
    return different


def _sums_of(bad: Any, error: Any, exact: Any) -> tuple[float, float, float]:
    return float(np.count_nonzero(bad)), float(error @ error), float(exact @ exact)
