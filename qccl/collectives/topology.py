"""Decides, and explains, whether a call runs in two levels because that sends less between nodes.

In one level each rank sends each other rank its codes. If several ranks share a node, the same sums then cross the link
between nodes several times: ``L`` ranks on each of ``m`` nodes send 2 L (m-1)/m E from each node in an all-reduce of
``E`` encoded bytes, and in two levels 2 (m-1)/m E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from qccl.codecs.none import NoCodec
from qccl.collectives.all_gather import AllGatherSpec
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.chunks import NETWORK, ChunkPolicy
from qccl.collectives.coalesced import CoalescedSpec, HierarchicalCoalescedSpec
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.operands import ranks_by_node
from qccl.collectives.partitions import HOP_NBYTES
from qccl.collectives.reduce_scatter import ReduceScatterSpec
from qccl.collectives.schedule import Encode, Exchange, Reduce, Schedule
from qccl.collectives.spec import CollectiveSpec

__all__ = ["Cost", "costs", "crossing_nbytes", "explain", "for_nodes", "ways"]

#: names of the ways to make a call that have no algorithm's name
_ONE_LEVEL, _TWO_LEVELS = "one level", "two levels"


@dataclass(frozen=True, slots=True)
class Cost:
    """The amounts by which one of two schedules of a call is chosen.

    Attributes:
        nbytes: encoded bytes sent to other nodes by the node that sends most.
        hops: transfers, one after the other, of the first chunk.
    """

    nbytes: int
    hops: int

    @property
    def total(self) -> int:
        """The cost in bytes on the link between nodes."""
        return self.nbytes + self.hops * HOP_NBYTES


def for_nodes(spec: CollectiveSpec, node_ids: Sequence[int]) -> CollectiveSpec:
    """The spec with which ranks on these nodes make the call of ``spec``: in two levels, or ``spec`` itself.

    ``node_ids`` has the number of each rank's node. Calls that name an algorithm keep it. With equal arguments all
    ranks get the same spec.
    """
    found = costs(spec, node_ids)
    if found is None or found[1].total >= found[0].total:
        return spec
    return _in_levels(spec, tuple(node_ids))


def ways(spec: CollectiveSpec, node_ids: Sequence[int]) -> dict[str, CollectiveSpec]:
    """The ways in which ranks on these nodes can make the call of ``spec``, by name: the one that it names, or all.

    Empty for collectives with nothing that "auto" could compare: all_to_all, hierarchical_allreduce and peer_exchange.
    If ways are equally fast, the first one is preferred.
    """
    is_mixed = 1 < len(ranks_by_node(node_ids)) < len(node_ids)
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        found: dict[str, CollectiveSpec] = {_ONE_LEVEL: spec}
        return found | ({_TWO_LEVELS: _in_levels(spec, tuple(node_ids))} if is_mixed else {})
    if isinstance(spec, HierarchicalSpec):
        return {}
    named = getattr(spec, "algorithm", "auto")
    if named != "auto":
        return {named: spec}
    found = {name: replace(spec, algorithm=name) for name in spec.algorithms}  # type: ignore[call-arg]
    if isinstance(spec, AllReduceSpec) and is_mixed:
        found[_TWO_LEVELS] = _in_levels(spec, tuple(node_ids))
    return found


def _in_levels(spec: CollectiveSpec, nodes: tuple[int, ...]) -> CollectiveSpec:
    """The spec with which the call runs in two levels."""
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        return replace(spec, node_ids=nodes)
    given: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
    given |= {"intra": NoCodec(), "layout": "sharded", "node_ids": nodes}
    return HierarchicalCoalescedSpec(**given) if isinstance(spec, CoalescedSpec) else HierarchicalSpec(**given)


def costs(spec: CollectiveSpec, node_ids: Sequence[int]) -> tuple[Cost, Cost] | None:
    """The cost of a call in one level, and in two; None if there is nothing to choose.

    Formulas give the bytes that Schedule.moved_nbytes() would count, because a first call has no time to make the
    schedules of a node's ranks.
    """
    nodes, size = ranks_by_node(node_ids), len(node_ids)
    if not 1 < len(nodes) < size:
        return None
    alone = [[node] for node in range(len(nodes))]  # in two levels a node sends what one rank would
    if isinstance(spec, AllReduceSpec) and spec.algorithm == "auto":
        first, second = (codec.encoded_nbytes(spec.count, spec.dtype) for codec in spec.codec.rounds)
        flat, inter = (each.algorithm_for(size) for each in (spec, _in_levels(spec, tuple(node_ids))))
        return _of_allreduce(flat, nodes, first, second, 0), _of_allreduce(inter, alone, first, second, 2)
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        gathers = isinstance(spec, AllGatherSpec)
        nbytes = [spec.codec.rounds[gathers].encoded_nbytes(count, spec.dtype) for count in spec.lengths(size)]
        together = [sum(nbytes[rank] for rank in node) for node in nodes]
        if gathers:
            return Cost(_busiest(nodes, [], nbytes), 1), Cost(_busiest(alone, [], together), 2)
        return Cost(_busiest(nodes, nbytes, []), 1), Cost(_busiest(alone, together, []), 2)
    return None


def _of_allreduce(algorithm: str, nodes: Sequence[Sequence[int]], first: int, second: int, hops: int) -> Cost:
    size = sum(map(len, nodes))
    if algorithm == "one_shot":
        return Cost(_busiest(nodes, [], [first] * size), hops + 1)
    return Cost(_busiest(nodes, [first] * size, [second] * size) // size, hops + 2)


def _busiest(nodes: Sequence[Sequence[int]], scattered: Sequence[int], gathered: Sequence[int]) -> int:
    """Bytes sent to other nodes by the node that sends most.

    Each rank sends ``scattered[r]`` bytes to every rank ``r`` of other nodes, and ``r`` sends ``gathered[r]`` to it.
    """
    size, total = sum(map(len, nodes)), sum(scattered)

    def sent(node: Sequence[int]) -> int:
        scattering = len(node) * (total - sum([scattered[rank] for rank in node])) if scattered else 0
        return scattering + ((size - len(node)) * sum([gathered[rank] for rank in node]) if gathered else 0)

    return max(map(sent, nodes))


def crossing_nbytes(spec: CollectiveSpec, node_ids: Sequence[int]) -> int:
    """Bytes that the node of rank 0 sends to others or receives, whichever is more; of rank 0 if all share a node.

    No other node moves more if the parts of the vector are equal and rank 0 is the root.
    """
    nodes = node_ids if len(set(node_ids)) > 1 else range(len(node_ids))
    moved = [schedule.moved_nbytes(nodes) for schedule in _schedules(spec, nodes, 0, NETWORK).values()]
    return max(map(sum, zip(*moved, strict=True)))


def _schedules(spec: CollectiveSpec, node_ids: Sequence[int], rank: int, chunking: ChunkPolicy) -> dict[int, Schedule]:
    """The schedules of all ranks of one rank's node."""
    mates = [mate for mate, node in enumerate(node_ids) if node == node_ids[rank]]
    return {mate: spec.schedule(mate, len(node_ids), in_place=False, chunking=chunking) for mate in mates}


def explain(
    asked: CollectiveSpec, spec: CollectiveSpec, node_ids: Sequence[int], rank: int, chunking: ChunkPolicy, reason: str
) -> str:
    """Explain a call in words: the algorithm and the reason, the chunks, and the bytes between nodes.

    ``asked``: the call as the program made it; ``spec``: as the ranks make it; ``node_ids``: the number of each rank's
    node; ``rank``: the rank whose chunks and whose node's bytes are told. ``reason``: why ``spec`` was chosen; empty:
    by the rule of for_nodes().
    """
    node_ids = getattr(spec, "node_ids", ()) or node_ids  # hierarchical_allreduce may name other nodes
    schedules = _schedules(spec, node_ids, rank, chunking)
    sent = sum(schedule.moved_nbytes(node_ids)[0] for schedule in schedules.values())
    nodes = Counter(map(len, ranks_by_node(node_ids)))
    shown = " and ".join(f"{_number(n, 'node')} of {_number(size, 'rank')}" for size, n in sorted(nodes.items()))
    if isinstance(spec, HierarchicalSpec):
        algorithm = f"two levels, with {spec.levels().algorithm} between nodes"
    else:
        algorithm = "two levels" if getattr(spec, "node_ids", ()) else f"one level, {schedules[rank].name}"
    return (
        f"{spec.text()}\n{shown}: {algorithm}, {reason or _reason(asked, node_ids)}.\n{_chunks(schedules[rank])} "
        f"The node of rank {rank} sends {sent:,} bytes to other nodes in a call."
    )


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def _reason(asked: CollectiveSpec, node_ids: Sequence[int]) -> str:
    if isinstance(asked, HierarchicalSpec):
        return "as the call says"
    if len(set(node_ids)) == 1:
        return "because there are no other nodes"
    if len(set(node_ids)) == len(node_ids):
        return "because no ranks share a node"
    found = costs(asked, node_ids)
    if found is None:
        named = getattr(asked, "algorithm", "auto") != "auto"
        return "as the call says" if named else "because this collective has no other"
    flat, levels = (f"{_number(cost.hops, 'hop')} and {cost.nbytes:,} bytes from the busiest node" for cost in found)
    return f"because one level has {flat}, two have {levels}, and a hop counts as {HOP_NBYTES:,} bytes"


def _chunks(schedule: Schedule) -> str:
    encoded = [len(op.src) for op in schedule.ops if isinstance(op, Encode)]
    encoded += [len(op.own or op.out or ()) for op in schedule.ops if isinstance(op, Reduce) and op.wire is not None]
    if not encoded:
        return "Nothing is encoded."
    sends = [send for op in schedule.ops if isinstance(op, Exchange) for send in op.sends]
    largest = max((len(send.span) for send in sends), default=0)
    return (
        f"A chunk has at most {max(encoded):,} elements; rank {schedule.rank} sends {len(sends):,} messages of at most "
        f"{largest:,} bytes."
    )
