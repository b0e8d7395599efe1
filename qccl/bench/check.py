"""Checks of a call: its result to the bit and within the derived bound; its input and the guard elements unchanged."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.bench import accuracy, data

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.bench.arrays import Guarded
    from qccl.bench.calls import PlainCall, QuantizedCall
    from qccl.communicator import Communicator

__all__ = ["check"]

#: elements that are checked at a time
_STRETCH = 1 << 17


def check(
    comm: Communicator,
    call: QuantizedCall | PlainCall,
    run: Callable[[], object],
    x: Guarded,
    out: Guarded,
    checks: int,
) -> tuple[int | None, float | None]:
    """Collective: the number of wrong elements and the relative L2 error of ``checks`` calls on different values.

    ``run`` makes the call from ``x`` to ``out``; in place they are the same object.
    """
    if checks == 0:
        return None, None
    wrong, squares, reference = 0, 0.0, 0.0
    for seed in range(checks):
        x.fill(comm.rank, seed)
        if out is not x:
            out.poison()
        call.forget()
        number = comm.calls  # the next call's number, which keys its random numbers
        run()
        result, beside = out.get()
        if out is not x:
            beside += x.changed(comm.rank, seed)
        w, s, r = _compare(comm, call, result, seed, number, beside)
        wrong, squares, reference = wrong + w, squares + s, reference + r
    return wrong, math.sqrt(squares / reference) if reference else 0.0


def _compare(
    comm: Communicator, call: QuantizedCall | PlainCall, out: NDArray[Any], seed: int, number: int, beside: int
) -> tuple[int, float, float]:
    """Wrong elements, and the squares of error and exact result, over all ranks.

    The ranks share the work: each compares a part of its own result with the bound and with the bits of the reference.
    That is enough if all results have the same bits. If their digests differ, the rank that compares a part gathers all
    results of it. ``beside`` is the number of wrong elements around this rank's result.
    """
    case = call.case
    digests = comm.allgather(hashlib.blake2b(out.data, digest_size=16).digest())
    differ = call.identical and len(set(digests)) > 1
    wrong, squares, reference = beside, 0.0, 0.0
    parts = accuracy.stretches(case.count, call.shards, call.codecs, _STRETCH)
    for turn, (shard, start, stop) in enumerate(parts):
        results = [out[start:stop]]
        if differ:
            results = [np.frombuffer(item, out.dtype) for item in comm.allgather(results[0].tobytes())]
        if turn % comm.size != comm.rank:
            continue
        inputs = [data.gaussian(rank, start, stop, case.dtype, seed) for rank in range(comm.size)]
        values = call.contributions([data.to_float32(each, case.dtype) for each in inputs])
        exact, bound = accuracy.allreduce_exact(values, case.op), call.bound(values, shard)
        errors = [data.to_float32(result, case.dtype) - exact for result in results]
        bad = np.logical_or.reduce([~(np.abs(error) <= bound) for error in errors])  # NaN counts as wrong
        expected = call.expected(values, shard, start, number)
        if expected is not None:
            bits = f"u{case.dtype.itemsize}"
            bad |= np.logical_or.reduce([result.view(bits) != expected.view(bits) for result in results])
        wrong += int(np.count_nonzero(bad))
        squares += float(errors[0] @ errors[0])
        reference += float(exact @ exact)
    sums = [struct.unpack("<qdd", item) for item in comm.allgather(struct.pack("<qdd", wrong, squares, reference))]
    return sum(s[0] for s in sums), math.fsum(s[1] for s in sums), math.fsum(s[2] for s in sums)
