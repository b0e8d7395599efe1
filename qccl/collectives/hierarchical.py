"""All-reduce in two levels, with one codec between nodes, and another one or none inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from qccl import codecs
from qccl.base import dtypes
from qccl.base.arrays import Values
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec
from qccl.codecs.feedback import Momentum
from qccl.collectives.allreduce import AllReduceSpec, choose_allreduce, shards_of, stages_of
from qccl.collectives.arguments import CodecLike, OpLike, integers, one_of
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import SUM, CallerBuffers, Combine, RankGroup, ranks_by_node
from qccl.collectives.partitions import partition
from qccl.collectives.rounds import (
    AllGatherRound,
    Round,
    ScatterReduce,
    Stage,
    alone,
    assemble,
    decode_all,
    encode_all,
    pipeline,
)
from qccl.collectives.schedule import Schedule
from qccl.collectives.spec import Call, CollectiveSpec, input_and_output
from qccl.collectives.wire import Encoding, Slots

__all__ = ["LAYOUTS", "HierarchicalSpec", "NodeLevels", "by_level", "hierarchical", "intra_of"]

LAYOUTS = ("leader", "sharded")

#: short names of codecs inside nodes
_INTRA = {"float16": "cast:dtype=float16", "bfloat16": "cast:dtype=bfloat16"}


@dataclass(frozen=True, slots=True)
class NodeLevels:
    """The division of the work in two levels.

    Attributes:
        nodes: the ranks of each node; the first ``parts`` of them own parts 0, 1, ... of the vector.
        parts: number of parts. With one, the first rank of each node is its leader, as in ByteGrad. With one for each
            rank of the smallest node, that many network cards work at the same time.
        algorithm: between nodes, "one_shot" or "two_round".
        intra: encodes the values inside nodes.
    """

    nodes: Sequence[Sequence[int]]
    parts: int
    algorithm: str
    intra: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalSpec(CollectiveSpec):
    """Arguments of hierarchical_allreduce; ``node_ids`` has the number of each rank's node.

    With ``inter`` "host", codes between nodes are sent from host memory, also if the values are on a GPU.
    """

    name = "hierarchical_allreduce"
    keeps_state = True
    algorithms = AllReduceSpec.algorithms

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
        layout: str = "sharded",
        node_ids: Sequence[int] = (),
        algorithm: str = "auto",
        inter: str | None = None,
    ) -> Self:
        """See CollectiveSpec."""
        if inter not in (None, "host"):
            raise ArgumentError(
                f"inter={inter!r} cannot be had; between nodes codes go as the communicator's other transfers do "
                f'(None), or from host memory ("host")'
            )
        one_of(layout, LAYOUTS, "layout")
        own: dict[str, Any] = {"op": op, "layout": layout, "algorithm": algorithm, "inter": inter}
        own |= {"intra": intra_of(intra, dtypes.get(shared[1])), "node_ids": integers(node_ids, "node_ids")}
        return cls.checked(*shared, **own)

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """See CollectiveSpec; without ``node_ids`` the nodes are the communicator's."""
        if call.own["node_ids"] is None:
            call.own["node_ids"] = call.node_ids
        return input_and_output(call.find, *call.arrays)

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
        return shown

    def state_owner(self, algorithm: str) -> str:
        """See CollectiveSpec; the text has the algorithm between nodes, and not the schedule's name ``algorithm``."""
        return CollectiveSpec.state_owner(self, self.levels().algorithm)

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        if len(self.node_ids) != size:
            raise ArgumentError(
                f"node_ids has {len(self.node_ids)} numbers; there must be {size}, one for each rank, equal for ranks "
                f"of one node"
            )
        return CollectiveSpec.buffers(self, rank, size, in_place=in_place)

    def choose(self, size: int) -> str:
        """Choose the algorithm between nodes. Two nodes send the same bytes with both, and one_shot quantises once."""
        nodes = ranks_by_node(self.node_ids)
        part = -(-self.count // self._parts(nodes))
        return "one_shot" if len(nodes) <= 2 else choose_allreduce(part, len(nodes), self.dtype, self.codec)

    def _parts(self, nodes: Sequence[Sequence[int]]) -> int:
        return 1 if self.layout == "leader" else min(map(len, nodes))

    def levels(self) -> NodeLevels:
        """The nodes, the parts that have owners in each, and the algorithm that runs between them."""
        nodes = ranks_by_node(self.node_ids)
        return NodeLevels(nodes, self._parts(nodes), self.algorithm_for(len(self.node_ids)), self.intra)

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        combine, here = Combine.of(self.op, group.size), self.node_ids[group.rank]
        made = hierarchical(group, buffers, self.codec, combine, levels=self.levels(), chunking=chunking)
        if self.inter is None:
            return made
        elsewhere = (other for other, node in enumerate(self.node_ids) if node != here)
        return replace(made, staged_peers=frozenset(elsewhere))


def intra_of(intra: CodecLike, dtype: DType) -> Codec:
    """The codec inside nodes. It keeps no state and draws no random numbers; ``intra`` may name a narrower type.

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


def hierarchical(
    group: RankGroup,
    buffers: CallerBuffers,
    codec: Codec,
    combine: Combine = SUM,
    *,
    levels: NodeLevels,
    chunking: ChunkPolicy,
) -> Schedule:
    """Reduce each part to its owner in each node, all-reduce it among the owners, gather all parts in each node.

    Sources: ByteGrad of Bagua, section "Algorithm" (one owner in each node, "leader"); BytePS's design of gradient
    compression, "Design Overview" (two levels).

    ``codec`` encodes the values between nodes, in one or two rounds as in all-reduce; there it has its residuals. Its
    momentum belongs to each rank's own values. "output" holds the sums of the node until the sums of all ranks replace
    them.
    """
    if group.size == 1 or not any(buffers.counts):
        return assemble("hierarchical", group, buffers, alone(buffers, codec, combine))
    nodes, intra, target = levels.nodes, levels.intra, buffers.target
    splits = shards_of(levels.algorithm, len(nodes))
    shards = partition(buffers.counts, levels.parts * splits, (intra, codec), chunking, ramped=True)
    shards_of_part = [range(part * splits, (part + 1) * splits) for part in range(levels.parts)]
    node = RankGroup(group.rank, next(tuple(each) for each in nodes if group.rank in each))
    owners = [each[node.index] for each in nodes] if node.index < levels.parts else []
    between, own = by_level(codec, intra) if node.size > 1 else (codec, intra)

    def encoding(groups: Sequence[Sequence[int]], codec: Codec) -> Encoding:
        return Encoding(shards.grouped(groups), codec, buffers.dtype, chunking.depth)

    up, down = encoding(shards_of_part, own), encoding(shards_of_part, intra)
    stages: list[Stage] = []
    last: list[Stage] = []
    rounds: list[Round | Slots] = []
    lag = 0  # the lag of the next stages, which wait for the stages before
    scatter = ScatterReduce(node, up, buffers.source, name="up")
    gather = AllGatherRound(node, down, name="down", round_number=3)
    if node.size > 1:
        whole = combine if len(owners) == 1 else Combine(combine.op)  # a lone node's sum is the result
        stages += [(0, scatter.send()), (up.lag, scatter.reduce(whole, None, target))]
        rounds, lag = [scatter, gather], up.lag
        keep = None if intra.name == "none" else target
        last = [(0, gather.encode(target, keep)), (0, gather.exchange()), (down.lag, gather.decode(target))]
    elif intra.name != "none" and any(len(each) > 1 for each in nodes):
        # Alone in its node: encode and decode the result as the other nodes do, to get the same bits.
        slots = Slots(down, "down.own", {group.rank: 0})
        rounds, last = [slots], [(0, encode_all(slots, target, 3)), (0, decode_all(slots, target, 3))]
    if len(owners) > 1:
        across = encoding([(shard,) for shard in shards_of_part[node.index]], between)
        source, others = target if node.size > 1 else buffers.source, RankGroup(group.rank, owners)
        found, made = stages_of(
            levels.algorithm, others, across, between, combine, source, target, prefix="inter.", round_number=1
        )
        stages += [(lag + late, stage) for late, stage in found]
        rounds += made
    lag += down.lag * (1 if levels.algorithm == "one_shot" else 2)
    stages += [(lag + late, stage) for late, stage in last]
    return assemble("hierarchical", group, buffers, pipeline(*stages), *rounds)


def by_level(codec: Codec, intra: Codec) -> tuple[Codec, Codec]:
    """The codecs between and inside nodes; momentum moves to the codec that encodes a rank's own values."""
    return (codec.codec, replace(codec, codec=intra)) if isinstance(codec, Momentum) else (codec, intra)
