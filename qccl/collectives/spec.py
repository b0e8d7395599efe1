"""The base of all collectives' specs: the shared parameters, the text that the ranks compare, and checks of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from qccl import codecs, dtypes
from qccl.arguments import CodecLike, chunk_of, count_of
from qccl.arrays import Values, same_or_disjoint
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.collectives.operands import CallerBuffers, Group
from qccl.dtypes import DType, DTypeLike
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Role, Schedule

__all__ = ["Binding", "CollectiveSpec", "check_root", "common", "common_order", "spec_of"]

_Spec = TypeVar("_Spec", bound="CollectiveSpec")
_PLAIN = frozenset({str, int, type(None)})
#: specs of earlier calls, by all arguments and their types
_known: dict[tuple[Any, ...], CollectiveSpec] = {}
_MOST_KNOWN = 10_000


class Binding(NamedTuple):
    """What a schedule needs to know of a call's arrays.

    Attributes:
        in_place: the output is where the input is.
        addresses: of the caller's buffers, by their names in the schedule.
    """

    in_place: bool
    addresses: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(ABC):
    """The checked arguments of a call: the key of its programs, and the text that the ranks compare.

    A subclass adds its own parameters and a class method ``from_arguments(count, dtype, codec, chunk, order, *, ...)``
    that checks all of them. The caller's arrays have the names of the schedule's buffers: "input", "output".

    Attributes:
        count: elements of the whole vector.
        order: the order of the elements in memory (Values.order).
    """

    #: the collective's name, as in Communicator.plan
    name: ClassVar[str]
    #: whether codecs with error feedback or momentum are allowed
    keeps_state: ClassVar[bool] = False

    count: int
    dtype: DType
    codec: Codec
    chunk: int | None
    order: str = "C"

    def __post_init__(self) -> None:
        codec, op = self.codec, getattr(self, "op", "sum")
        if any(each.plain.sparse for each in codec.rounds) and op in ("min", "max"):
            raise ArgumentError(
                f"op {op!r} is not possible with {codec.spec()}, which sends only some of the elements; use sum or avg"
            )
        if codec.state_names and not (self.keeps_state and op in ("sum", "avg")):
            call = f"{self.name} with op {op}" if self.keeps_state else self.name
            raise ArgumentError(
                f"{codec.spec()} keeps its {' and '.join(codec.state_names)} from call to call, which {call} does not; "
                f"use {codec.plain.spec()}, or a collective with state: allreduce, hierarchical_allreduce and "
                f"reduce_scatter, with op sum or avg, or peer_exchange"
            )

    def text(self) -> str:
        """The parameters on which all ranks must agree: the ranks compare this text, and messages show it."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self._shown().items())})"

    def _shown(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["codec"] = codecs.identity(self.codec)
        if self.order == "C":
            del values["order"]
        return values

    def state_owner(self, algorithm: str) -> str:
        """The text that state under a key belongs to: without the chunk size, and with the algorithm "auto" chose."""
        changed = {"chunk": None, "algorithm": algorithm} if hasattr(self, "algorithm") else {"chunk": None}
        return replace(self, **changed).text()

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """For each rank, the text on which this rank and that one must agree beside text(); () for nothing."""
        return ()

    def native_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the collectives in Schedule.native. All ranks make all groups, also those that are in none."""
        return ()

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """This rank's buffers; in place without those that are another's memory.

        Raises ArgumentError if ``size`` ranks cannot make the call.
        """
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place)

    def arrays_of(self, role: Role, arrays: Mapping[str, Values], rank: int, size: int) -> list[Values]:
        """The arrays of a call that it reads (Role.INPUT), or those that it writes (Role.OUTPUT)."""
        return [arrays[name] for name, buffer in _declared(self, rank, size).items() if buffer.role is role]

    def check_counts(self, arrays: Mapping[str, Values], rank: int, size: int) -> None:
        """Raise ArgumentError if an array does not have the number of elements that the call needs."""
        for name, buffer in _declared(self, rank, size).items():
            if arrays[name].count != (count := buffer.size):
                other = arrays.get({"input": "output", "output": "input"}.get(name, ""), arrays[name])
                beside = "" if other is arrays[name] else f"; {other.what} has {other.count}"
                raise ArgumentError(
                    f"{arrays[name].what} has {arrays[name].count} elements, and {self.name} of {self.count} elements "
                    f"on {size} ranks needs {count} on rank {rank}{beside}"
                )

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """The part of ``source`` that receives the result if the caller gives no output array."""
        return source

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """The order of the arrays' elements in memory. Raises ArgumentError if the arrays differ in it."""
        return common_order(arrays)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """Check how the arrays lie in memory.

        Raises InvalidBufferError if arrays overlap in a way that is not allowed.
        """
        if len(arrays) == 1:  # a rank other than the root
            ((name, values),) = arrays.items()
            return Binding(name == "output", {name: values.address})
        source, target = arrays["input"], arrays["output"]
        if source is target or same_or_disjoint(source, target):
            return Binding(True, {"output": target.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def schedule(self, rank: int, size: int, *, in_place: bool, chunking: ChunkPolicy = NETWORK) -> Schedule:
        """The schedule of one rank; ``chunking`` is used if the caller gave no chunk size."""
        own = chunking if self.chunk is None else ChunkPolicy.of_elements(self.chunk)
        return self._schedule(Group.of_all(rank, size), self.buffers(rank, size, in_place=in_place), own)

    @abstractmethod
    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        """The schedule of the group's rank, on its buffers."""


@lru_cache(512)
def _declared(spec: CollectiveSpec, rank: int, size: int) -> Mapping[str, Buffer]:
    """The buffers of a call that is not in place."""
    return spec.buffers(rank, size).declared


def spec_of(make: Callable[..., _Spec], values: Values, how: Mapping[str, Any], order: str = "C", **own: Any) -> _Spec:
    """The spec of a call on these values, from a class's from_arguments() and the call's options.

    Equal arguments give the same object, and are checked once.
    """
    codec, chunk = how["codec"], how["chunk"]
    shared = values.count, values.dtype.name, codec, chunk, order
    kinds = (type(codec), type(chunk), *map(type, own.values()))  # True equals 1, but does not mean the same
    key = make, shared, tuple(own.values()), kinds
    try:
        found = _known.get(key) if tuple not in kinds or _have_integers(own.values()) else None
    except TypeError:  # a dict, for example
        return make(*shared, **own)
    if found is None:
        found = make(*shared, **own)
        if all(map(_is_plain, (codec, chunk, *own.values()))) and len(_known) < _MOST_KNOWN:
            _known[key] = found
    return cast(_Spec, found)


def _is_plain(value: Any) -> bool:
    """Whether a value never changes, and equals only values of its type that mean the same."""
    return type(value) in _PLAIN or isinstance(value, Codec) or (type(value) is tuple and _have_integers([value]))


def _have_integers(values: Iterable[Any]) -> bool:
    """Whether the tuples among the values have Python's integers alone, no True."""
    return all(type(each) is int for value in values if type(value) is tuple for each in value)


def common(count: int, dtype: DTypeLike, codec: CodecLike, chunk: int | None, order: str = "C") -> dict[str, Any]:
    """Check the parameters that every collective has; returns the fields of CollectiveSpec."""
    return {
        "count": count_of(count),
        "dtype": dtypes.get(dtype),
        "codec": codecs.get(codec),
        "chunk": chunk_of(chunk),
        "order": order,
    }


def check_root(root: int, size: int) -> None:
    """Raise ArgumentError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise ArgumentError(f"root={root} is not a rank of this communicator; ranks are 0 to {size - 1}")


def common_order(arrays: Mapping[str, Values]) -> str:
    """The order of all arrays. Raises ArgumentError if they differ in it."""
    first, *others = arrays.values()
    order = first.order
    for other in others:
        if other is not first and other.order != order:
            raise ArgumentError(
                f"{first.what} and {other.what} lie differently in memory (shape, strides in elements): "
                f"{first.shape_and_strides} and {other.shape_and_strides}; pass arrays of one shape and one order of "
                f"axes"
            )
    return order
