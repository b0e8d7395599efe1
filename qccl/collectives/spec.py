"""What all collectives have in common: their parameters, what the ranks compare, and checks of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from qccl import codecs, dtypes
from qccl.arguments import CodecLike, chunk_of, count_of, integers
from qccl.arrays import Values, same_or_disjoint
from qccl.codecs.base import Codec
from qccl.dtypes import DType, DTypeLike
from qccl.errors import ArgumentError
from qccl.schedule import Schedule

__all__ = [
    "CollectiveSpec",
    "PartsSpec",
    "check_root",
    "common",
    "common_order",
    "equal_parts",
    "parts_of",
    "reduction",
    "row_major",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(ABC):
    """The parameters that every collective has.

    The caller's arrays are named as the schedule's buffers are: "input", "output".

    Attributes:
        count: elements of the whole vector.
        order: which element follows which in memory (Values.order).
    """

    #: of the collective, in Communicator.plan
    name: ClassVar[str]
    #: whether it has a schedule for codecs that keep something from call to call
    keeps_state: ClassVar[bool] = False

    count: int
    dtype: DType
    codec: Codec
    chunk: int | None
    order: str = "C"

    def __post_init__(self) -> None:
        codec, op = self.codec, getattr(self, "op", "sum")
        if codec.plain.sparse and op in ("min", "max"):
            raise ArgumentError(
                f"op {op!r} is not possible with {codec.spec()}, which says nothing of most elements; use sum or avg"
            )
        if self.codec.state_names:
            self._check_state()

    def _check_state(self) -> None:
        codec, op = self.codec, getattr(self, "op", "sum")
        if not self.keeps_state or op not in ("sum", "avg"):
            what = f"{self.name} with op {op}" if self.keeps_state else self.name
            raise ArgumentError(
                f"{codec.spec()} keeps its {' and '.join(codec.state_names)} from call to call, which {what} does not; "
                f"use {codec.plain.spec()}, or an all-reduce with op sum or avg"
            )

    def text(self) -> str:
        """What all ranks must agree on, for them to compare and for messages."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self._shown().items())})"

    def _shown(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["codec"] = codecs.identity(self.codec)
        if self.order == "C":
            del values["order"]
        return values

    def state_owner(self, algorithm: str) -> str:
        """The call, for telling whose state it is: chunks do not matter to it, but what "auto" stands for."""
        changed = {"chunk": None, "algorithm": algorithm} if hasattr(self, "algorithm") else {"chunk": None}
        return replace(self, **changed).text()

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """For each other rank, what the two must agree on beside the text, worded alike on both; () for nothing."""
        return ()

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """Elements that each array of this rank must have. Raises ArgumentError for what ``size`` ranks cannot do."""
        return {"input": self.count, "output": self.count}

    def check_counts(self, arrays: Mapping[str, Values], rank: int, size: int) -> None:
        """Raise ArgumentError if an array does not have the number of elements that the call needs."""
        for name, count in self.counts(rank, size).items():
            if arrays[name].count != count:
                other = arrays.get({"input": "output", "output": "input"}.get(name, ""), arrays[name])
                beside = "" if other is arrays[name] else f"; {other.what} has {other.count}"
                raise ArgumentError(
                    f"{arrays[name].what} has {arrays[name].count} elements, and {self.name} of {self.count} elements "
                    f"on {size} ranks needs {count} on rank {rank}{beside}"
                )

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """Where the result of this rank goes in its own array, for a caller who gives no other."""
        return source

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """The order of the arrays' elements in memory. Raises ArgumentError where it is not the same."""
        return common_order(arrays)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """Whether the call is in place, and the address of each of the schedule's buffers.

        Raises InvalidBufferError where arrays overlap in a way that is not allowed.
        """
        source, target = arrays["input"], arrays["output"]
        if same_or_disjoint(source, target):
            return True, {"output": target.address}
        return False, {"input": source.address, "output": target.address}

    @abstractmethod
    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """The schedule of one rank; ``default_chunk`` where the caller named none (None: the collective's own)."""

    def _chunk(self, default: int | None) -> int | None:
        return default if self.chunk is None else self.chunk


def common(count: int, dtype: DTypeLike, codec: CodecLike, chunk: int | None, order: str = "C") -> dict[str, Any]:
    """Check the parameters that every collective has."""
    return {
        "count": count_of(count),
        "dtype": dtypes.get(dtype),
        "codec": codecs.get(codec),
        "chunk": chunk_of(chunk),
        "order": order,
    }


def reduction(op: str, size: int) -> tuple[str, float]:
    """What a schedule does for ``op``: how it combines, and the factor of the result."""
    return ("sum", 1.0 / size) if op == "avg" else (op, 1.0)


def row_major(arrays: Mapping[str, Values], name: str) -> str:
    """The order "C". Raises ArgumentError where an array has another one."""
    for values in arrays.values():
        if values.order != "C":
            raise ArgumentError(
                f"{name} takes the elements of row-major arrays, and {values.what} is not: shape and strides in "
                f"elements are {values.layout}; pass a row-major copy"
            )
    return "C"


def common_order(arrays: Mapping[str, Values]) -> str:
    """The order of all arrays. Raises ArgumentError where it is not the same."""
    first, *others = arrays.values()
    order = first.order
    for other in others:
        if other is not first and other.order != order:
            raise ArgumentError(
                f"{first.what} and {other.what} lie differently in memory (shape, strides in elements): "
                f"{first.layout} and {other.layout}; pass arrays of one shape and one order of axes"
            )
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSpec(CollectiveSpec):
    """A vector of which each rank has a part; ``parts`` are their lengths, None where they are equal."""

    parts: tuple[int, ...] | None

    def lengths(self, size: int) -> tuple[int, ...]:
        """Of all parts. Raises ArgumentError where they do not fit."""
        if self.parts is None:
            return equal_parts(self.count, size, self.name)
        if len(self.parts) != size or sum(self.parts) != self.count:
            raise ArgumentError(
                f"counts={list(self.parts)} are {len(self.parts)} numbers with the sum {sum(self.parts)}; there must "
                f"be {size}, one for each rank, with the sum {self.count}, the elements of the whole vector"
            )
        return self.parts

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See CollectiveSpec; parts of an array are row-major."""
        return row_major(arrays, self.name)


def parts_of(counts: Sequence[int] | None, what: str = "counts") -> tuple[int, ...] | None:
    """Check the lengths of parts; None means equal parts."""
    return None if counts is None else tuple(count_of(count, f"each of {what}") for count in integers(counts, what))


def equal_parts(count: int, size: int, name: str, given_by: str = "counts=") -> tuple[int, ...]:
    """The lengths of ``size`` equal parts. Raises ArgumentError if ``count`` cannot be divided equally."""
    if count % size:
        raise ArgumentError(
            f"{name}: {count} elements cannot be shared equally among {size} ranks; say who gets how many "
            f"with {given_by}"
        )
    return (count // size,) * size


def check_root(root: int, size: int) -> None:
    """Raise ArgumentError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise ArgumentError(f"root={root} is not a rank of this communicator; ranks are 0 to {size - 1}")
