"""Measures calls in turns: their times, wrong elements, errors and bytes on the wire."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qccl.bench.options import KINDS
from qccl.bench.sweep.arrays import Arrays, GuardedArray, arrays_of
from qccl.bench.sweep.calls import Case, PlainCall, QuantizedCall
from qccl.bench.sweep.check import check

if TYPE_CHECKING:
    from qccl.communicator.communicator import Communicator

    Calls = Sequence[QuantizedCall | PlainCall]

__all__ = ["Counts", "Row", "Side", "measure"]

#: doublings of Gaussian data that are safe from overflow
_HEADROOM = {"float32": 100, "bfloat16": 100, "float16": 10}
#: rounds into which the timed calls are split; in each round the compared calls take turns
_ROUNDS = 5


@dataclass(frozen=True)
class Counts:
    """Numbers of timed, warm-up and checked calls, and how the ranks' times are combined (nccl-tests' -a)."""

    iters: int = 20
    warmups: int = 1
    checks: int = 1
    average: int = 3

    @property
    def rounds(self) -> int:
        """The rounds into which the timed calls are split."""
        return min(self.iters, _ROUNDS)


@dataclass(frozen=True)
class Side:
    """One mode (out of place, or in place) of a row.

    Attributes:
        rounds: seconds per call in each round; rows that are measured together take turns round by round.
        wrong: the number, on all ranks, of elements with other bits than the codec's, of changed elements of the input,
            and of written guard elements; None without a check.
        error: relative L2 error of the result; None without a check.
        crossed: bytes that the link's limiter counted, per byte sent; None outside the lab.
    """

    rounds: tuple[float, ...]
    wrong: int | None
    error: float | None
    crossed: float | None

    @property
    def seconds(self) -> float:
        """Seconds per call: the median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float | None:
        """The difference of the slowest and the fastest round, divided by the median; None with one round."""
        if len(self.rounds) == 1:
            return None
        return (max(self.rounds) - min(self.rounds)) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        codec, algorithm: canonical names; the plain all-reduce has the library's name and "".
        wire_nbytes: bytes that the busiest link carries in a call (for the plain all-reduce: must carry).
        in_place: None if the collective has no such mode.
    """

    case: Case
    codec: str
    algorithm: str
    wire_nbytes: int
    out_of_place: Side
    in_place: Side | None

    @property
    def sides(self) -> list[Side]:
        """The modes that the collective has."""
        return [self.out_of_place] if self.in_place is None else [self.out_of_place, self.in_place]


@dataclass
class _Timed:
    """A call that takes turns with others, and this rank's measurements of it.

    Attributes:
        nbytes: bytes that all ranks send in a call.
        most: calls after which the values must be set again.
        seconds: the mean time of a call in each turn.
        crossed: bytes that passed this rank's link.
        called: the number of calls so far, including warm-up calls.
    """

    run: Callable[[], object]
    nbytes: int
    most: int = 1 << 62
    seconds: list[float] = field(default_factory=list)
    crossed: int = 0
    called: int = 0


def measure(
    comm: Communicator,
    calls: Calls,
    counts: Counts,
    *,
    meter: Callable[[], int] | None,
    arrays: Arrays | None = None,
) -> list[Row]:
    """Collective: measure calls of one collective and size, out of place and in place. Returns a row for each call.

    Within a mode the calls take turns, so that a disturbance of the machine affects all of them equally. ``meter``
    reads this rank's link counter, if there is a link. ``arrays``: None means arrays of the communicator's backend.
    """
    bench = _Bench(comm, counts, arrays_of(comm) if arrays is None else arrays, meter)
    given, taken = calls[0].counts(comm)
    dtype = calls[0].case.dtype
    x, y = GuardedArray(bench.arrays, given, dtype), GuardedArray(bench.arrays, taken, dtype)
    outs = (y, x) if KINDS[calls[0].case.kind].is_allreduce else (y,)
    sides = [bench.measure_mode(calls, x, out) for out in outs]
    return [
        Row(call.case, call.name, call.algorithm, max(call.sent), found[0], found[1] if len(found) > 1 else None)
        for call, found in zip(calls, zip(*sides, strict=True), strict=True)
    ]


@dataclass(frozen=True)
class _Bench:
    """The arguments of measure() that are the same for both modes."""

    comm: Communicator
    counts: Counts
    arrays: Arrays
    meter: Callable[[], int] | None

    def measure_mode(self, calls: Calls, x: GuardedArray, out: GuardedArray) -> list[Side]:
        """Check all calls from ``x`` to ``out``, and then time them in turn."""
        checked, timed = [], []
        for call in calls:
            run = call.bind(self.arrays, x.array, out.array)
            checked.append(check(self.comm, call, run, x, out, self.counts.checks))
            most = _calls_until_overflow(call.case, self.comm.size, call.growth) if out is x else 1 << 62
            timed.append(_Timed(run, sum(call.sent), most))
        for n in _cut(self.counts):
            for mine in timed:
                self._take_turn(mine, x, n)
        return [self._side(mine, wrong, error) for mine, (wrong, error) in zip(timed, checked, strict=True)]

    def _take_turn(self, timed: _Timed, x: GuardedArray, n: int) -> None:
        """Time ``n`` calls back to back, right after warm-up calls that bring the ranks in step.

        A sum in place grows with every call. Before it overflows, the timing pauses while the values are set again.
        """
        warmups = min(self.counts.warmups, timed.most // 2)
        total, left = 0.0, n
        while left:
            now = min(left, max(1, (timed.most - warmups) // self.arrays.calls_per_run))
            x.fill(self.comm.rank, seed=0)
            self.comm.barrier()
            passed = self.meter() if self.meter else 0
            self.comm.barrier()
            for _ in range(warmups):
                timed.run()
            total += self.arrays.run(timed.run, now)
            self.comm.barrier()
            timed.crossed += (self.meter() if self.meter else 0) - passed
            left -= now
            timed.called += now + warmups
        timed.seconds.append(total / n)

    def _side(self, mine: _Timed, wrong: int | None, error: float | None) -> Side:
        """Combine the measurements of all ranks."""
        gathered = self.comm.allgather(json.dumps([mine.seconds, mine.crossed]).encode())
        seconds, crossed = zip(*map(json.loads, gathered), strict=True)
        rounds = tuple(_combined(times, self.counts.average) for times in zip(*seconds, strict=True))
        sent = mine.nbytes * mine.called
        return Side(rounds, wrong, error, sum(crossed) / sent if self.meter is not None and sent else None)


def _cut(counts: Counts) -> list[int]:
    """The number of timed calls in each round."""
    least, more = divmod(counts.iters, counts.rounds)
    return [least + (i < more) for i in range(counts.rounds)]


def _calls_until_overflow(case: Case, size: int, growth: int = 1) -> int:
    """The calls in place after which values may overflow; ``growth``: see QuantizedCall."""
    factor = (size if case.op == "sum" else 1) * growth
    return 1 << 62 if factor == 1 else max(2, int(_HEADROOM[case.dtype.name] / math.log2(factor)))


def _combined(times: Sequence[float], average: int) -> float:
    """Combine the ranks' times like nccl-tests' -a."""
    return (times[0], sum(times) / len(times), min(times), max(times))[average]
