"""All-reduce in two levels: a codec between nodes, and another one, or none, inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from qccl import codecs
from qccl.arguments import CodecLike, OpLike, integers, one_of, op_of
from qccl.chunks import NETWORK, ChunkPolicy
from qccl.codecs.base import Codec
from qccl.codecs.feedback import Momentum
from qccl.collectives.allreduce import ALLREDUCE, choose_allreduce
from qccl.collectives.native import NativeAllGather, NativeScatterReduce
from qccl.collectives.operands import SUM, CallerBuffers, Combine, Group, ranks_by_node
from qccl.collectives.partitions import Concatenation, Grouped, partition_for_all
from qccl.collectives.rounds import (
    AllGather,
    ScatterReduce,
    alone,
    assemble,
    decode_chunk,
    encode_chunk,
    pipeline,
    reduce_and_encode,
)
from qccl.collectives.spec import CollectiveSpec, common
from qccl.collectives.wire import Encoding
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.schedule import Buffer, Op, Schedule

__all__ = ["LAYOUTS", "HierarchicalSpec", "Levels", "by_level", "choose_inter", "hierarchical", "intra_of"]

LAYOUTS = ("leader", "sharded")

#: short names of codecs inside nodes
_INTRA = {"float16": "cast:dtype=float16", "bfloat16": "cast:dtype=bfloat16"}


@dataclass(frozen=True, slots=True)
class Levels:
    """How the work is divided in two levels.

    Attributes:
        nodes: the ranks of each node; the first ``parts`` of them own parts 0, 1, ... of the vector.
        parts: with one part, the first rank of each node is its leader, as in ByteGrad. With as many as the smallest
            node has ranks, as many network cards are busy at the same time.
        algorithm: between nodes, "one_shot" or "two_round".
        intra: encodes the values inside nodes.
    """

    nodes: Sequence[Sequence[int]]
    parts: int
    algorithm: str
    intra: Codec

    def native_groups(self) -> tuple[tuple[int, ...], ...]:
        """The nodes in which the library can scatter and gather: all ranks own a part, and plain values move."""
        plain = self.intra.name == "none"
        return tuple(tuple(node) for node in self.nodes if plain and 1 < len(node) == self.parts)

    def check(self, size: int) -> None:
        """Raise ArgumentError unless this divides ``size`` ranks."""
        if sorted(rank for node in self.nodes for rank in node) != list(range(size)):
            raise ArgumentError(
                f"nodes are {[list(node) for node in self.nodes]}; each of the {size} ranks must be in one of them"
            )
        if not 1 <= self.parts <= min(map(len, self.nodes)):
            raise ArgumentError(f"parts is {self.parts}; it must be 1 to the ranks of the smallest node")


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalSpec(CollectiveSpec):
    """Arguments of hierarchical_allreduce; ``node_ids`` has the number of each rank's node.

    With ``inter`` "host", codes between nodes are sent from host memory, also if the values are on a GPU. Without
    ``exact`` the schedule has an alternative with collectives of the library inside nodes.
    """

    name = "hierarchical_allreduce"
    keeps_state = True

    op: str
    intra: Codec
    layout: str
    node_ids: tuple[int, ...]
    algorithm: str
    inter: str | None = None
    exact: bool = True

    @classmethod
    def from_arguments(
        cls,
        *shared: Any,
        op: OpLike = "sum",
        intra: CodecLike = "none",
        layout: str = "sharded",
        node_ids: Sequence[int] = (),
        algorithm: str = "auto",
        inter: str | None = None,
        exact: bool = True,
    ) -> Self:
        """Check the arguments; ``shared`` are those of common()."""
        if inter not in (None, "host"):
            raise ArgumentError(
                f"inter={inter!r} cannot be had; between nodes codes go as the communicator's other transfers do "
                f'(None), or from host memory ("host")'
            )
        if not isinstance(exact, bool):
            raise ArgumentError(f"exact must be True or False, not {exact!r}")
        one_of(layout, LAYOUTS, "layout")
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        checked = common(*shared)
        return cls(
            **checked,
            op=op_of(op),
            intra=intra_of(intra, checked["dtype"]),
            layout=layout,
            node_ids=integers(node_ids, "node_ids"),
            algorithm=algorithm,
            inter=inter,
            exact=exact,
        )

    def __post_init__(self) -> None:
        CollectiveSpec.__post_init__(self)
        if self.intra.sparse and self.op in ("min", "max"):
            raise ArgumentError(
                f"op {self.op!r} is not possible with intra={self.intra.spec()}, which sends only some of the "
                f"elements; use sum or avg"
            )

    def _shown(self) -> dict[str, Any]:
        shown = CollectiveSpec._shown(self)
        shown |= {"intra": codecs.identity(self.intra), "node_ids": list(self.node_ids)}
        if self.inter is None:
            del shown["inter"]
        if self.exact:
            del shown["exact"]
        return shown

    def state_owner(self, algorithm: str) -> str:
        """With the algorithm between nodes; ``algorithm`` is the schedule's name, and ``exact`` does not count."""
        return CollectiveSpec.state_owner(replace(self, exact=True), self.levels().algorithm)

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        self.check_size(size)
        return CollectiveSpec.buffers(self, rank, size, in_place=in_place)

    def check_size(self, size: int) -> None:
        """Raise ArgumentError unless each of ``size`` ranks has a node."""
        if len(self.node_ids) != size:
            raise ArgumentError(
                f"node_ids has {len(self.node_ids)} numbers; there must be {size}, one for each rank, equal for ranks "
                f"of one node"
            )

    def levels(self) -> Levels:
        """The nodes, the parts that have owners in each, and the algorithm that "auto" chooses between them."""
        nodes = ranks_by_node(self.node_ids)
        parts = 1 if self.layout == "leader" else min(map(len, nodes))
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = choose_inter(self.count, len(nodes), parts, self.dtype, self.codec)
        return Levels(nodes, parts, algorithm, self.intra)

    def native_groups(self) -> tuple[tuple[int, ...], ...]:
        """See CollectiveSpec."""
        return () if self.exact or not self.count else self.levels().native_groups()

    def _schedule(self, group: Group, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        levels, combine, here = self.levels(), Combine.of(self.op, group.size), self.node_ids[group.rank]

        def make(native: bool) -> Schedule:
            made = hierarchical(group, buffers, self.codec, combine, levels=levels, chunking=chunking, native=native)
            if self.inter is None:
                return made
            elsewhere = (other for other, node in enumerate(self.node_ids) if node != here)
            return replace(made, staged_peers=frozenset(elsewhere))

        return replace(make(False), native=make(True)) if self.native_groups() else make(False)


def intra_of(intra: CodecLike, dtype: DType) -> Codec:
    """The codec inside nodes: any that keeps no state and draws no random numbers, also by the name of a narrower type.

    The owners of a part, one in each node, encode the same result. With random numbers, which depend on the rank, the
    ranks of different nodes would get different bits.
    """
    if intra == dtype.name:
        return codecs.get("none")
    found = codecs.get(_INTRA.get(intra, intra) if isinstance(intra, str) else intra)
    if found.state_names:
        raise ArgumentError(
            f"intra={found.spec()} keeps its {' and '.join(found.state_names)} from call to call, which codecs inside "
            f"nodes cannot; use intra={found.plain.spec()}, and +ef or +nesterov in codec="
        )
    if found.rounds != (found, found):
        raise ArgumentError(f"intra={found.spec()} is not possible: nodes have one codec; use {found.rounds[0].spec()}")
    if found.kernel().draws:
        raise ArgumentError(
            f"intra={found.spec()} draws random numbers, so the ranks of different nodes would get different bits; use "
            f"a codec that draws none, such as minmax8"
        )
    return found


def choose_inter(count: int, nodes: int, parts: int, dtype: DType, codec: Codec) -> str:
    """The algorithm between nodes that "auto" stands for.

    Two nodes send the same bytes either way, and one_shot quantises once, as ByteGrad does.
    """
    return "one_shot" if nodes <= 2 else choose_allreduce(-(-count // parts), nodes, dtype, codec)


def hierarchical(
    group: Group,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    levels: Levels,
    chunking: ChunkPolicy = NETWORK,
    native: bool = False,
) -> Schedule:
    """Reduce each part to its owner in each node, all-reduce it among the owners, gather all parts in each node.

    Sources: ByteGrad of Bagua, section "Algorithm" (one owner in each node, "leader"); BytePS's design of gradient
    compression, "Design Overview" (two levels).

    With ``native`` the nodes of levels.native_groups() do the first and the last by collectives of the library.

    ``codec`` encodes the values between nodes, in one or two rounds as in all-reduce; there it has its residuals. Its
    momentum is that of each rank's own values. "output" holds the sums of the node until the sums of all ranks replace
    them.
    """
    levels.check(group.size)
    if group.size == 1 or not any(buffers.counts):
        return assemble("hierarchical", group, buffers, alone(buffers, codec, combine))
    splits = len(levels.nodes) if levels.algorithm == "two_round" else 1
    fine = partition_for_all(buffers.counts, levels.parts * splits, (levels.intra, codec), chunking)
    stages = _Stages(group, buffers, codec, combine, levels, fine, chunking.depth, native=native)
    ops = pipeline(fine.chunks, *stages.in_order())
    return assemble("hierarchical", group, buffers, ops, stages)


def by_level(codec: Codec, intra: Codec) -> tuple[Codec, Codec]:
    """The codecs between nodes and inside a node of several ranks, where own values, with momentum, are encoded."""
    return (codec.codec, replace(codec, codec=intra)) if isinstance(codec, Momentum) else (codec, intra)


_Stage = Callable[[int], Iterator[Op]]


class _Stages:
    """The stages of one rank; each lags an iteration behind the stage whose transfer it waits for."""

    def __init__(
        self,
        group: Group,
        buffers: CallerBuffers,
        codec: Codec,
        combine: Combine,
        levels: Levels,
        fine: Concatenation,
        depth: int,
        *,
        native: bool,
    ) -> None:
        ranks = next(tuple(node) for node in levels.nodes if group.rank in node)
        self._node, self._several = Group(group.rank, ranks), len(ranks) > 1
        index = self._node.index
        self._owners = [node[index] for node in levels.nodes] if index < levels.parts else []
        self._combine, self._levels, self._fine = combine, levels, fine
        self._codec, own = codec, levels.intra
        if self._several:
            self._codec, own = by_level(codec, levels.intra)
        self._first = index * (fine.parts // levels.parts)
        self._target = buffers.target
        self._between = buffers.target if self._several else buffers.source  # the values that go between nodes
        self._coarse = Encoding(Grouped.evenly(fine, levels.parts), levels.intra, buffers.dtype, depth)
        up = Encoding(self._coarse.partition, own, buffers.dtype, depth)
        self._up: ScatterReduce | NativeScatterReduce
        self._down: AllGather | NativeAllGather
        if native and ranks in levels.native_groups():
            self._up = NativeScatterReduce(self._node, up, buffers.source, name="up", op=combine.op)
            self._down = NativeAllGather(self._node, self._coarse, name="down")
        else:
            self._up = ScatterReduce(self._node, up, buffers.source, name="up")
            self._down = AllGather(self._node, self._coarse, name="down", round_number=3)
        self._slot = self._coarse.slots("down.own", 1)
        self._exact = levels.intra.name == "none"
        self._rounds = not self._several and not self._exact and any(len(node) > 1 for node in levels.nodes)
        self._wires: dict[str, Buffer] = {}
        if self._several:
            self._wires |= self._up.buffers() | self._down.buffers()
        elif self._rounds:
            self._wires |= self._slot.buffers()

    def buffers(self) -> dict[str, Buffer]:
        """The wire buffers, after in_order()."""
        return self._wires

    def in_order(self) -> list[tuple[int, _Stage]]:
        """All stages with their lags, in order."""
        stages: list[tuple[int, _Stage]] = []
        lag, one_shot = 0, self._levels.algorithm == "one_shot"
        behind = self._coarse.lag
        if self._several:
            stages += [(0, self._up.send), (behind, self._reduce_in_node)]
            lag = behind
        if len(self._owners) > 1:
            stages += [(lag + late, stage) for late, stage in (self._one_shot if one_shot else self._two_round)(behind)]
        lag += behind * (1 if one_shot else 2)
        if self._rounds:
            stages += [(lag, self._round)]
        if self._several:
            take = partial(self._down.decode, target=self._target)
            stages += [(lag, self._share), (lag, self._down.exchange), (lag + behind, take)]
        return stages

    def _reduce_in_node(self, k: int) -> Iterator[Op]:
        """The sum of the node; if there is no other node, it is the result."""
        whole = self._combine if len(self._owners) == 1 else Combine(self._combine.op)
        return self._up.reduce(k, whole, None, self._target)

    def _share(self, k: int) -> Iterator[Op]:
        return self._down.encode(k, self._target, None if self._exact else self._target)

    def _round(self, k: int) -> Iterator[Op]:
        """On a rank alone in its node: encode and decode the result as the other nodes do, to get the same bits."""
        wire = self._slot.span(k, 0, self._coarse.nbytes(0, k))
        yield from encode_chunk(self._coarse, 0, k, self._target, wire, 3)
        yield from decode_chunk(self._coarse, 0, k, wire, self._target, self._node.rank, 3)

    def _one_shot(self, behind: int) -> list[tuple[int, _Stage]]:
        gather = AllGather(*self._among_owners(1), name="inter", round_number=1, common=True)
        self._wires |= gather.buffers()
        encode_own = partial(gather.encode, source=self._between)
        reduce = partial(gather.reduce, combine=self._combine, target=self._target)
        return [(0, encode_own), (0, gather.exchange), (behind, reduce)]

    def _two_round(self, behind: int) -> list[tuple[int, _Stage]]:
        owners, shards = self._among_owners(len(self._owners))
        scatter = ScatterReduce(owners, shards, self._between, name="inter", round_number=1)
        gather = AllGather(owners, shards.of_sums(self._codec), name="inter.sum", round_number=2)
        self._wires |= scatter.buffers() | gather.buffers()

        def reduce(k: int) -> Iterator[Op]:
            return reduce_and_encode(scatter, gather, k, self._combine, self._target)

        decode_others = partial(gather.decode, target=self._target)
        return [(0, scatter.send), (behind, reduce), (behind, gather.exchange), (2 * behind, decode_others)]

    def _among_owners(self, parts: int) -> tuple[Group, Encoding]:
        """The owners of this rank's part, and the part in ``parts`` shards."""
        part = Grouped(self._fine, tuple((self._first + i,) for i in range(parts)))
        encoding = Encoding(part, self._codec, self._coarse.dtype, self._coarse.depth)
        return Group(self._node.rank, self._owners), encoding
