"""Checks of a call: its result to the bit and within the derived bound; its input and the guard elements unchanged."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.bench import accuracy, data
from qccl.bench.kinds import KINDS
from qccl.bench.parts import compare_parts
from qccl.codecs.floats import to_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.bench.arrays import Guarded
    from qccl.bench.calls import PlainCall, QuantizedCall
    from qccl.communicator import Communicator

    AnyCall = QuantizedCall | PlainCall

__all__ = ["check"]

#: elements that are checked at a time
_STRETCH = 1 << 17


def check(
    comm: Communicator, call: AnyCall, run: Callable[[], object], x: Guarded, out: Guarded, checks: int
) -> tuple[int | None, float | None]:
    """Collective: the number of wrong elements and the relative L2 error of ``checks`` calls on different values.

    ``run`` makes the call from ``x`` to ``out``; in place they are the same object.
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
    """Wrong elements, and the squares of error and exact result, of the stretches that this rank compares.

    The ranks share the work: each compares a part of its own result with the bound and with the bits of the reference.
    That is enough if all results have the same bits. If their digests differ, the rank that compares a part gathers all
    results of it.
    """
    case = call.case
    digests = comm.allgather(hashlib.blake2b(out.data, digest_size=16).digest())
    differ = call.identical and len(set(digests)) > 1
    parts = accuracy.stretches(case.count, call.shards, call.codecs, _STRETCH)
    for turn, (shard, start, stop) in enumerate(parts):
        results = [out[start:stop]]
        if differ:
            results = [np.frombuffer(item, out.dtype) for item in comm.allgather(results[0].tobytes())]
        if turn % comm.size != comm.rank:
            continue
        inputs = [data.gaussian(rank, start, stop, case.dtype, seed) for rank in range(comm.size)]
        values = call.contributions([to_float32(each, case.dtype) for each in inputs])
        exact, bound = accuracy.allreduce_exact(values, case.op), call.bound(values, shard)
        errors = [to_float32(result, case.dtype) - exact for result in results]
        bad = np.logical_or.reduce([~(np.abs(error) <= bound) for error in errors])  # NaN counts as wrong
        expected = call.expected(values, shard, start, number)
        if expected is not None:
            bits = f"u{case.dtype.itemsize}"
            bad |= np.logical_or.reduce([result.view(bits) != expected.view(bits) for result in results])
        yield float(np.count_nonzero(bad)), float(errors[0] @ errors[0]), float(exact @ exact)
