"""All-reduce in two levels: exact or nearly so inside nodes, strongly compressed between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qccl import codecs
from qccl.arguments import CodecLike, OpLike, integers, one_of, op_of
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import ALLREDUCE, choose_allreduce
from qccl.collectives.layout import (
    DEFAULT_DEPTH,
    CallerBuffers,
    Coarsened,
    Encoding,
    Layout,
    Subset,
    partition_for_all,
    pipeline,
)
from qccl.collectives.rounds import AllGather, Combine, ScatterReduce, alone, checked, decode, encode
from qccl.collectives.spec import CollectiveSpec, common, reduction
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Schedule

__all__ = ["INTRA", "LAYOUTS", "HierarchicalSpec", "choose_inter", "hierarchical"]

LAYOUTS = ("leader", "sharded")

#: what may be written for the codec inside nodes: nothing that draws random numbers, or sums it with codes
INTRA = {"none": "none", "float16": "cast:dtype=float16", "bfloat16": "cast:dtype=bfloat16"}
_Stage = Callable[[int], Iterator[Op]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalSpec(CollectiveSpec):
    """Parameters of hierarchical_allreduce; ``node_ids`` has a number for each rank's node.

    ``inter`` "host" sends what goes between nodes from host memory, also where the values are on a GPU.
    """

    name = "hierarchical_allreduce"

    op: str
    intra: Codec
    layout: str
    node_ids: tuple[int, ...]
    algorithm: str
    inter: str | None = None

    @classmethod
    def from_arguments(
        cls,
        *shared: Any,
        op: OpLike = "sum",
        intra: CodecLike = "none",
        layout: str = "leader",
        node_ids: Sequence[int] = (),
        algorithm: str = "auto",
        inter: str | None = None,
    ) -> HierarchicalSpec:
        """Check the arguments."""
        if inter not in (None, "host"):
            raise ArgumentError(
                f"inter={inter!r} cannot be had; between nodes codes go as the communicator's other transfers do "
                f'(None), or from host memory ("host")'
            )
        one_of(layout, LAYOUTS, "layout")
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        checked = common(*shared)
        one_of(intra if isinstance(intra, str) else repr(intra), INTRA, "intra")
        plain = intra == checked["dtype"].name
        return cls(
            **checked,
            op=op_of(op),
            intra=codecs.get("none" if plain else INTRA[str(intra)]),
            layout=layout,
            node_ids=integers(node_ids, "node_ids"),
            algorithm=algorithm,
            inter=inter,
        )

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self) | {"intra": self.intra.spec(), "node_ids": list(self.node_ids)}
        if self.inter is None:
            del shown["inter"]
        return shown

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See CollectiveSpec."""
        if len(self.node_ids) != size:
            raise ArgumentError(
                f"node_ids has {len(self.node_ids)} numbers; there must be {size}, one for each rank, equal for ranks "
                f"of one node"
            )
        return CollectiveSpec.counts(self, rank, size)

    def nodes(self) -> list[list[int]]:
        """The ranks of each node, in the order of the nodes' first ranks."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_ids):
            found.setdefault(node, []).append(rank)
        return list(found.values())

    def resolved(self) -> tuple[list[list[int]], int, str]:
        """The nodes, the parts that have owners in each, and the algorithm between them."""
        nodes = self.nodes()
        parts = 1 if self.layout == "leader" else min(map(len, nodes))
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = choose_inter(self.count, len(nodes), parts, self.dtype, self.codec)
        return nodes, parts, algorithm

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See CollectiveSpec."""
        combine, scale = reduction(self.op, size)
        nodes, parts, algorithm = self.resolved()
        made = hierarchical(
            *(rank, size, self.count, self.dtype, self.codec, combine),
            intra=self.intra,
            nodes=nodes,
            parts=parts,
            algorithm=algorithm,
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )
        if self.inter is None:
            return made
        return replace(
            made, staged_peers=frozenset(r for r, node in enumerate(self.node_ids) if node != self.node_ids[rank])
        )


def choose_inter(count: int, nodes: int, parts: int, dtype: DType, codec: Codec) -> str:
    """The algorithm between nodes that "auto" stands for.

    Two nodes send the same bytes either way, and one_shot quantises once, as ByteGrad has it.
    """
    return "one_shot" if nodes <= 2 else choose_allreduce(-(-count // parts), nodes, dtype, codec)


def hierarchical(
    rank: int,
    size: int,
    count: int,
    dtype: DType,
    codec: Codec,
    op: str = "sum",
    *,
    intra: Codec,
    nodes: Sequence[Sequence[int]],
    parts: int = 1,
    algorithm: str = "one_shot",
    scale: float = 1.0,
    in_place: bool = False,
    chunk_elements: int | None = None,
    depth: int = DEFAULT_DEPTH,
) -> Schedule:
    """Reduce in each node to the owners of ``parts`` parts, all-reduce each part among them, gather in each node.

    ``nodes`` are the ranks of each node; the first ``parts`` of them own parts 0, 1, ... With one part this is
    ByteGrad: the first rank of each node is its leader. With as many as the smallest node has ranks, as many network
    cards are busy at the same time. ``intra`` encodes what moves inside nodes; between them ``codec`` does, in one or
    two rounds (see all-reduce). "output" holds the sums of the node until those of all take their place.
    """
    combine = checked(rank, size, op, scale, depth, count)
    if sorted(r for node in nodes for r in node) != list(range(size)):
        raise ArgumentError(f"nodes are {[list(n) for n in nodes]}; each of the {size} ranks must be in one of them")
    if not 1 <= parts <= min(map(len, nodes)):
        raise ArgumentError(f"parts is {parts}; it must be 1 to the ranks of the smallest node")
    caller = CallerBuffers.make(in_place)
    buffers = caller.buffers((count,), dtype)
    if size == 1 or count == 0:
        return Schedule("hierarchical", rank, size, buffers, alone(codec, caller, (count,), combine))
    node = next(tuple(ranks) for ranks in nodes if rank in ranks)
    splits = len(nodes) if algorithm == "two_round" else 1
    fine = partition_for_all(count, parts * splits, (intra, codec), chunk_elements)
    levels = _Levels(rank, node, nodes, fine, dtype, codec, intra, combine, caller, depth, parts, algorithm)
    ops = pipeline(fine.chunks, *levels.stages())
    return Schedule("hierarchical", rank, size, buffers | levels.buffers, ops)


class _Levels:
    """The stages of one rank, each a step behind the one whose transfer it waits for."""

    def __init__(
        self,
        rank: int,
        node: Sequence[int],
        nodes: Sequence[Sequence[int]],
        fine: Layout,
        dtype: DType,
        codec: Codec,
        intra: Codec,
        combine: Combine,
        caller: CallerBuffers,
        depth: int,
        parts: int,
        algorithm: str,
    ) -> None:
        self._rank, self._node, self._dtype, self._depth = rank, node, dtype, depth
        self._codec, self._combine, self._target = codec, combine, caller.target
        self._fine, self._parts, self._exact = fine, parts, intra.name == "none"
        self._source = caller.source if len(node) == 1 else caller.target  # of what goes between nodes
        self._lag = min(1, depth - 1)
        self.buffers: dict[str, Buffer] = {}
        coarse = Encoding(Coarsened(fine, parts), intra, dtype)
        self._up = ScatterReduce(rank, node, coarse, caller.source, depth, name="up")
        self._down = AllGather(rank, node, coarse, depth, name="down", round_number=3)
        self._rounds = len(node) == 1 and any(len(ranks) > 1 for ranks in nodes) and intra.name != "none"
        self._coarse, self._slot = coarse, coarse.slots("down.own", 1, depth)
        if len(node) > 1:
            self.buffers |= self._up.buffers() | self._down.buffers()
        elif self._rounds:
            self.buffers["down.own"] = self._slot.buffer()
        place = node.index(rank)
        self._owners = [ranks[place] for ranks in nodes] if place < parts else []
        self._first = place * (fine.parts // parts)
        self._algorithm = algorithm

    def stages(self) -> list[tuple[int, _Stage]]:
        """All stages with their lags, in order."""
        stages: list[tuple[int, _Stage]] = []
        lag, several = 0, len(self._node) > 1
        inter = len(self._owners) > 1
        if several:
            stages += [(0, self._up.send), (self._lag, self._reduce_in_node)]
            lag = self._lag
        if inter:
            make = self._one_shot if self._algorithm == "one_shot" else self._two_round
            stages += [(lag + late, stage) for late, stage in make()]
        lag += self._lag * (1 if self._algorithm == "one_shot" else 2)
        if self._rounds:
            stages += [(lag, self._round)]
        if several:
            stages += [(lag, self._share), (lag, self._down.exchange), (lag + self._lag, self._take)]
        return stages

    def _reduce_in_node(self, k: int) -> Iterator[Op]:
        """The sum of the node; where there is no other node, it is the result."""
        whole = self._combine if len(self._owners) == 1 else Combine(self._combine.op)
        return self._up.reduce(k, whole, None, self._target)

    def _share(self, k: int) -> Iterator[Op]:
        return self._down.encode(k, self._target, None if self._exact else self._target)

    def _round(self, k: int) -> Iterator[Op]:
        """A rank alone in its node: through the code that the result takes in the other nodes, to get the same bits."""
        wire = self._slot.span(k, 0, self._coarse.nbytes(0, k))
        yield from encode(self._coarse, 0, k, self._target, wire, 3)
        yield from decode(self._coarse, 0, k, wire, self._target, self._rank, 3)

    def _take(self, k: int) -> Iterator[Op]:
        return self._down.decode(k, self._target)

    def _one_shot(self) -> list[tuple[int, _Stage]]:
        part = Encoding(Subset(self._fine, self._first, 1), self._codec, self._dtype)
        gather = AllGather(self._rank, self._owners, part, self._depth, name="inter", round_number=1, common=True)
        self.buffers |= gather.buffers()

        def encode_own(k: int) -> Iterator[Op]:
            return gather.encode(k, self._source)

        def reduce(k: int) -> Iterator[Op]:
            return gather.reduce(k, self._combine, self._target)

        return [(0, encode_own), (0, gather.exchange), (self._lag, reduce)]

    def _two_round(self) -> list[tuple[int, _Stage]]:
        shards = Encoding(Subset(self._fine, self._first, len(self._owners)), self._codec, self._dtype)
        scatter = ScatterReduce(
            self._rank, self._owners, shards, self._source, self._depth, name="inter", round_number=1
        )
        gather = AllGather(self._rank, self._owners, shards, self._depth, name="inter.sum", round_number=2)
        self.buffers |= scatter.buffers() | gather.buffers()

        def reduce(k: int) -> Iterator[Op]:
            return scatter.reduce(k, self._combine, gather.wire(k), self._target)

        def decode_others(k: int) -> Iterator[Op]:
            return gather.decode(k, self._target)

        lag = self._lag
        return [(0, scatter.send), (lag, reduce), (lag, gather.exchange), (2 * lag, decode_others)]
