"""Measures how long the calls of a group take, in less than a second, for the group's profile.

All ranks make the same calls, on arrays of their own. What is called next depends only on times on which the ranks have
agreed: the mean of all ranks, by an exact all-reduce. So each rank measures the same, and gets the same profile. It is
the mean because ranks begin a call at different times: with two ranks, one waits longer by what the other waits less.

The sizes are chosen by what is unknown. At first a small call and larger ones are timed, as large as time permits. Then
sizes between two others follow, where two ways to make the call may be equally fast: only there an exact time matters.
A way that falls behind more and more is not timed with larger calls.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from qccl.codecs import Codec, NoCodec
from qccl.collectives import COLLECTIVES, AllReduceSpec, CollectiveSpec, spec_of_plan, ways
from qccl.collectives.explain import crossing_nbytes
from qccl.costs.group import Curve, Label, Prediction
from qccl.dtypes import BFLOAT16, DType
from qccl.plan import Plan
from qccl.session import Session

__all__ = ["candidates", "measure"]

#: seconds within which all calls should have ended. The last ones may take longer than expected
_LIMIT = 0.7
#: elements of the first calls, the factor between sizes at first, and the most elements
_LEAST, _STEP, _MOST = 256, 32, 1 << 21
#: if the calls of a size take more seconds together, the network delays them: one time of each must do, and the second
#: size is larger by this factor, because a delay says nothing about the rate
_LONG, _LONG_STEP = 0.06, 256
#: sizes are not made nearer to each other than by this factor
_NEAR = 2.0
#: seconds in which the calls of one size are repeated, how often at most, and the fewest repetitions that count
_SLICE, _ROUNDS, _FEWEST = 0.04, 25, 3
#: of a call's times that with so large a part of them below it counts: disturbances only lengthen calls
_LOW = 4
#: calls before the first time
_WARM = 2
#: a way that takes so many times as long as the fastest may become the fastest at a near size
_RIVAL = 1.3
#: a way that takes so many times as long, and loses more with each element by this factor, is not timed any further
_HOPELESS, _STEEPER = 2.0, 1.3
#: begins the keys of the state that codecs keep meanwhile
_KEY = "\0measured "
#: elements of a call that counts as large
_LARGE = 1 << 16
#: random values, which are repeated
_VALUES = 1 << 15


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


def measure(session: Session, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> dict[Label, Curve]:
    """Collective: the curves of ``calls``.

    Call numbers and state stay as they were. Raises what calls raise, after which the group is unusable.
    """
    before = session.numbers.calls
    measurement = _Measurement(session, nodes, calls)
    try:
        return measurement.run()
    finally:
        session.numbers.calls = before
        measurement.forget()


class _Measurement:
    """The times so far, and what is measured next."""

    def __init__(self, session: Session, nodes: Sequence[int], calls: Mapping[Label, CollectiveSpec]) -> None:
        self._session, self._nodes, self._calls = session, nodes, calls
        self._points: dict[Label, dict[int, float]] = {label: {} for label in calls}
        self._going = list(calls)  # the ways that are timed with larger calls, too
        self._values = np.random.default_rng(session.rank).standard_normal(_VALUES, np.float32)
        self._density: dict[Label, float] = {}
        self._keys: list[str] = []
        self._order = random.Random(0)  # random() is the same on all ranks, whatever their versions of Python
        self._again = 0  # sizes that were looked at once more
        self._begin, self._elapsed = time.monotonic(), 0.0
        most = _ROUNDS * len(calls) + 1
        spec = AllReduceSpec.from_arguments(most, "float32", NoCodec(), None, op="avg", algorithm="one_shot")
        self._found = np.zeros(most, np.float32)
        self._agreement = Plan(session, spec, None, nodes).bind(self._found)

    def run(self) -> dict[Label, Curve]:
        """Measure until nothing is unknown, or the time is over."""
        for _ in range(_WARM):  # makes the connections
            self._agree([])
        self._time_calls(_LEAST, self._going)
        is_delayed = sum(points[self._whole(_LEAST)] for points in self._points.values()) > _LONG
        second = _LEAST * (_LONG_STEP if is_delayed else _STEP)
        self._plan(self._going[0], self._whole(second), {}).run()  # TCP's window grows
        self._time_calls(second, self._going)
        while (found := self._next()) is not None:
            self._time_calls(*found)
        return {label: self._curve(label) for label in self._calls}

    def forget(self) -> None:
        """Remove the state of codecs."""
        for key in self._keys:
            self._session.state.entries.pop(key, None)

    # -- times ---------------------------------------------------------------------------------------------------------

    def _time_calls(self, count: int, labels: Sequence[Label]) -> None:
        """Time a call of about ``count`` elements for each label, repeatedly and in changing order if it is short."""
        count = self._whole(count)
        arrays: dict[tuple[str, int], np.ndarray] = {}
        plans = [self._plan(label, count, arrays) for label in labels]
        is_again = bool(self._points[labels[0]]) and self._has_time(count, labels, times=2)
        found = self._agree([_timed_again(plan) if is_again else _timed(plan) for plan in plans])
        if sum(found) <= _LONG:
            left = max(0.0, min(_SLICE, _LIMIT - self._elapsed))
            rounds = max(_FEWEST, min(_ROUNDS, int(left / sum(found) / 2)))
            orders = [sorted(range(len(plans)), key=lambda _: self._order.random()) for _ in range(rounds)]
            times = self._agree([_timed_again(plans[i]) for order in orders for i in order])
            of_plan: list[list[float]] = [[] for _ in plans]
            for i, seconds in zip(np.concatenate(orders), times, strict=True):
                of_plan[i].append(seconds)
            found = [sorted(each)[rounds // _LOW] for each in of_plan]
        for label, seconds in zip(labels, found, strict=True):
            self._points[label][count] = min(seconds, self._points[label].get(count, seconds))
        if len(self._points[labels[0]]) > 1:
            self._drop_hopeless()

    def _whole(self, count: int) -> int:
        """So many elements, or a few more, so that all ranks have equal parts."""
        return -(-count // self._session.size) * self._session.size

    def _plan(self, label: Label, count: int, arrays: dict[tuple[str, int], np.ndarray]) -> Plan:
        """A plan of the call, bound to ``arrays`` by buffer and size; it adds those that are not there yet."""
        session, spec = self._session, replace(self._calls[label], count=count)
        key = f"{_KEY}{len(self._keys)}" if spec.codec.state_names else None
        self._keys += [] if key is None else [key]
        bound = {}
        for name, buffer in spec.buffers(session.rank, session.size).declared.items():
            place = name, buffer.size
            if place not in arrays:
                arrays[place] = self._array(spec.dtype, buffer.size)
            bound[name] = arrays[place]
        return Plan(session, spec, key, self._nodes).bind_buffers(bound)

    def _array(self, dtype: DType, count: int) -> np.ndarray:
        values = np.resize(self._values, count)
        if dtype == BFLOAT16:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype.name)

    def _agree(self, seconds: Sequence[float]) -> list[float]:
        """Collective: the means of all ranks' times, and of their times since the begin."""
        self._found[:] = 0
        self._found[-1] = time.monotonic() - self._begin
        self._found[: len(seconds)] = seconds
        self._agreement.run()
        self._elapsed = float(self._found[-1])
        return [max(float(each), 1e-9) for each in self._found[: len(seconds)]]

    # -- what is next --------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, Sequence[Label]] | None:
        """The next number of elements, and the calls to time; None: there is nothing more, or no time for it."""
        sizes = sorted({count for points in self._points.values() for count in points})
        larger = min(sizes[-1] * _STEP, _MOST)
        while larger >= 2 * sizes[-1]:
            if self._has_time(larger, self._going, times=2):
                return larger, self._going
            larger //= 4
        gaps = sorted(pairwise(sizes), key=lambda gap: gap[0] / gap[1])
        for low, high in gaps:
            middle = round(math.sqrt(low * high))
            rivals = self._rivals(low, middle, high)
            if high > _NEAR**2 * low and len(rivals) > 1 and self._has_time(middle, measured := self._measured(rivals)):
                return middle, measured
        for count in sizes[self._again :]:  # once more: what disturbed the first calls may be over
            self._again += 1
            if len(rivals := self._rivals(count)) > 1 and self._has_time(count, measured := self._measured(rivals)):
                return count, measured
        return None

    def _has_time(self, count: int, labels: Sequence[Label], times: int = 1) -> bool:
        """Whether the calls can be made so many times."""
        prediction = self._prediction()
        return bool(labels) and self._elapsed + times * sum(prediction.seconds(e, count) for e in labels) < _LIMIT

    def _measured(self, labels: Iterable[Label]) -> list[Label]:
        return [label for label in self._calls if label in labels]

    def _rivals(self, *counts: int) -> set[Label]:
        """The ways that are nearly the fastest at one of these numbers of elements."""
        found, prediction = set(), self._prediction()
        for count in counts:
            times = {label: prediction.seconds(label, count) for label in self._calls}
            found |= {label for label, each in times.items() if each <= _RIVAL * min(times.values())}
        return found

    def _drop_hopeless(self) -> None:
        """Time no larger calls in ways that fall behind."""
        prediction, largest = self._prediction(), max(max(points) for points in self._points.values())
        times = {label: prediction.seconds(label, largest) for label in self._calls}
        best = min(times, key=times.__getitem__)
        self._going = [
            label
            for label in self._going
            if times[label] < _HOPELESS * times[best] or prediction.of_more(label) < _STEEPER * prediction.of_more(best)
        ]

    def _prediction(self) -> Prediction:
        return Prediction({label: self._curve(label) for label in self._calls})

    def _curve(self, label: Label) -> Curve:
        """What was measured, smoothed."""
        if label not in self._density:
            self._density[label] = _density(self._calls[label], self._nodes)
        return Curve(_rising(sorted(self._points[label].items())), self._density[label])


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


def _timed(plan: Plan) -> float:
    begin = time.perf_counter()
    plan.run()
    return time.perf_counter() - begin


def _timed_again(plan: Plan) -> float:
    """The time of the second of two calls: an equal one came before it, and it meets no fresh memory."""
    plan.run()
    return _timed(plan)
