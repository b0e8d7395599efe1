"""Measures how long the calls of a group take, in less than a second, for the group's profile.

All ranks make the same calls, on memory of their own. What is called next depends only on times on which the ranks have
agreed: each rank gets those of all ranks, exactly, and takes their mean. So each rank measures the same, and gets the
same profile. Sums of times are exact, by math.fsum: the result of sum() depends on the version of Python, which may
differ between ranks. It is the mean because ranks begin a call at different times: with two ranks, one waits longer by
what the other waits less.

All ways to make a call are timed at the same sizes: a small one, and larger ones by a fixed factor, as large as time
permits. Then all sizes are timed again, until the time is over.

A measurement also ends within half of the group's timeout. If that is too short for calls of two sizes, or if a rank
has no memory for them, there are no times, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from qccl.arrays import Values
from qccl.codecs import Codec
from qccl.codecs.floats import from_float32
from qccl.collectives import COLLECTIVES, CollectiveSpec, spec_of_plan, ways
from qccl.collectives.topology import crossing_nbytes
from qccl.costs.group import Curve, Label, Prediction
from qccl.dtypes import FLOAT32, DType
from qccl.engine.base import Request, Rig
from qccl.errors import QcclError
from qccl.programs import Compiled
from qccl.schedule import Role
from qccl.session import Session

__all__ = ["candidates", "measure"]

#: seconds within which all calls should have ended. The last ones may take longer than expected
_LIMIT = 0.7
#: a measurement takes no longer than this part of the timeout
_OF_TIMEOUT = 0.5
#: elements of the first calls, and the factor between sizes
_LEAST, _STEP = 256, 16
#: if the calls of a size take more seconds together, the network delays them: one time of each must do, and the second
#: size is larger by this factor, because a delay says nothing about the rate
_LONG, _LONG_STEP = 0.06, 256
#: seconds in which the calls of one size are repeated, how often at most, and the fewest repetitions that count
_SLICE, _ROUNDS, _FEWEST = 0.04, 25, 3
#: so many calls follow each other in a repetition, after one that is not timed, if those of a size take fewer seconds
#: together: a program's calls follow each other, too, and a limit of the rate may let a single one pass
_BURST, _SHORT = 4, 0.01
#: of a call's times that with so large a part of them below it counts: disturbances only lengthen calls
_LOW = 4
#: agreements before the first time
_WARM = 2
#: a size is timed again so often at most, and first times take this part of the time: those of short calls are too
#: long, with cold caches
_AGAIN, _FIRST = 3, 0.7
#: begins the keys of the state that codecs keep meanwhile
_KEY = "\0measured "
#: elements of a call that counts as large
_LARGE = 1 << 16
#: random values, which are repeated
_VALUES = 1 << 15
#: bytes to which arrays are aligned
_ALIGNMENT = 256


def candidates(
    collective: str, dtype: DType, codecs: Iterable[Codec], nodes: Sequence[int]
) -> dict[Label, CollectiveSpec]:
    """A call for each codec and each way in which these nodes can make it; its number of elements does not count.

    Calls that differ only in the codec follow each other: they leave the ranks alike, some of which begin later than
    others.
    """
    own: dict[str, Any] = {"op": "avg"} if "op" in [each.name for each in fields(COLLECTIVES[collective])] else {}
    found: dict[Label, CollectiveSpec] = {}
    for codec in codecs:
        spec = spec_of_plan(collective, len(nodes), dtype.name, codec, None, own)
        found |= {(codec.spec(), way): each for way, each in ways(spec, nodes).items()}
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def measure(session: Session, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> dict[Label, Curve] | str:
    """Collective: the curves of ``calls``; or in words why there are none, because of a short timeout or no memory.

    In Session.run_measurement(). State stays as it was. Raises what calls raise, after which the group is unusable.
    """
    rig, refusal = None, ""
    try:
        rig = session.engine.rig()
    except QcclError as error:
        refusal = str(error)
    try:
        with _agreed(session):
            session.check_consistent("memory for measured calls", (), refusal, again=True)
        if rig is None:
            return refusal
        found = _Measurement(session, rig, nodes, calls).run()
        session.engine.wait_until_idle(session.engine.timeout)  # nothing uses the memory any more
        return found
    except _CannotCall as error:
        return str(error)
    finally:
        for key in [each for each in session.state.entries if each.startswith(_KEY)]:
            del session.state.entries[key]


class _CannotCall(Exception):
    """A rank cannot make a call that would be measured, and all ranks have heard of it."""


@contextlib.contextmanager
def _agreed(session: Session) -> Iterator[None]:
    """What is refused inside is refused on all ranks: raise _CannotCall, unless the group has failed.

    An error elsewhere is that of one rank alone. It must leave the call and so end the group, or the other ranks would
    go on with measured calls, and this one with the program's.
    """
    try:
        yield
    except QcclError as error:
        if session.failure is not None or session.engine.failure is not None:
            raise
        raise _CannotCall(str(error)) from error


class _Measurement:
    """The times so far, and what is measured next."""

    def __init__(self, session: Session, rig: Rig, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> None:
        self._session, self._rig, self._nodes, self._calls = session, rig, nodes, calls
        self._dtype = next(iter(calls.values())).dtype
        self._samples: dict[Label, dict[int, list[float]]] = {label: {} for label in calls}
        self._density: dict[Label, float] = {}
        self._order = random.Random(0)  # random() is the same on all ranks, whatever their versions of Python
        self._visits: dict[int, int] = {}  # by size: how often it was timed
        self._numbers = _ROUNDS * len(calls) + 1
        spec = spec_of_plan("all_gather", session.size * self._numbers, "float32", "none", None, {})
        self._own, self._all = (self._array(name, FLOAT32, spec, 0) for name in ("input", "output"))
        self._all = replace(self._all, address=self._own.address + _aligned(self._own.nbytes))
        self._free = self._all.address + _aligned(self._all.nbytes) - rig.address  # the arrays of calls follow
        self._filled = self._free
        self._gather = self._call(spec, {"input": self._own, "output": self._all}, None)
        self._begin, self._elapsed, self._limit = 0.0, 0.0, 0.0

    def run(self) -> dict[Label, Curve] | str:
        """Measure until nothing is unknown, or the time is over."""
        first = self._prepared(_LEAST)  # on CUDA kernels are compiled, which is not to be measured
        self._begin = time.monotonic()
        permitted = _OF_TIMEOUT * self._session.engine.timeout
        for _ in range(_WARM):  # makes the connections
            before = self._elapsed
            least = functools.reduce(np.minimum, self._rows([permitted, float(self._largest())]))
        permitted, self._most = float(least[0]), int(least[1])
        trip = self._elapsed - before
        if refusal := self._refusal(3 * len(first) * trip, permitted):
            return refusal
        self._limit = min(_LIMIT, permitted)
        self._time_calls(_LEAST, first)
        together = math.fsum(samples[self._whole(_LEAST)][0] for samples in self._samples.values())
        if refusal := self._refusal(2 * together, permitted):
            return refusal
        second = min(self._most, _LEAST * (_LONG_STEP if together > _LONG else _STEP))
        if self._whole(second) == self._whole(_LEAST):
            return f"there is memory for calls of {self._most} elements only"
        self._prepared(second)[0]()  # TCP's window grows
        self._time_calls(second)
        try:
            while (count := self._next()) is not None:
                self._time_calls(count)
        except _CannotCall:
            pass  # a rank has no memory for the next call: what was measured must do
        return {label: self._curve(label) for label in self._calls}

    def _refusal(self, needed: float, permitted: float) -> str:
        """Why calls cannot be measured that take at least so many seconds; empty if they can."""
        if self._elapsed + needed <= permitted:
            return ""
        return (
            f"calls of two sizes need about {self._elapsed + needed:.2g} s, and the timeout permits {permitted:.2g} s; "
            f"set a longer comm.timeout before the first such call"
        )

    # -- times ---------------------------------------------------------------------------------------------------------

    def _time_calls(self, count: int, calls: Sequence[Callable[[], None]] | None = None) -> None:
        """Time calls of about ``count`` elements, repeatedly and in changing order if they are short."""
        count, seconds = self._whole(count), self._rig.seconds
        calls = calls or self._prepared(count)
        if self._visits and self._has_time(count, 2):
            for call in calls:  # the timed one meets no fresh memory
                call()
        found = [[each] for each in self._agree([seconds(call, 1) for call in calls])]
        together = math.fsum(each for [each] in found)
        if together <= _LONG:
            burst = _BURST if together <= _SHORT else 1
            left = max(0.0, min(_SLICE * burst, self._limit - self._elapsed))
            rounds = max(_FEWEST, min(_ROUNDS, int(left / together / (1 + burst))))
            found = self._repeated(calls, rounds, burst)
        for samples, each in zip(self._samples.values(), found, strict=True):
            samples.setdefault(count, []).extend(each)
        self._visits[count] = self._visits.get(count, 0) + 1

    def _repeated(self, calls: Sequence[Callable[[], None]], rounds: int, burst: int) -> list[list[float]]:
        """The mean times of ``burst`` calls in a row, for each call and round."""
        orders = [sorted(range(len(calls)), key=lambda _: self._order.random()) for _ in range(rounds)]
        times = []
        for i in (i for order in orders for i in order):
            calls[i]()
            times.append(self._rig.seconds(calls[i], burst))
        found: list[list[float]] = [[] for _ in calls]
        for i, seconds in zip((i for order in orders for i in order), self._agree(times), strict=True):
            found[i].append(seconds)
        return found

    def _agree(self, seconds: Sequence[float]) -> list[float]:
        """Collective: the means of all ranks' times."""
        rows = self._rows(seconds)
        return [max(float(each), 1e-9) for each in functools.reduce(np.add, rows) / len(rows)]

    def _rows(self, numbers: Sequence[float]) -> list[np.ndarray]:
        """Collective: all ranks' numbers. Sets the time since the begin, on which the ranks agree so."""
        own = np.zeros(self._numbers, np.float32)
        own[: len(numbers)], own[-1] = numbers, time.monotonic() - self._begin
        self._write(own.tobytes(), self._own)
        self._gather()
        start = self._all.address - self._rig.address
        rows = list(np.frombuffer(self._rig.read(start, self._all.nbytes), np.float32).reshape(-1, self._numbers))
        self._elapsed = float(functools.reduce(np.add, rows)[-1]) / len(rows)
        return [row[: len(numbers)] for row in rows]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _whole(self, count: int) -> int:
        """So many elements, or a few more, so that all ranks have equal parts."""
        return -(-count // self._session.size) * self._session.size

    def _prepared(self, count: int) -> list[Callable[[], None]]:
        """The calls of about ``count`` elements. All on the same arrays, which are those of the calls before, too."""
        specs = {label: replace(call, count=self._whole(count)) for label, call in self._calls.items()}
        arrays, end = self._arrays(specs.values())
        if end > self._filled:
            values = np.random.default_rng(self._session.rank).standard_normal(_VALUES, np.float32)
            self._rig.fill(from_float32(values, self._dtype).tobytes(), self._filled, end)
            self._filled = end
        found = []
        for label, spec in specs.items():
            names = spec.buffers(self._session.rank, self._session.size).declared
            bound = {name: arrays[name, buffer.size] for name, buffer in names.items()}
            found.append(self._call(spec, bound, f"{_KEY}{label}" if spec.codec.state_names else None))
        return found

    def _arrays(self, specs: Iterable[CollectiveSpec]) -> tuple[dict[tuple[str, int], Values], int]:
        """The arrays of these calls, by buffer and size, and where they end in the rig's memory."""
        found: dict[tuple[str, int], Values] = {}
        end = self._free
        for spec in specs:
            for name in spec.buffers(self._session.rank, self._session.size).declared:
                values = self._array(name, spec.dtype, spec, end)
                if (name, values.count) not in found:
                    found[name, values.count] = values
                    end += _aligned(values.nbytes)
        return found, end

    def _array(self, name: str, dtype: DType, spec: CollectiveSpec, start: int) -> Values:
        """The array of one of the call's buffers, ``start`` bytes from the begin of the rig's memory."""
        count = spec.buffers(self._session.rank, self._session.size).declared[name].size
        address = self._rig.address + start
        return Values(address, count, dtype, ((count,), (1,)), name, owner=self._rig, writable=True)

    def _write(self, content: bytes, values: Values) -> None:
        start = values.address - self._rig.address
        self._rig.fill(content, start, start + len(content))

    def _call(self, spec: CollectiveSpec, values: Mapping[str, Values], key: str | None) -> Callable[[], None]:
        """Collective on CUDA: what makes a call. Raises _CannotCall on all ranks if one has no memory for it."""
        session = self._session

        def programs(spec: CollectiveSpec, *, in_place: bool) -> Compiled:
            place = session.rank, session.size
            made = Compiled(session.engine, place, spec, in_place=in_place, is_counted=False)
            if key is not None and made.state:
                session.state.entries.pop(key, None)  # of another size
                session.state.take(key, made.owner, made.state, None, made.sums)
            return made

        with _agreed(session):
            _, compiled, bound = session.bind(spec, values, key, programs, again=True)
        return partial(session.start, compiled, bound, Request(key=key), values, self._rig.streams)

    def _largest(self) -> int:
        """The most elements of a call for which this rank has memory."""
        count = self._rig.nbytes // self._dtype.itemsize
        while count > _LEAST and not self._fits(count):
            count //= 2
        return count

    def _fits(self, count: int) -> bool:
        """Whether the memory is large enough for calls of so many elements."""
        session, rig = self._session, self._rig
        specs = [replace(each, count=self._whole(count)) for each in self._calls.values()]
        _, end = self._arrays(specs)
        if end > rig.nbytes or rig.work_nbytes is None:
            return end <= rig.nbytes
        place = session.rank, session.size
        for spec in specs:
            schedule = spec.schedule(*place, in_place=False, chunking=session.engine.chunking)
            buffers = [*schedule.buffers.values()]
            works, states = (
                sum(buffer.nbytes for buffer in buffers if buffer.role is role) for role in (Role.WORK, Role.STATE)
            )
            if works > rig.work_nbytes or end + states > rig.nbytes:
                return False
        return True

    # -- what is next --------------------------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The next number of elements; None: there is nothing more, or no time for it."""
        largest = max(self._visits)
        larger = min(largest * _STEP, self._most)
        while larger >= 2 * largest:
            if self._has_time(larger, 2, _FIRST):
                return larger
            larger //= 4
        again = (count for count in sorted(self._visits, key=self._visits.__getitem__) if self._has_time(count))
        return next((count for count in again if self._visits[count] <= _AGAIN), None)

    def _has_time(self, count: int, times: int = 1, part: float = 1.0) -> bool:
        """Whether the calls can be made so many times within a part of the time."""
        prediction = Prediction({label: self._curve(label) for label in self._calls})
        needed = math.fsum(prediction.seconds(label, count) for label in self._calls)
        return self._elapsed + times * needed < part * self._limit

    def _curve(self, label: Label) -> Curve:
        """What was measured, smoothed."""
        if label not in self._density:
            self._density[label] = _density(self._calls[label], self._nodes)
        points = sorted((count, sorted(each)[len(each) // _LOW]) for count, each in self._samples[label].items())
        return Curve(_rising(points), self._density[label])


def _density(spec: CollectiveSpec, nodes: Sequence[int]) -> float:
    count = -(-_LARGE // len(nodes)) * len(nodes)
    return crossing_nbytes(replace(spec, count=count), nodes) / count


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points with times that do not fall, by the smallest squared changes ("pool adjacent violators")."""
    pools: list[tuple[float, int]] = []  # the mean of neighbours, and their number
    for _, seconds in points:
        mean, members = seconds, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, members = (mean * members + before * more) / (members + more), members + more
        pools.append((mean, members))
    times = [mean for mean, members in pools for _ in range(members)]
    return tuple((count, seconds) for (count, _), seconds in zip(points, times, strict=True))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
