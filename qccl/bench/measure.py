"""Measuring calls on a communicator, in turn: their times, wrong elements, errors, and bytes on the wire."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qccl.bench.arrays import Arrays, Guarded, arrays_of
from qccl.bench.calls import Case, PlainCall, QuantizedCall
from qccl.bench.check import check
from qccl.bench.kinds import KINDS
from qccl.bench.parts import check_parts

if TYPE_CHECKING:
    from qccl.bench.bulk import Bulk
    from qccl.communicator import Communicator

__all__ = ["Counts", "Row", "Side", "measure"]

#: doublings that Gaussian data has room for before it overflows
_HEADROOM = {"float32": 100, "bfloat16": 100, "float16": 10}
#: parts into which the timed calls are cut, between which the calls that are compared take turns
_ROUNDS = 5


@dataclass(frozen=True)
class Counts:
    """How often: timed and untimed calls, checked calls, and how the ranks' times become one (nccl-tests' -a)."""

    iters: int = 20
    warmups: int = 1
    checks: int = 1
    average: int = 3

    @property
    def rounds(self) -> int:
        """The parts into which the timed calls are cut."""
        return min(self.iters, _ROUNDS)


@dataclass(frozen=True)
class Side:
    """One mode (out of place, or in place) of a row.

    Attributes:
        rounds: seconds per call in each round; the sides of rows that were measured together took turns round by round.
        wrong: elements outside the derived bound or other than they must be, input that was changed, and guard
            elements that were written, on all ranks; None where nothing was checked.
        error: relative L2 error of the result; None likewise.
        crossed: bytes that the link's limiter counted, per byte sent; None outside the lab.
        bulk: seconds that a plain transfer of the same bytes took, in the same rounds; None outside the lab.
    """

    rounds: tuple[float, ...]
    wrong: int | None
    error: float | None
    crossed: float | None
    bulk: float | None = None

    @property
    def seconds(self) -> float:
        """Per call: the median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The slowest round less the fastest one, over the median."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds if self.seconds else 0.0

    def speedups(self, plain: Side) -> list[float]:
        """How often as fast as ``plain`` each round was, beside which it was measured."""
        return [theirs / mine for theirs, mine in zip(plain.rounds, self.rounds, strict=True) if mine]


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


@dataclass
class _Timed:
    """What takes turns with others, and what it took on this rank.

    Attributes:
        renews: the array's values are set again before a turn.
        most: calls until the values must be set again.
        nbytes: what all ranks send in a call.
    """

    run: Callable[[], object]
    nbytes: int
    renews: bool = True
    most: int = 1 << 62
    seconds: list[float] = field(default_factory=list)
    crossed: int = 0
    called: int = 0


def measure(
    comm: Communicator,
    calls: Sequence[QuantizedCall | PlainCall],
    counts: Counts,
    *,
    meter: Callable[[], int] | None,
    before_turn: Callable[[str], None],
    arrays: Arrays | None = None,
    bulk: Bulk | None = None,
) -> list[Row]:
    """Collective: measure calls of one collective and size, out of place and in place; a row for each.

    Within a mode they take turns, so that what disturbs the machine for a while disturbs all of them. ``meter`` reads
    this rank's link counter; ``before_turn`` hears whose turn begins; ``arrays`` are the communicator's if not given;
    beside the compressed calls ``bulk`` transfers as many bytes, if given.
    """
    arrays = arrays_of(comm) if arrays is None else arrays
    given, taken = calls[0].counts(comm)
    dtype = calls[0].case.dtype
    x, y = Guarded(arrays, given, dtype), Guarded(arrays, taken, dtype)
    bulks = [None if bulk is None or isinstance(call, PlainCall) else bulk.bind(max(call.sent)) for call in calls]
    modes = [("out of place", y), ("in place", x)]
    if not KINDS[calls[0].case.kind].is_allreduce:
        modes.pop()
    sides = [_measure_mode(comm, calls, bulks, counts, arrays, x, out, meter, before_turn, name) for name, out in modes]
    return [
        Row(call.case, call.name, call.algorithm, max(call.sent), found[0], found[1] if len(found) > 1 else None)
        for call, found in zip(calls, zip(*sides, strict=True), strict=True)
    ]


def _measure_mode(
    comm: Communicator,
    calls: Sequence[QuantizedCall | PlainCall],
    bulks: Sequence[Callable[[], object] | None],
    counts: Counts,
    arrays: Arrays,
    x: Guarded,
    out: Guarded,
    meter: Callable[[], int] | None,
    before_turn: Callable[[str], None],
    mode: str,
) -> list[Side]:
    """One mode of all calls: they are checked, and then timed in turn."""
    checked, timed, beside = [], [], []
    for call, transfer in zip(calls, bulks, strict=True):
        run = call.bind(arrays, x.array, out.array)
        if isinstance(call, PlainCall) or KINDS[call.case.kind].is_allreduce:
            checked.append(check(comm, call, run, x, out, counts.checks))
        else:
            checked.append(check_parts(comm, call, run, x, out, counts.checks))
        most = _calls_until_overflow(call.case, comm.size, call.growth) if out is x else 1 << 62
        timed.append(_Timed(run, sum(call.sent), most=most))
        beside.append(None if transfer is None else _Timed(transfer, 0, renews=False))
    for n in _cut(counts):
        for call, mine, other in zip(calls, timed, beside, strict=True):
            before_turn(f"{call.name} {mode}")
            _take_turn(comm, arrays, mine, x, n, counts.warmups, meter)
            if other is not None:
                _take_turn(comm, arrays, other, x, n, counts.warmups, None)
    return [
        _side(comm, mine, other, counts.average, wrong, error, metered=meter is not None)
        for mine, other, (wrong, error) in zip(timed, beside, checked, strict=True)
    ]


def _cut(counts: Counts) -> list[int]:
    """The timed calls of each round."""
    least, more = divmod(counts.iters, counts.rounds)
    return [least + (i < more) for i in range(counts.rounds)]


def _take_turn(
    comm: Communicator,
    arrays: Arrays,
    timed: _Timed,
    x: Guarded,
    n: int,
    warmups: int,
    meter: Callable[[], int] | None,
) -> None:
    """Time ``n`` calls back to back, begun right after warm-up calls that bring the ranks in step.

    A sum in place grows with every call; before it overflows the timing stops, the values are set again, and it goes
    on.
    """
    warmups = min(warmups, timed.most // 2)
    total, left = 0.0, n
    while left:
        now = min(left, max(1, (timed.most - warmups) // arrays.calls_per_run))
        if timed.renews:
            x.fill(comm.rank, seed=0)
        comm.barrier()
        passed = meter() if meter else 0
        comm.barrier()
        for _ in range(warmups):
            timed.run()
        total += arrays.run(timed.run, now)
        comm.barrier()
        timed.crossed += (meter() if meter else 0) - passed
        left -= now
        timed.called += now + warmups
    timed.seconds.append(total / n)


def _side(
    comm: Communicator,
    mine: _Timed,
    bulk: _Timed | None,
    average: int,
    wrong: int | None,
    error: float | None,
    *,
    metered: bool,
) -> Side:
    """What all ranks found, as one."""
    item = json.dumps([mine.seconds, mine.crossed, bulk.seconds if bulk else []]).encode()
    gathered = [json.loads(each) for each in comm.allgather(item)]
    rounds, transfers = (
        tuple(_combined(times, average) for times in zip(*(each[i] for each in gathered), strict=True)) for i in (0, 2)
    )
    sent = mine.nbytes * mine.called
    crossed = sum(each[1] for each in gathered) / sent if metered and sent else None
    return Side(rounds, wrong, error, crossed, statistics.median(transfers) if transfers else None)


def _calls_until_overflow(case: Case, size: int, growth: int = 1) -> int:
    """``growth``: see QuantizedCall."""
    factor = (size if case.op == "sum" else 1) * growth
    return 1 << 62 if factor == 1 else max(2, int(_HEADROOM[case.dtype.name] / math.log2(factor)))


def _combined(times: Sequence[float], average: int) -> float:
    """The ranks' times as one, by nccl-tests' -a."""
    return (times[0], sum(times) / len(times), min(times), max(times))[average]
