"""Measures how long the calls of a group take, in less than a second, for the group's profile.

All ranks make the same calls, on memory of their own. The next call depends only on times on which the ranks agree:
each rank gets the times of all ranks, exactly, and takes their mean. So all ranks measure the same calls, and get the
same profile. Sums of times are exact, by math.fsum: the result of sum() depends on the version of Python, which may
differ between ranks. The mean is right because ranks begin a call at different times: with two ranks, one waits longer
by as much as the other waits less.

All ways to make a call are timed at the same sizes, the smaller ones first, as far as time and memory permit; then all
these sizes again. A measurement also ends within half of the group's timeout. If that is too short for calls of two
sizes, or if a rank has no memory for them, no rank gets times.
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

from qccl.base.arrays import Values
from qccl.base.dtypes import FLOAT32, DType
from qccl.base.errors import QcclError
from qccl.codecs import Codec
from qccl.codecs.floats import from_float32
from qccl.collectives import COLLECTIVES, CollectiveSpec, spec_of_plan, ways
from qccl.collectives.schedule import Role
from qccl.collectives.topology import crossing_nbytes
from qccl.communicator.profile import Curve, Label, Prediction
from qccl.communicator.programs import ProgramCache
from qccl.communicator.session import Session
from qccl.engine.base import Request, Rig

__all__ = ["candidates", "measure"]

#: seconds for all measured calls; the last call may end later
_LIMIT = 0.7
#: the largest part of the group's timeout that a measurement may take
_OF_TIMEOUT = 0.5
#: elements of the measured calls; every second size is enough if there is time for it
_SIZES = tuple(1 << bits for bits in range(8, 23, 2))
#: if one call of each kind takes more seconds than _LONG together, the network delays them: each is then timed once,
#: and the second size is _LATER sizes larger, because a delay says nothing about the rate
_LONG, _LATER = 0.06, 4
#: repetitions of the calls of one size: seconds for all of them, the most, and the fewest
_SLICE, _ROUNDS, _FEWEST = 0.04, 25, 3
#: if one call of each kind takes less than _SHORT seconds together, each is timed in bursts of _BURST calls after a
#: warm-up call: a program's calls follow each other, and a link whose rate is limited may let a single call pass
_BURST, _SHORT = 4, 0.01
#: a call's time is the lowest _LOW-th part of its times, the lower quartile: disturbances only add time
_LOW = 4
#: exchanges between the ranks before the first timed call
_WARM = 2
#: visits of each size, and the part of _LIMIT for the first visits, whose short calls suffer from cold caches
_VISITS, _FIRST = 4, 0.7
#: begin of the keys under which codecs keep state during a measurement
_KEY = "\0measured "
#: elements of the call that gives a curve's density
_LARGE = 1 << 16
#: number of random values, which the inputs repeat
_VALUES = 1 << 15
#: bytes; the arrays' addresses are multiples of it
_ALIGNMENT = 256


def candidates(
    collective: str, dtype: DType, codecs: Iterable[Codec], nodes: Sequence[int]
) -> dict[Label, CollectiveSpec]:
    """Make a call for each codec and each way in which these nodes can make it, of any number of elements.

    Calls that differ only in the codec follow each other, so that the ranks begin both at similarly different times.
    """
    own: dict[str, Any] = {"op": "avg"} if "op" in [each.name for each in fields(COLLECTIVES[collective])] else {}
    found: dict[Label, CollectiveSpec] = {}
    for codec in codecs:
        spec = spec_of_plan(collective, len(nodes), dtype.name, codec, None, own)
        found |= {(codec.spec(), way): each for way, each in ways(spec, nodes).items()}
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def measure(session: Session, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> dict[Label, Curve] | str:
    """Collective: measure the curves of ``calls``; or return why that was impossible: a short timeout, or no memory.

    Session.run_measurement() calls it. State stays unchanged. Raises the errors of calls, which end the group.
    """
    try:
        with _agreed(session):
            rig = session.agreed("memory for measured calls", (), session.engine.rig, again=True)
        found = _Measurement(session, rig, nodes, calls).run()
        session.engine.wait_until_idle(session.engine.timeout)  # nothing uses the memory any more
        return found
    except _CannotCall as error:
        return str(error)
    finally:
        for key in [each for each in session.state.entries if each.startswith(_KEY)]:
            del session.state.entries[key]


class _CannotCall(Exception):
    """A rank cannot make a call that would be measured, and all ranks know it."""


@contextlib.contextmanager
def _agreed(session: Session) -> Iterator[None]:
    """Raise _CannotCall for a call that all ranks refuse, unless the group has failed.

    An error elsewhere concerns one rank alone. It must end the group: the other ranks would otherwise continue with
    measured calls, and this rank with the program's calls.
    """
    try:
        yield
    except QcclError as error:
        if session.end.is_over:
            raise
        raise _CannotCall(str(error)) from error


class _Measurement:
    """A measurement under way, with its times so far.

    The rig's memory begins with the numbers on which the ranks agree: this rank's numbers, and those of all ranks. The
    inputs of all calls share one half of the rest, and their outputs the other half.
    """

    def __init__(self, session: Session, rig: Rig, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> None:
        self._session, self._rig, self._calls = session, rig, calls
        self._programs = ProgramCache(session.engine, session.calls, is_counted=False)
        self._dtype = next(iter(calls.values())).dtype
        self._samples: dict[Label, dict[int, list[float]]] = {label: {} for label in calls}
        self._density = {label: _density(call, nodes) for label, call in calls.items()}
        self._order = random.Random(0)  # random() is the same on all ranks, whatever their versions of Python
        self._numbers = _ROUNDS * len(calls) + 1
        spec = spec_of_plan("all_gather", session.size * self._numbers, "float32", "none", None, {})
        self._all = _aligned(self._numbers * FLOAT32.itemsize)
        self._gather = self._call(spec, {"input": 0, "output": self._all}, None)
        free = self._all + _aligned(spec.count * FLOAT32.itemsize)
        self._half = (rig.nbytes - free) // 2 // _ALIGNMENT * _ALIGNMENT
        self._starts = {"input": free, "output": free + self._half}
        values = np.random.default_rng(session.rank).standard_normal(_VALUES, np.float32)
        self._values = from_float32(values, self._dtype).tobytes()
        self._begin, self._elapsed, self._limit = 0.0, 0.0, 0.0

    def run(self) -> dict[Label, Curve] | str:
        """Measure until all sizes were timed often enough, or the time is over."""
        size = self._session.size
        all_sizes = [-(-count // size) * size for count in _SIZES]  # so that all ranks have equal parts
        sizes = [count for count in sorted({*all_sizes}) if count == all_sizes[0] or self._fits(count)]
        first = self._prepared(sizes[0])  # on CUDA this compiles kernels, which must not be timed
        self._begin = time.monotonic()
        permitted = _OF_TIMEOUT * self._session.engine.timeout
        for warm in range(_WARM + 1):  # makes the connections; the last one only if a rank held up the others
            before = self._elapsed
            least = functools.reduce(np.minimum, self._rows([permitted, float(len(sizes))]))
            refusal = self._refusal(3 * len(first) * (self._elapsed - before), float(least[0]))
            if warm + 1 >= _WARM and not refusal:
                break
        if refusal:
            return refusal
        permitted, sizes = float(least[0]), sizes[: int(least[1])]
        self._limit = min(_LIMIT, permitted)
        together = self._time_calls(sizes[0], first)
        if refusal := self._refusal(2 * together, permitted):
            return refusal
        if len(sizes) == 1:
            return f"there is memory for calls of {sizes[0]} elements only"
        at = min(_LATER if together > _LONG else 2, len(sizes) - 1)
        self._prepared(sizes[at])[0]()  # TCP's window grows
        self._time_calls(sizes[at])
        measured = [sizes[0], sizes[at]]
        with contextlib.suppress(_CannotCall):  # no memory for larger calls: use the times so far
            while larger := [count for count in sizes[at + 1 : at + 3] if self._has_time(count, 2, _FIRST)]:
                self._time_calls(larger[-1])
                measured.append(larger[-1])
                at = sizes.index(larger[-1])
            for count in measured * (_VISITS - 1):
                if self._has_time(count):
                    self._time_calls(count)
        return {label: self._curve(label) for label in self._calls}

    def _refusal(self, needed: float, permitted: float) -> str:
        """Say why calls that need ``needed`` seconds cannot be measured; an empty text if they can."""
        if self._elapsed + needed <= permitted:
            return ""
        return (
            f"calls of two sizes need about {self._elapsed + needed:.2g} s, and the timeout permits {permitted:.2g} s; "
            f"set a longer comm.timeout before the first such call"
        )

    # -- times ---------------------------------------------------------------------------------------------------------

    def _time_calls(self, count: int, calls: Sequence[Callable[[], None]] = ()) -> float:
        """Time calls of ``count`` elements, short ones repeatedly in changing order. Returns the sum of single times.

        The very first calls have no warm-up call: behind a slow network there is no time for it.
        """
        is_first, calls = bool(calls), calls or self._prepared(count)
        found = self._timed(calls, 1, 1, warms=not is_first and self._has_time(count, 2))
        together = math.fsum(each for [each] in found)
        if together <= _LONG:
            burst = _BURST if together <= _SHORT else 1
            left = max(0.0, min(_SLICE * burst, self._limit - self._elapsed))
            found = self._timed(calls, max(_FEWEST, min(_ROUNDS, int(left / together / (1 + burst)))), burst)
        for samples, each in zip(self._samples.values(), found, strict=True):
            samples.setdefault(count, []).extend(each)
        return together

    def _timed(
        self, calls: Sequence[Callable[[], None]], rounds: int, burst: int, *, warms: bool = True
    ) -> list[list[float]]:
        """Collective: time ``burst`` calls in a row. Returns the mean over all ranks, for each call and round."""
        orders = [sorted(range(len(calls)), key=lambda _: self._order.random()) for _ in range(rounds)]
        order, times = [i for each in orders for i in each], []
        for i in order:
            if warms:
                calls[i]()
            times.append(self._rig.seconds(calls[i], burst))
        rows = self._rows(times)
        found: list[list[float]] = [[] for _ in calls]
        for i, seconds in zip(order, functools.reduce(np.add, rows) / len(rows), strict=True):
            found[i].append(max(float(seconds), 1e-9))
        return found

    def _rows(self, numbers: Sequence[float]) -> list[np.ndarray]:
        """Collective: exchange all ranks' numbers. Also makes the ranks agree on the time since the begin."""
        own = np.zeros(self._numbers, np.float32)
        own[: len(numbers)], own[-1] = numbers, time.monotonic() - self._begin
        self._rig.fill(own.tobytes(), 0, own.nbytes)
        self._gather()
        read = self._rig.read(self._all, self._session.size * own.nbytes)
        rows = list(np.frombuffer(read, np.float32).reshape(-1, self._numbers))
        self._elapsed = float(functools.reduce(np.add, rows)[-1]) / len(rows)
        return [row[: len(numbers)] for row in rows]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _prepared(self, count: int) -> list[Callable[[], None]]:
        """Prepare the calls of ``count`` elements, all on the same arrays as the earlier calls."""
        start = self._starts["input"]
        self._rig.fill(self._values, start, start + count * self._dtype.itemsize)
        return [
            self._call(spec, self._starts, f"{_KEY}{label}" if spec.codec.state_names else None)
            for label, spec in self._specs(count).items()
        ]

    def _specs(self, count: int) -> dict[Label, CollectiveSpec]:
        return {label: replace(call, count=count) for label, call in self._calls.items()}

    def _call(self, spec: CollectiveSpec, starts: Mapping[str, int], key: str | None) -> Callable[[], None]:
        """Prepare a function that makes a call; collective on CUDA. Raises _CannotCall on all ranks without memory."""
        session, rig = self._session, self._rig
        values = {}
        for name, buffer in spec.buffers(session.rank, session.size).declared.items():
            shape, address = ((buffer.size,), (1,)), rig.address + starts[name]
            values[name] = Values(address, buffer.size, spec.dtype, shape, name, owner=rig, writable=True)

        with _agreed(session):
            compiled, bound = session.bind(spec, values, key, self._programs, again=True)
            if key is not None:
                session.state.entries.pop(key, None)  # of another size
                take = partial(session.state.take, key, compiled.owner, compiled.state, None, compiled.sums)
                session.agreed("state of a measured call", (), take, again=True)
        return partial(session.start, compiled, bound, Request(key=key), values, rig.streams)

    def _fits(self, count: int) -> bool:
        """Whether this rank's memory is large enough for calls of ``count`` elements."""
        session, most = self._session, self._rig.work_nbytes
        if count * self._dtype.itemsize > self._half or most is None:
            return count * self._dtype.itemsize <= self._half
        for spec in self._specs(count).values():
            made = spec.schedule(session.rank, session.size, in_place=False, chunking=session.engine.chunking)
            for role, allowed in ((Role.WORK, most), (Role.STATE, self._half)):
                if sum(buffer.nbytes for buffer in made.buffers.values() if buffer.role is role) > allowed:
                    return False
        return True

    # -- curves --------------------------------------------------------------------------------------------------------

    def _has_time(self, count: int, times: int = 1, part: float = 1.0) -> bool:
        """Whether the calls can be made ``times`` times within a part of the time."""
        prediction = Prediction({label: self._curve(label) for label in self._calls})
        needed = math.fsum(prediction.seconds(label, count) for label in self._calls)
        return self._elapsed + times * needed < part * self._limit

    def _curve(self, label: Label) -> Curve:
        """The measured times, smoothed."""
        points = sorted((count, sorted(each)[len(each) // _LOW]) for count, each in self._samples[label].items())
        return Curve(_rising(points), self._density[label])


def _density(spec: CollectiveSpec, nodes: Sequence[int]) -> float:
    count = -(-_LARGE // len(nodes)) * len(nodes)
    return crossing_nbytes(replace(spec, count=count), nodes) / count


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Change times as little as possible (least squares) so that they never fall ("pool adjacent violators")."""
    pools: list[list[float]] = []  # neighbouring points, which get the mean of their times
    for _, seconds in points:
        pool = [seconds]
        while pools and math.fsum(pools[-1]) / len(pools[-1]) > math.fsum(pool) / len(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    times = [math.fsum(pool) / len(pool) for pool in pools for _ in pool]
    return tuple((count, seconds) for (count, _), seconds in zip(points, times, strict=True))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
