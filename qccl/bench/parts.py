"""Checks of collectives whose ranks get different results: sums within the bound, moved values to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl.bench import accuracy, data, reference
from qccl.bench.kinds import KINDS, Stretch, stretches
from qccl.codecs import NoCodec
from qccl.codecs.floats import to_float32
from qccl.collectives import ReduceScatterSpec
from qccl.collectives.operands import ranks_by_node

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.bench.calls import QuantizedCall
    from qccl.communicator import Communicator

__all__ = ["compare_parts"]

#: elements that are compared at a time
_STRETCH = 1 << 17


def compare_parts(
    comm: Communicator, call: QuantizedCall, result: NDArray[Any], seed: int, number: int
) -> Iterator[tuple[float, float, float]]:
    """Wrong elements and squares of this rank's output, as compare_shared() in check.py yields them."""
    for part, index in _parts(call, comm):
        yield _compare(comm, call, part, index, result[part.start : part.stop], seed, number)


def _parts(call: QuantizedCall, comm: Communicator) -> Iterator[tuple[Stretch, int]]:
    """Stretches of this rank's output, split at bucket boundaries, each with the index for its random numbers."""
    granule = call.codec.granule
    step = max(granule, _STRETCH // granule * granule) if call.codec.splittable else 1 << 62
    name = call.case.kind
    for number, whole in enumerate(stretches(name, comm.rank, comm.size, call.case.count, call.case.root)):
        origin = number * -(-(whole.stop - whole.start) // granule) * granule if name == "all_gather" else 0
        for start in range(whole.start, whole.stop, step):
            stop, first = min(start + step, whole.stop), whole.first + start - whole.start
            yield Stretch(start, stop, whole.ranks, first), origin + start - whole.start


def _compare(
    comm: Communicator, call: QuantizedCall, part: Stretch, index: int, found: NDArray[Any], seed: int, number: int
) -> tuple[float, float, float]:
    """Wrong elements, and the squares of error and exact result."""
    case, last = call.case, part.first + part.stop - part.start
    inputs = [data.gaussian(rank, part.first, last, case.dtype, seed) for rank in part.ranks]
    values = call.contributions([to_float32(each, case.dtype) for each in inputs])
    if KINDS[case.kind].combines:
        exact = accuracy.allreduce_exact(values, case.op)
        if isinstance(call.plan.spec, ReduceScatterSpec) and (nodes := ranks_by_node(call.plan.spec.node_ids)):
            given = (call.codec, NoCodec(), case.dtype, case.op, "one_shot", nodes)
            bound = accuracy.hierarchical_bound(values, *given)
        else:
            bound = accuracy.allreduce_bound(values, call.codec, case.dtype, case.op, call.algorithm, -1)
        error = to_float32(found, case.dtype) - exact
        bad = ~(np.abs(error) <= bound)
    else:
        exact, source = values[0].astype(np.float64), part.ranks[0]
        round_number = comm.rank if case.kind == "all_to_all" else 0
        moved = (comm.size > 1 or KINDS[case.kind].adds) and not (case.kind == "all_to_all" and source == comm.rank)
        before = _before(comm, call, part, seed)
        expected = reference.moved(
            *(values[0], call.codec, case.dtype, index, number, round_number, source), moved=moved, added_to=before
        )
        error = to_float32(found, case.dtype) - exact - (0.0 if before is None else before)
        bits = f"u{case.dtype.itemsize}"
        bad = found.view(bits) != expected.view(bits)
    return float(np.count_nonzero(bad)), float(error @ error), float(exact @ exact)


def _before(comm: Communicator, call: QuantizedCall, part: Stretch, seed: int) -> NDArray[np.float32] | None:
    """The values to which the call added its result; None if it adds to nothing."""
    case = call.case
    if not KINDS[case.kind].adds:
        return None
    return to_float32(data.gaussian(comm.size + comm.rank, part.start, part.stop, case.dtype, seed), case.dtype)
