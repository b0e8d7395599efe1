"""The ways to make a call, and whether it runs in two levels because that sends less between nodes.

Without it, each rank sends each other rank its codes. If several ranks share a node, the same sums then cross the link
between nodes several times: ``L`` ranks on each of ``m`` nodes send 2 L (m-1)/m E from each node in an all-reduce of
``E`` encoded bytes, and in two levels 2 (m-1)/m E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from qccl.codecs.none import NoCodec
from qccl.collectives.all_gather import AllGatherSpec
from qccl.collectives.allreduce import ALLREDUCE, AllReduceSpec, choose_allreduce
from qccl.collectives.broadcast import TREES, BroadcastSpec
from qccl.collectives.coalesced import CoalescedSpec, HierarchicalCoalescedSpec
from qccl.collectives.hierarchical import HierarchicalSpec, choose_inter
from qccl.collectives.operands import ranks_by_node
from qccl.collectives.partitions import HOP_NBYTES
from qccl.collectives.reduce import REDUCE, ReduceSpec
from qccl.collectives.reduce_scatter import ReduceScatterSpec
from qccl.collectives.spec import CollectiveSpec

__all__ = ["Cost", "costs", "for_nodes", "ways"]

#: names of ways to make a call that are no algorithm's
_ONE_LEVEL, _TWO_LEVELS = "one level", "two levels"


@dataclass(frozen=True, slots=True)
class Cost:
    """What decides between two schedules of a call.

    Attributes:
        nbytes: encoded bytes that the node sends to others that sends most.
        hops: transfers, one after the other, of which the first chunk's way consists.
    """

    nbytes: int
    hops: int

    @property
    def total(self) -> int:
        """In bytes on the link between nodes."""
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
    """How ranks on these nodes can make the call of ``spec``, by name: the one way that it names, or all.

    Empty for a collective whose calls have nothing that "auto" could compare: all_to_all, hierarchical_allreduce and
    peer_exchange. The first way of those that are equally fast is to be preferred.
    """
    is_mixed = 1 < len(ranks_by_node(node_ids)) < len(node_ids)
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        found: dict[str, CollectiveSpec] = {_ONE_LEVEL: spec}
        return found | ({_TWO_LEVELS: _in_levels(spec, tuple(node_ids))} if is_mixed else {})
    known = next((names for kind, names in _ALGORITHMS.items() if isinstance(spec, kind)), ())
    named = getattr(spec, "algorithm", "auto")
    if known and named != "auto":
        return {named: spec}
    found = {name: replace(spec, algorithm=name) for name in known}  # type: ignore[call-arg]
    if isinstance(spec, AllReduceSpec) and is_mixed:
        found[_TWO_LEVELS] = _in_levels(spec, tuple(node_ids))
    return found


#: the algorithms of the collectives that name one
_ALGORITHMS: dict[type[CollectiveSpec], tuple[str, ...]] = {
    AllReduceSpec: tuple(ALLREDUCE),
    BroadcastSpec: TREES,
    ReduceSpec: tuple(REDUCE),
}


def _in_levels(spec: CollectiveSpec, nodes: tuple[int, ...]) -> CollectiveSpec:
    """The spec with which the call runs in two levels."""
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        return replace(spec, node_ids=nodes)
    given: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
    given |= {"intra": NoCodec(), "layout": "sharded", "node_ids": nodes}
    return HierarchicalCoalescedSpec(**given) if isinstance(spec, CoalescedSpec) else HierarchicalSpec(**given)


def costs(spec: CollectiveSpec, node_ids: Sequence[int]) -> tuple[Cost, Cost] | None:
    """The cost of a call in one level, and in two; None if there is nothing to choose."""
    nodes = ranks_by_node(node_ids)
    if not 1 < len(nodes) < len(node_ids):
        return None
    if isinstance(spec, AllReduceSpec) and spec.algorithm == "auto":
        return _of_allreduce(spec, nodes)
    if isinstance(spec, ReduceScatterSpec | AllGatherSpec):
        return _of_parts(spec, nodes)
    return None


def _of_allreduce(spec: AllReduceSpec, nodes: Sequence[Sequence[int]]) -> tuple[Cost, Cost]:
    size, n = sum(map(len, nodes)), len(nodes)
    first, second = (codec.encoded_nbytes(spec.count, spec.dtype) for codec in spec.codec.rounds)
    pairs = max(len(node) * (size - len(node)) for node in nodes)
    if choose_allreduce(spec.count, size, spec.dtype, spec.codec) == "one_shot":
        flat = Cost(pairs * first, 1)
    else:
        flat = Cost(pairs * (first + second) // size, 2)
    if choose_inter(spec.count, n, min(map(len, nodes)), spec.dtype, spec.codec) == "one_shot":
        return flat, Cost((n - 1) * first, 3)
    return flat, Cost((n - 1) * (first + second) // n, 4)


def _of_parts(spec: ReduceScatterSpec | AllGatherSpec, nodes: Sequence[Sequence[int]]) -> tuple[Cost, Cost]:
    size, codec = sum(map(len, nodes)), spec.codec.rounds[isinstance(spec, AllGatherSpec)]
    nbytes = [codec.encoded_nbytes(count, spec.dtype) for count in spec.lengths(size)]
    total, flat, levels = sum(nbytes), 0, 0
    for node in nodes:
        own = sum(nbytes[rank] for rank in node)
        if isinstance(spec, AllGatherSpec):
            flat, levels = max(flat, (size - len(node)) * own), max(levels, (len(nodes) - 1) * own)
        else:
            flat, levels = max(flat, len(node) * (total - own)), max(levels, total - own)
    return Cost(flat, 1), Cost(levels, 2)
