"""The arguments that every algorithm takes: the group of ranks, the caller's buffers, and the reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.collectives.partitions import Segment
from qccl.collectives.schedule import Buffer, Role, Span, buffer_name

__all__ = ["SUM", "Arrays", "CallerBuffers", "Combine", "Nodes", "Places", "RankGroup", "ranks_by_node"]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of the communicator, in an order that all of them know; ``rank`` is this process."""

    rank: int
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise ArgumentError(f"rank {self.rank} of {self.size} ranks does not exist; ranks are 0 to size - 1")

    @staticmethod
    def of_all(rank: int, size: int) -> RankGroup:
        """All ranks of the communicator."""
        return RankGroup(rank, range(size))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """The position of this rank in the group."""
        return self.ranks.index(self.rank)

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks, starting after this one, so that not all ranks send to the first one at once."""
        return tuple(self.owners(self.size))[1:]

    def owners(self, parts: int) -> dict[int, int]:
        """The numbers of the parts that the first ranks of the group own, by rank, from this rank on around."""
        here, size = self.index, self.size
        return {self.ranks[i % size]: i % size for i in range(here, here + size) if i % size < parts}


def ranks_by_node(node_ids: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, in the order of the nodes' first ranks; ``node_ids``: the number of each rank's node."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(node_ids):
        found.setdefault(node, []).append(rank)
    return list(found.values())


class Nodes:
    """The nodes as one rank sees them: ``mine`` has the ranks of its node, ``others`` the ranks of each other node.

    Rank ``j`` of a node represents it towards the ranks ``j``, ``j + L``, ... of every other node, where ``L`` is the
    number of ranks of the node; so nodes may differ in size.
    """

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.mine = next(node for node in nodes if rank in node)
        self.others = [node for node in nodes if rank not in node]
        self._places = {other: place for node in nodes for place, other in enumerate(node)}

    def stands_for(self, node: Sequence[int], other: int) -> int:
        """The rank of ``node`` that exchanges codes with rank ``other`` of another node."""
        return node[self._places[other] % len(node)]

    def partners(self, rank: int) -> tuple[int, ...]:
        """The ranks of other nodes with which ``rank``, of this node, exchanges codes for its node."""
        return tuple(other for node in self.others for other in node if self.stands_for(self.mine, other) == rank)


@dataclass(frozen=True, slots=True)
class Combine:
    """How the values of the ranks are combined: by ``op`` ("sum", "min" or "max"), then multiplied by ``scale``."""

    op: str = "sum"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in ("sum", "min", "max"):
            raise ArgumentError(
                f"op is {self.op!r}; a schedule knows sum, min and max (an average is a sum with a scale)"
            )

    @staticmethod
    def of(op: str, size: int) -> Combine:
        """The reduction that a caller names; "avg" is a sum times 1 / ``size``."""
        return Combine("sum", 1.0 / size) if op == "avg" else Combine(op)


SUM = Combine()


class Places(Protocol):
    """The memory of a vector: Arrays, or buffers of the schedule."""

    def spans(self, segments: Sequence[Segment]) -> list[Span]:
        """The elements of each segment."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Buffers of values, by the number of the array; they begin with element ``first`` of the vector."""

    names: tuple[str, ...]
    first: int = 0

    def spans(self, segments: Sequence[Segment]) -> list[Span]:
        """The elements of each segment in its buffer."""
        return [Span(self.names[each.array], each.start - self.first, each.stop - self.first) for each in segments]


@dataclass(frozen=True, slots=True)
class CallerBuffers:
    """The caller's arrays, as buffers of a schedule.

    Attributes:
        dtype: the element type of all arrays.
        counts: elements of each array; in reduce-scatter and all-gather, elements of each rank's part.
        source: the values that the collective reads.
        target: the memory of the result; the same as ``source`` in place.
        declared: the buffers by name.
        guard: the buffers that must be finite for a call to change state; empty: the buffers of ``target``.
    """

    dtype: DType
    counts: tuple[int, ...]
    source: Arrays
    target: Arrays
    declared: Mapping[str, Buffer]
    guard: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for count in self.counts:
            if count < 0:
                raise ArgumentError(f"count is {count}; it must be 0 or more")

    @staticmethod
    def alike(
        counts: Sequence[int], dtype: DType, *, in_place: bool = False, numbered: bool = False, result: bool = True
    ) -> CallerBuffers:
        """Inputs and outputs of the same lengths: "output", and "input" unless the call is in place.

        ``numbered``: the buffers are "output 0", "output 1", and so on. Without ``result`` there is only "input".
        """
        indices: Sequence[int | None] = range(len(counts)) if numbered else [None]
        target = Arrays(tuple(buffer_name("output", i) for i in indices))
        source = target if in_place and result else Arrays(tuple(buffer_name("input", i) for i in indices))

        def declare(arrays: Arrays, role: Role) -> dict[str, Buffer]:
            return {name: Buffer(n, dtype, role, i) for name, n, i in zip(arrays.names, counts, indices, strict=True)}

        declared = declare(source, Role.INPUT) if source != target else {}
        if result:
            declared |= declare(target, Role.OUTPUT)
        return CallerBuffers(dtype, tuple(counts), source, target, declared)

    @staticmethod
    def scattered(counts: Sequence[int], rank: int, dtype: DType, *, in_place: bool = False) -> CallerBuffers:
        """The whole vector as input and part ``rank`` of it as output; in place, the part stays where it is.

        Only this rank has its part of the result, so both its own values and the part must be finite.
        """
        whole, first = sum(counts), sum(counts[:rank])
        if in_place:
            output = Arrays(("output",))
            return CallerBuffers(dtype, tuple(counts), output, output, {"output": Buffer(whole, dtype, Role.OUTPUT)})
        declared = {"input": Buffer(whole, dtype, Role.INPUT), "output": Buffer(counts[rank], dtype, Role.OUTPUT)}
        target = Arrays(("output",), first)
        return CallerBuffers(dtype, tuple(counts), Arrays(("input",)), target, declared, tuple(declared))

    @staticmethod
    def gathered(counts: Sequence[int], rank: int, dtype: DType, *, in_place: bool = False) -> CallerBuffers:
        """Part ``rank`` as input and the whole vector as output; in place, the part is already in the output."""
        target = Arrays(("output",))
        output = {"output": Buffer(sum(counts), dtype, Role.OUTPUT)}
        if in_place:
            return CallerBuffers(dtype, tuple(counts), target, target, output)
        declared = {"input": Buffer(counts[rank], dtype, Role.INPUT), **output}
        return CallerBuffers(dtype, tuple(counts), Arrays(("input",), sum(counts[:rank])), target, declared)

    @staticmethod
    def exchanged(send_counts: Sequence[int], recv_counts: Sequence[int], dtype: DType) -> CallerBuffers:
        """Parts for all ranks as input, and parts from all ranks as output."""
        declared = {
            "input": Buffer(sum(send_counts), dtype, Role.INPUT),
            "output": Buffer(sum(recv_counts), dtype, Role.OUTPUT),
        }
        return CallerBuffers(dtype, (*send_counts, *recv_counts), Arrays(("input",)), Arrays(("output",)), declared)
