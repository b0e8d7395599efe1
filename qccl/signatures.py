"""What is called: for each collective its parameters, the arrays it takes, and the schedule that follows from them.

A Signature is all that makes two calls the same: the key of a plan, and the text that the ranks compare. A new
collective is a schedule (in collectives/), a Signature here, and a method of Communicator that makes it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from qccl import codecs, dtypes
from qccl.arguments import CodecLike, chunk_of, count_of, one_of, op_of
from qccl.buffers import Values, same_or_disjoint
from qccl.codecs.base import Codec
from qccl.collectives import ALLREDUCE, choose_allreduce
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Schedule

__all__ = ["SIGNATURES", "AllReduce", "Signature", "of_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(ABC):
    """The parameters that every collective has.

    The caller's arrays are named as the schedule's buffers are: "input", "output".

    Attributes:
        count: elements of the whole vector.
        order: which element follows which in memory (Values.order).
    """

    #: of the collective, in Communicator.plan
    name: ClassVar[str]
    #: the arrays correspond to each other element by element, so any order of axes will do that they have in common
    elementwise: ClassVar[bool] = True

    count: int
    dtype: DType
    codec: Codec
    chunk: int | None
    order: str = "C"

    def text(self) -> str:
        """All of it, for the ranks to compare and for messages."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        order = values.pop("order")
        values["codec"] = self.codec.spec()
        if order != "C":
            values["order"] = order
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in values.items())})"

    def counts(self, rank: int) -> dict[str, int]:
        """Elements that each array of this rank must have."""
        return {"input": self.count, "output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int) -> tuple[bool, dict[str, int]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Signature):
    """Parameters of quantized_allreduce."""

    name = "allreduce"

    op: str
    algorithm: str

    @classmethod
    def make(
        cls,
        count: int,
        dtype: DType | str | int,
        codec: CodecLike,
        chunk: int | None,
        order: str = "C",
        *,
        op: str | int = "sum",
        algorithm: str = "auto",
    ) -> AllReduce:
        """Check the arguments."""
        if algorithm != "auto":
            one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        return cls(
            count=count_of(count),
            dtype=dtypes.get(dtype),
            codec=codecs.get(codec),
            chunk=chunk_of(chunk),
            order=order,
            op=op_of(op),
            algorithm=algorithm,
        )

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_allreduce(self.count, size, self.dtype, self.codec)
        return ALLREDUCE[name](
            rank,
            size,
            self.count,
            self.dtype,
            self.codec,
            combine,
            scale=scale,
            in_place=in_place,
            chunk_elements=default_chunk if self.chunk is None else self.chunk,
        )


def reduction(op: str, size: int) -> tuple[str, float]:
    """What a schedule does for ``op``: how it combines, and the factor of the result."""
    return ("sum", 1.0 / size) if op == "avg" else (op, 1.0)


#: every collective that there can be a plan of, by name
SIGNATURES: Mapping[str, Any] = MappingProxyType({kind.name: kind for kind in (AllReduce,)})


def of_plan(
    collective: str,
    count: int,
    dtype: DType | str | int,
    codec: CodecLike,
    chunk: int | None,
    parameters: Mapping[str, Any],
) -> Signature:
    """The signature of a collective that is given by name."""
    if collective not in SIGNATURES:
        known = ", ".join(f'"{name}"' for name in SIGNATURES)
        raise ArgumentError(f"there is no plan for {collective!r}; the collectives are {known}")
    make = SIGNATURES[collective].make
    own = [name for name, each in inspect.signature(make).parameters.items() if each.kind is each.KEYWORD_ONLY]
    for name in parameters:
        if name not in own:
            raise ArgumentError(f"{collective} has no parameter {name!r}; those of its plans are {', '.join(own)}")
    signature: Signature = make(count, dtype, codec, chunk, **parameters)
    return signature
