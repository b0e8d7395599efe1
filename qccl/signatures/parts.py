"""Collectives in which each rank has a part of a vector: reduce-scatter, all-gather, all-to-all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qccl.arguments import OpLike, count_of, integers, op_of
from qccl.arrays import Values, check_disjoint, is_part_of
from qccl.collectives.scatter import all_gather, all_to_all, reduce_scatter
from qccl.errors import ArgumentError
from qccl.schedule import Schedule
from qccl.signatures.base import Signature, common, reduction, row_major

__all__ = ["AllGather", "AllToAll", "ReduceScatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts(Signature):
    """A vector of which each rank has a part; ``parts`` are their lengths, None where they are equal."""

    parts: tuple[int, ...] | None

    def lengths(self, size: int) -> tuple[int, ...]:
        """Of all parts. Raises ArgumentError where they do not fit."""
        if self.parts is None:
            return _equal(self.count, size, self.name)
        if len(self.parts) != size or sum(self.parts) != self.count:
            raise ArgumentError(
                f"counts={list(self.parts)} are {len(self.parts)} numbers with the sum {sum(self.parts)}; there must "
                f"be {size}, one for each rank, with the sum {self.count}, the elements of the whole vector"
            )
        return self.parts

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See Signature; parts of an array are row-major."""
        return row_major(arrays, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(_Parts):
    """Parameters of quantized_reduce_scatter."""

    name = "reduce_scatter"

    op: str

    @classmethod
    def make(cls, *given: Any, op: OpLike = "sum", counts: Sequence[int] | None = None) -> ReduceScatter:
        """Check the arguments."""
        return cls(**common(*given), op=op_of(op), parts=_counts(counts))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        return {"input": self.count, "output": self.lengths(size)[rank]}

    def output_in(self, source: Values, rank: int, size: int) -> Values:
        """See Signature: the own part, where it is."""
        lengths = self.lengths(size)
        return source.part(sum(lengths[:rank]), lengths[rank])

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(target, source, sum(self.lengths(size)[:rank])):
            return True, {"output": source.address}
        return False, {"input": source.address, "output": target.address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        combine, scale = reduction(self.op, size)
        return reduce_scatter(
            *(rank, size, self.lengths(size), self.dtype, self.codec, combine),
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(_Parts):
    """Parameters of quantized_all_gather."""

    name = "all_gather"

    @classmethod
    def make(cls, *given: Any, counts: Sequence[int] | None = None) -> AllGather:
        """Check the arguments."""
        return cls(**common(*given), parts=_counts(counts))

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        return {"input": self.lengths(size)[rank], "output": self.count}

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        source, target = arrays["input"], arrays["output"]
        if is_part_of(source, target, sum(self.lengths(size)[:rank])):
            return True, {"output": target.address}
        return False, {"input": source.address, "output": target.address}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        return all_gather(
            *(rank, size, self.lengths(size), self.dtype, self.codec),
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Signature):
    """Parameters of quantized_all_to_all; ``sends`` and ``receives`` are this rank's, by peer; None: all are equal."""

    name = "all_to_all"

    sends: tuple[int, ...] | None
    receives: tuple[int, ...] | None

    @classmethod
    def make(
        cls, *given: Any, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
    ) -> AllToAll:
        """Check the arguments."""
        if (send_counts is None) != (recv_counts is None):
            raise ArgumentError("send_counts and recv_counts belong together; give both, or none where all are equal")
        return cls(
            **common(*given), sends=_counts(send_counts, "send_counts"), receives=_counts(recv_counts, "recv_counts")
        )

    def _shown(self) -> dict[str, Any]:
        shown = Signature._shown(self)
        del shown["sends"], shown["receives"]
        if self.sends is not None:
            shown["count"] = "by pair"
        return shown

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """See Signature: how many elements go each way."""
        if self.sends is None or self.receives is None:
            return ()
        return tuple(
            f"; {min(rank, p)} sends {max(rank, p)} {(out, back)[rank > p]} elements and gets {(back, out)[rank > p]}"
            for p, (out, back) in enumerate(zip(self.sends, self.receives, strict=True))
        )

    def lengths(self, rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is sent and received, by peer. Raises ArgumentError where it does not fit."""
        if self.sends is None or self.receives is None:
            equal = _equal(self.count, size, self.name)
            return equal, equal
        for what, given in (("send_counts", self.sends), ("recv_counts", self.receives)):
            if len(given) != size:
                raise ArgumentError(f"{what} has {len(given)} numbers; there must be {size}, one for each rank")
        if self.sends[rank] != self.receives[rank]:
            raise ArgumentError(
                f"rank {rank} sends itself {self.sends[rank]} elements and gets {self.receives[rank]} from itself; "
                f"these must be equal"
            )
        return self.sends, self.receives

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        sends, receives = self.lengths(rank, size)
        return {"input": sum(sends), "output": sum(receives)}

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """See Signature."""
        return row_major(arrays, self.name)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> tuple[bool, dict[str, int]]:
        """See Signature."""
        check_disjoint([arrays["output"]], [arrays["input"]])
        return False, {name: values.address for name, values in arrays.items()}

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        sends, receives = self.lengths(rank, size)
        chunk = self._chunk(default_chunk)
        return all_to_all(rank, size, sends, receives, self.dtype, self.codec, chunk_elements=chunk)


def _counts(counts: Sequence[int] | None, what: str = "counts") -> tuple[int, ...] | None:
    return None if counts is None else tuple(count_of(count, f"each of {what}") for count in integers(counts, what))


def _equal(count: int, size: int, name: str) -> tuple[int, ...]:
    if count % size:
        raise ArgumentError(
            f"{name}: {count} elements cannot be shared equally among {size} ranks; say who gets how many with "
            f"{'send_counts= and recv_counts=' if name == AllToAll.name else 'counts='}"
        )
    return (count // size,) * size
