"""The measured times of a group's calls, and the choice of the fastest way to make a call.

A profile has curves: the seconds of a call over its number of elements, for a collective, an element type, a codec and
a way to make the call, such as "two_round". Calls with a codec and plain calls were measured in turns, so that
disturbances affect both. Between two measured numbers of elements, and beyond the last one, a call's time is assumed
to be linear (Prediction). There are no constants of machines or networks: measured calls are the only source.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from qccl import codecs
from qccl.base import dtypes
from qccl.base.conversion import converted
from qccl.base.errors import ArgumentError
from qccl.base.files import read_file, writing
from qccl.codecs import NoCodec
from qccl.collectives import CollectiveSpec, spec_of_plan, ways

__all__ = ["MARGIN", "CallChoice", "CallKind", "Curve", "GroupProfile", "Label", "Prediction", "fastest", "kind_of"]

#: a codec must save this part of the time without a codec
MARGIN = 0.03
#: a byte's time is the slope between the last point and a point with at most this part of its elements: the times of
#: nearer points differ by little more than noise
_FAR = 0.25
_PLAIN = NoCodec().spec()
#: predicted times beyond the points that differ by less than this part count as equal: then fewer bytes decide
_UNSURE = 0.1
#: the version of the file, and its most bytes
_VERSION, _MOST_NBYTES = 1, 1 << 20
_KEYS = ("collective", "dtype", "codec", "with", "way", "density", "points")


class CallKind(NamedTuple):
    """The calls that a measurement compares, as text: a collective, an element type, and the codec beside "none"."""

    collective: str
    dtype: str
    codec: str


#: a codec, and a way to make a call with it
Label = tuple[str, str]


def kind_of(spec: CollectiveSpec) -> CallKind:
    """The kind of a call. All-reduces of several arrays count as all-reduces of one array."""
    return CallKind(spec.name.removesuffix("_coalesced"), spec.dtype.name, spec.codec.spec())


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured times of calls.

    Attributes:
        points: numbers of elements, ascending, each with the seconds of a call.
        density: bytes per element that the busiest node sends or receives, whichever is more, in a large call.
    """

    points: tuple[tuple[int, float], ...]
    density: float

    def seconds(self, count: int, byte: float) -> float:
        """The time of a call of ``count`` elements; ``byte`` is the time of a byte beyond the last point."""
        first, last = self.points[0], self.points[-1]
        if count <= first[0]:
            return first[1]
        if count <= last[0]:
            at = bisect_left(self.points, (count,))
            (low, before), (high, after) = self.points[at - 1], self.points[at]
            return before + (after - before) * (count - low) / (high - low)
        return last[1] + byte * self.density * (count - last[0])

    @property
    def byte(self) -> float:
        """The seconds of a further byte in a large call, from the last point and one far from it."""
        last, seconds = self.points[-1]
        far = [point for point in self.points if point[0] <= last * _FAR]
        count, before = far[-1] if far else self.points[0]
        return max(0.0, seconds - before) / (last - count) / self.density if count < last else math.inf


class Prediction:
    """The times of calls of any size, by the curves of one kind.

    Curves continue linearly after their last point. All ways of a codec then have the same time of a byte, the least
    that was measured, because disturbances only lengthen calls. With a codec a byte takes no less than without one.
    """

    def __init__(self, curves: Mapping[Label, Curve]) -> None:
        self._curves = curves
        self._byte: dict[str, float] = {}
        for (codec, _), curve in curves.items():
            self._byte[codec] = min(curve.byte, self._byte.get(codec, math.inf))
        plain = self._byte.get(_PLAIN, 0.0)
        for codec, byte in self._byte.items():
            self._byte[codec] = max(byte, plain if plain < math.inf else 0.0)

    def seconds(self, label: Label, count: int) -> float:
        """The time of a call of ``count`` elements among calls that follow each other.

        A single short call after a pause may take less: a link whose rate is limited may let a burst pass.
        """
        curve, byte = self._curves[label], self._byte[label[0]]
        return max(curve.seconds(count, byte), byte * curve.density * count if byte < math.inf else 0.0)


@dataclass(frozen=True)
class GroupProfile:
    """The measured times of a group's calls, by which ``codec="auto"`` decides.

    Attributes:
        nodes: for each rank, the number of its machine.
        transport: the transport that carried the bytes.
        hardware: on CUDA, the GPUs and the version of NCCL; empty on the host.
        times: the curves by kind of call, and then by codec (the kind's, or "none") and by the way to make the call.
    """

    nodes: tuple[int, ...]
    transport: str
    times: Mapping[CallKind, Mapping[Label, Curve]] = field(default_factory=dict)
    hardware: str = ""

    def with_times(self, kind: CallKind, curves: Mapping[Label, Curve]) -> GroupProfile:
        """Add the curves of a further kind. Returns a new profile."""
        return replace(self, times={**self.times, kind: curves})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file for ``qccl.init(profile=)`` and QCCL_PROFILE. Raises OSError."""
        with writing(path) as file:
            file.write(json.dumps(self.as_dict(), indent=1).encode() + b"\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> GroupProfile:
        """Load a file that save() wrote. Raises ArgumentError for another file, OSError."""
        try:
            return GroupProfile.from_dict(json.loads(read_file(path, _MOST_NBYTES)))
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"{os.fspath(path)!r} is not a group's profile ({error}); give a file that comm.profile().save() wrote"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Make a dict for a JSON file."""
        curves = [
            dict(zip(_KEYS, (*kind, *label, curve.density, [list(point) for point in curve.points]), strict=True))
            for kind, curves in sorted(self.times.items())
            for label, curve in sorted(curves.items())
        ]
        head = {"qccl profile": _VERSION, "nodes": list(self.nodes), "transport": self.transport}
        return head | ({"hardware": self.hardware} if self.hardware else {}) | {"curves": curves}

    @staticmethod
    def from_dict(given: Any) -> GroupProfile:
        """Make the profile from the result of as_dict(). Raises ValueError for anything else."""
        import msgspec  # only for loading a profile

        found, times = converted(given, _allowed()), dict[CallKind, dict[Label, Curve]]()
        if not (found.transport + found.hardware).isprintable():
            raise ValueError(f"its transport is {found.transport!r} and its hardware {found.hardware!r}")
        for each in found.curves:
            collective, dtype, codec, used, way, density, points = msgspec.structs.astuple(each)
            counts = [count for count, _ in points]
            if counts != sorted(set(counts)):
                raise ValueError(f"a curve needs points with ascending numbers of elements, not {counts}")
            kind = CallKind(collective, dtypes.get(dtype).name, codecs.get(codec).spec())
            times.setdefault(kind, {})[codecs.get(used).spec(), way] = Curve(points, density)
        return GroupProfile(found.nodes, found.transport, times, found.hardware)

    def digest(self) -> str:
        """A text that is equal for equal profiles."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_group(self, group: GroupProfile) -> None:
        """Raise ArgumentError unless this profile is complete, and its group is like the group of another profile."""
        if (self.nodes, self.transport, self.hardware) != (group.nodes, group.transport, group.hardware):
            raise ArgumentError(
                f"the profile is of a group with {self._group()}, and this group has {group._group()}; save a profile "
                f"of this group by comm.profile().save(), or leave it out"
            )
        for kind, curves in self.times.items():
            specs = [spec_of_plan(kind.collective, 1, kind.dtype, codec, None, {}) for codec in (_PLAIN, kind.codec)]
            missing = {(spec.codec.spec(), way) for spec in specs for way in ways(spec, self.nodes)} - curves.keys()
            if missing:
                raise ArgumentError(
                    f"the profile has times of {kind.collective} of {kind.dtype}, but none of "
                    f"{', '.join(f'{codec} by {way}' for codec, way in sorted(missing))}; save another by "
                    f"comm.profile().save(), or leave it out"
                )

    def _group(self) -> str:
        hardware = f" ({self.hardware})" if self.hardware else ""
        return f"{len(self.nodes)} ranks on the nodes {list(self.nodes)} over {self.transport}{hardware}"


def _allowed() -> Any:
    """The type of as_dict(), for msgspec."""
    from msgspec import Meta, defstruct

    natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    types: list[Any] = [str, str, str, str, str, positive]
    types += [Annotated[tuple[tuple[natural, positive], ...], Meta(min_length=1)]]
    curve = defstruct("Curve", list(zip(_KEYS, types, strict=True)))
    fields: list[Any] = [("version", Literal[_VERSION]), ("nodes", tuple[natural, ...]), ("transport", str)]
    fields += [("curves", tuple[curve, ...]), ("hardware", str, "")]  # type: ignore[valid-type]
    return defstruct("File", fields, rename={"version": "qccl profile"})


@dataclass(frozen=True)
class CallChoice:
    """The chosen way to make a call.

    Attributes:
        spec: the spec of the call, with its codec and its algorithm.
        predicted: codec, way and seconds of all compared calls, the fastest first; empty without a profile.
        refusal: why calls with ``codec="auto"`` could not be measured.
    """

    spec: CollectiveSpec
    predicted: tuple[tuple[str, str, float], ...] = ()
    refusal: str = ""

    def reason(self) -> str:
        """Say the predicted times, or why there are none; an empty text without a profile."""
        if not self.predicted:
            return f"without a codec, because calls were not measured: {self.refusal}" if self.refusal else ""
        times = (f"{codec} by {way} {seconds * 1e3:.3g} ms" for codec, way, seconds in self.predicted)
        needed = f"; a codec must save {MARGIN:.0%}" if len({codec for codec, _, _ in self.predicted}) > 1 else ""
        return f"by the times of the group's profile: {', '.join(times)}{needed}"


def fastest(profile: GroupProfile, specs: Sequence[CollectiveSpec], node_ids: Sequence[int]) -> CallChoice | None:
    """Choose the fastest way to make one of these calls; None if the profile has no times for them.

    ``specs`` are a call with one codec, or a call without and the same with a codec. The codec is chosen if it saves at
    least MARGIN of the time without it. For a codec without measured times, the times of plain calls with equally many
    bytes are assumed. With equal arguments all ranks get the same choice.
    """
    kind = _kind_with_times(profile, specs[-1])
    if kind is None:
        return None
    found = [_times(profile.times[kind], spec, ways(spec, node_ids)) for spec in specs]
    if not all(found):
        return None
    plain, encoded = found[0][0], found[-1][0]
    chosen = encoded if encoded.seconds <= plain.seconds * (1 - MARGIN) else plain
    predicted = sorted((each for times in found for each in times), key=lambda each: each.seconds)
    return CallChoice(chosen.spec, tuple((each.codec, each.way, each.seconds) for each in predicted))


class _Way(NamedTuple):
    """A way to make a call, and its predicted time."""

    seconds: float
    density: float
    codec: str
    way: str
    spec: CollectiveSpec


def _times(curves: Mapping[Label, Curve], spec: CollectiveSpec, found: Mapping[str, CollectiveSpec]) -> list[_Way]:
    """The ways to make a call that have curves, the best way first."""
    codec, count, prediction = spec.codec.spec(), spec.count, Prediction(curves)
    if not any((codec, way) in curves for way in found):
        codec, count = _PLAIN, -(-spec.codec.rounds[0].encoded_nbytes(count, spec.dtype) // spec.dtype.itemsize)
    labels = {way: (codec, way) for way in found if (codec, way) in curves}
    times = [
        _Way(prediction.seconds(label, count), curves[label].density, spec.codec.spec(), way, found[way])
        for way, label in labels.items()
    ]
    times.sort(key=lambda each: each.seconds)
    if times and count > max(curves[label].points[-1][0] for label in labels.values()):
        limit = times[0].seconds * (1 + _UNSURE)
        times.sort(key=lambda each: (each.seconds > limit, each.density if each.seconds <= limit else 0, each.seconds))
    return times


def _kind_with_times(profile: GroupProfile, spec: CollectiveSpec) -> CallKind | None:
    """The kind of a call, or another kind of its collective and element type, for the times of plain calls."""
    kind = kind_of(spec)
    if kind in profile.times:
        return kind
    return next((each for each in sorted(profile.times) if each[:2] == kind[:2]), None)
