"""Collectives whose arrays correspond to each other element by element: all-reduce, reduce, broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qccl.arguments import OpLike, integer, one_of, op_of
from qccl.arrays import Values, check_disjoint, same_or_disjoint
from qccl.collectives import ALLREDUCE, REDUCE, TREES, choose_allreduce, choose_reduce, choose_tree
from qccl.collectives.allreduce import coalesced
from qccl.collectives.rooted import broadcast
from qccl.errors import ArgumentError
from qccl.schedule import Schedule
from qccl.signatures.base import Signature, common, common_order, reduction

__all__ = ["AllReduce", "Broadcast", "Coalesced", "Reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Signature):
    """Parameters of quantized_allreduce."""

    name = "allreduce"
    keeps_state = True

    op: str
    algorithm: str

    @classmethod
    def make(cls, *given: Any, op: OpLike = "sum", algorithm: str = "auto") -> AllReduce:
        """Check the arguments."""
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        return cls(**common(*given), op=op_of(op), algorithm=algorithm)

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_allreduce(self.count, size, self.dtype, self.codec)
        return ALLREDUCE[name](
            *(rank, size, self.count, self.dtype, self.codec, combine),
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Signature):
    """Parameters of quantized_reduce."""

    name = "reduce"

    op: str
    root: int
    algorithm: str

    @classmethod
    def make(cls, *given: Any, op: OpLike = "sum", root: int = 0, algorithm: str = "auto") -> Reduce:
        """Check the arguments."""
        one_of(algorithm, ("auto", *REDUCE), "algorithm")
        return cls(**common(*given), op=op_of(op), root=integer(root, "root"), algorithm=algorithm)

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature; there is an output on the root alone."""
        _check_root(self.root, size)
        both = {"input": self.count, "output": self.count}
        return both if rank == self.root else {"input": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        if rank == self.root:
            return Signature.bind(self, arrays, rank, size)
        return False, {"input": arrays["input"].address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_reduce(self.count, size, self.dtype, self.codec)
        return REDUCE[name](
            *(rank, size, self.count, self.dtype, self.codec, combine),
            root=self.root,
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Signature):
    """Parameters of quantized_broadcast."""

    name = "broadcast"

    root: int
    algorithm: str

    @classmethod
    def make(cls, *given: Any, root: int = 0, algorithm: str = "auto") -> Broadcast:
        """Check the arguments."""
        one_of(algorithm, ("auto", *TREES), "algorithm")
        return cls(**common(*given), root=integer(root, "root"), algorithm=algorithm)

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature; there is an input on the root alone."""
        _check_root(self.root, size)
        both = {"input": self.count, "output": self.count}
        return both if rank == self.root else {"output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        if rank == self.root:
            return Signature.bind(self, arrays, rank, size)
        return True, {"output": arrays["output"].address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        tree = self.algorithm
        if tree == "auto":
            tree = choose_tree(self.count, size, self.dtype, self.codec)
        return broadcast(
            *(rank, size, self.count, self.dtype, self.codec),
            root=self.root,
            tree=tree,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coalesced(Signature):
    """Parameters of quantized_allreduce_coalesced; the arrays are "input 0", "output 0", "input 1", ..."""

    name = "allreduce_coalesced"
    keeps_state = True

    each: tuple[int, ...]
    op: str
    algorithm: str

    @classmethod
    def make(cls, *given: Any, each: Sequence[int] = (), op: OpLike = "sum", algorithm: str = "auto") -> Coalesced:
        """Check the arguments."""
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        return cls(**common(*given), each=tuple(each), op=op_of(op), algorithm=algorithm)

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        return {f"{name} {i}": count for i, count in enumerate(self.each) for name in ("input", "output")}

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See Signature; a text of all orders where not all are row-major."""
        numbers = range(len(self.each))
        pairs = [{name: arrays[name] for name in (f"input {i}", f"output {i}")} for i in numbers]
        orders = [common_order(pair) for pair in pairs]
        return "C" if all(order == "C" for order in orders) else "; ".join(orders)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        numbers = range(len(self.each))
        sources = {f"input {i}": arrays[f"input {i}"] for i in numbers}
        targets = {f"output {i}": arrays[f"output {i}"] for i in numbers}
        same = {same_or_disjoint(arrays[f"input {i}"], arrays[f"output {i}"]) for i in numbers if self.each[i]}
        if len(same) > 1:
            raise ArgumentError(
                "some arrays are given as their own outputs and some are not; pass all in place or none"
            )
        in_place = not same or same.pop()
        read = {} if in_place else sources
        check_disjoint(targets.values(), read.values())
        return in_place, {name: values.address for name, values in (targets | read).items()}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        combine, scale = reduction(self.op, size)
        name = self.algorithm
        if name == "auto":
            name = choose_allreduce(self.count, size, self.dtype, self.codec)
        return coalesced(
            *(rank, size, self.each, self.dtype, self.codec, combine),
            algorithm=name,
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


def _check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ArgumentError(f"root={root} is not a rank of this communicator; ranks are 0 to {size - 1}")
