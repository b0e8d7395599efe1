"""Measuring one collective on a communicator: its time, its wrong elements, its error, its bytes on the wire."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qccl.bench.arrays import Arrays, Guarded, arrays_of
from qccl.bench.calls import Case, PlainCall, QuantizedCall
from qccl.bench.check import check
from qccl.bench.kinds import KINDS
from qccl.bench.parts import check_parts

if TYPE_CHECKING:
    from qccl.communicator import Communicator

__all__ = ["Counts", "Row", "Side", "measure"]

#: doublings that Gaussian data has room for before it overflows
_HEADROOM = {"float32": 100, "bfloat16": 100, "float16": 10}


@dataclass(frozen=True)
class Counts:
    """How often: timed and untimed calls, checked calls, and how the ranks' times become one (nccl-tests' -a)."""

    iters: int = 20
    warmups: int = 1
    checks: int = 1
    average: int = 3


@dataclass(frozen=True)
class Side:
    """One mode (out of place, or in place) of a row.

    Attributes:
        seconds: per call.
        wrong: elements outside the derived bound or other than they must be, input that was changed, and guard
            elements that were written, on all ranks; None where nothing was checked.
        error: relative L2 error of the result; None likewise.
        crossed: bytes that the link's limiter counted, per byte sent; None outside the lab.
    """

    seconds: float
    wrong: int | None
    error: float | None
    crossed: float | None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        codec, algorithm: canonical names; the plain all-reduce's are the library's and "".
        wire_nbytes: bytes that the busiest link carries in a call (for the plain all-reduce: must carry).
        in_place: None where the collective has no such mode.
    """

    case: Case
    codec: str
    algorithm: str
    wire_nbytes: int
    out_of_place: Side
    in_place: Side | None

    @property
    def sides(self) -> list[Side]:
        """The modes that there are."""
        return [self.out_of_place] if self.in_place is None else [self.out_of_place, self.in_place]


def measure(
    comm: Communicator,
    call: QuantizedCall | PlainCall,
    counts: Counts,
    *,
    meter: Callable[[], int] | None,
    before_side: Callable[[str], None],
    arrays: Arrays | None = None,
) -> Row:
    """Collective: measure one call out of place and in place.

    ``meter`` reads this rank's link counter; ``before_side`` hears "out of place" or "in place" before each begins;
    ``arrays`` are the communicator's if not given.
    """
    case = call.case
    arrays = arrays_of(comm) if arrays is None else arrays
    given, taken = call.counts(comm)
    x, y = Guarded(arrays, given, case.dtype), Guarded(arrays, taken, case.dtype)
    sides: list[Side | None] = []
    whole = KINDS[case.kind].is_allreduce
    for mode, out in (("out of place", y), ("in place", x)):
        if mode == "in place" and not whole:
            sides.append(None)
            continue
        before_side(mode)
        run = call.bind(arrays, x.array, out.array)
        if whole or isinstance(call, PlainCall):
            wrong, error = check(comm, call, run, x, out, counts.checks)
        else:
            wrong, error = check_parts(comm, call, run, x, out, counts.checks)
        seconds, crossed = _time(comm, call, arrays, run, x, out, counts, meter)
        sides.append(Side(seconds, wrong, error, crossed))
    first, second = sides
    assert first is not None
    return Row(case, call.name, call.algorithm, max(call.sent), first, second)


def _time(
    comm: Communicator,
    call: QuantizedCall | PlainCall,
    arrays: Arrays,
    run: Callable[[], object],
    x: Guarded,
    out: Guarded,
    counts: Counts,
    meter: Callable[[], int] | None,
) -> tuple[float, float | None]:
    """Seconds per call, and the bytes that crossed the link per byte sent.

    Back-to-back calls, begun right after warm-up calls that bring the ranks in step. A sum in place grows with every
    call; before it overflows the timing stops, the values are set again, and it goes on.
    """
    limit = _calls_until_overflow(call.case, comm.size) if out is x else counts.warmups + counts.iters
    warmups = min(counts.warmups, limit // 2)
    total, crossed, left, called = 0.0, 0, counts.iters, 0
    while left:
        n = min(left, max(1, (limit - warmups) // arrays.calls_per_run))
        x.fill(comm.rank, seed=0)
        comm.barrier()
        passed = meter() if meter else 0
        comm.barrier()
        for _ in range(warmups):
            run()
        total += arrays.run(run, n)
        comm.barrier()
        crossed += (meter() if meter else 0) - passed
        left -= n
        called += n + warmups
    gathered = [struct.unpack("<dq", item) for item in comm.allgather(struct.pack("<dq", total, crossed))]
    seconds = _combined([t for t, _ in gathered], counts.average) / counts.iters
    sent = sum(call.sent) * called
    return seconds, sum(c for _, c in gathered) / sent if meter and sent else None


def _calls_until_overflow(case: Case, size: int) -> int:
    if case.op != "sum" or size == 1:
        return 1 << 62
    return max(2, int(_HEADROOM[case.dtype.name] / math.log2(size)))


def _combined(times: Sequence[float], average: int) -> float:
    """The ranks' times as one, by nccl-tests' -a."""
    return (times[0], sum(times) / len(times), min(times), max(times))[average]
