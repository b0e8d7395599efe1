"""Says in words how ranks make a call, and why so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qccl.chunks import ChunkPolicy
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.operands import ranks_by_node
from qccl.collectives.partitions import HOP_NBYTES
from qccl.collectives.spec import CollectiveSpec
from qccl.collectives.topology import Cost, costs
from qccl.schedule import Encode, Exchange, Reduce, Schedule

__all__ = ["crossing_nbytes", "explain", "sent_between_nodes"]


def explain(
    asked: CollectiveSpec, spec: CollectiveSpec, node_ids: Sequence[int], rank: int, chunking: ChunkPolicy, reason: str
) -> str:
    """The algorithm, the chunks, the bytes between nodes, and the reason, a sentence each.

    ``asked`` is the call as the program made it, ``spec`` is how the ranks make it, ``node_ids`` has the number of each
    rank's node, and ``rank`` is the one whose chunks and whose node's bytes are meant. ``reason`` is why ``spec`` was
    chosen; empty: by the rule of for_nodes().
    """
    nodes = ranks_by_node(node_ids)
    schedules = {
        each: spec.schedule(each, len(node_ids), in_place=False, chunking=chunking)
        for node in nodes
        if rank in node
        for each in node
    }
    sent = sum(sent_between_nodes(schedule, node_ids) for schedule in schedules.values())
    return "\n".join(
        [
            f"{spec.text()}",
            f"{_nodes(nodes)}: {_algorithm(spec, schedules[rank])}, {reason or _reason(asked, nodes, node_ids)}.",
            f"{_chunks(schedules[rank])} The node of rank {rank} sends {sent:,} bytes to other nodes in a call.",
        ]
    )


def sent_between_nodes(schedule: Schedule, node_ids: Sequence[int]) -> int:
    """Bytes that a schedule's rank sends to ranks of other nodes."""
    here = node_ids[schedule.rank]
    sends = (send for op in schedule.ops if isinstance(op, Exchange) for send in op.sends)
    return sum(len(send.span) for send in sends if node_ids[send.peer] != here)


def crossing_nbytes(spec: CollectiveSpec, node_ids: Sequence[int]) -> int:
    """Bytes that the node of rank 0 sends to others, or receives if these are more; rank 0 alone if all share a node.

    No other node moves more if the parts of the vector are equal and rank 0 is the root.
    """
    nodes = tuple(node_ids) if len(set(node_ids)) > 1 else tuple(range(len(node_ids)))
    sent = received = 0
    for rank in (rank for rank, node in enumerate(nodes) if node == nodes[0]):
        schedule = spec.schedule(rank, len(nodes), in_place=False)
        sent += sent_between_nodes(schedule, nodes)
        recvs = (recv for op in schedule.ops if isinstance(op, Exchange) for recv in op.recvs)
        received += sum(len(recv.span) for recv in recvs if nodes[recv.peer] != nodes[0])
    return max(sent, received)


def _nodes(nodes: Sequence[Sequence[int]]) -> str:
    """For example "2 nodes of 8 ranks"."""
    sizes = Counter(map(len, nodes))
    parts = (f"{n} node{'s' * (n > 1)} of {size} rank{'s' * (size > 1)}" for size, n in sorted(sizes.items()))
    return " and ".join(parts)


def _algorithm(spec: CollectiveSpec, schedule: Schedule) -> str:
    if isinstance(spec, HierarchicalSpec):
        return f"two levels, with {spec.levels().algorithm} between nodes"
    if getattr(spec, "node_ids", ()):
        return "two levels"
    return f"one level, {schedule.name}"


def _reason(asked: CollectiveSpec, nodes: Sequence[Sequence[int]], node_ids: Sequence[int]) -> str:
    if isinstance(asked, HierarchicalSpec):
        return "as the call says"
    if len(nodes) == 1:
        return "because there are no other nodes"
    if len(nodes) == len(node_ids):
        return "because no ranks share a node"
    found = costs(asked, node_ids)
    if found is None:
        named = getattr(asked, "algorithm", "auto") != "auto"
        return "as the call says" if named else "because this collective has no other"
    flat, levels = found
    compared = f"one level has {_cost(flat)}, two have {_cost(levels)}"
    return f"because {compared}, and a hop counts as {HOP_NBYTES:,} bytes"


def _cost(cost: Cost) -> str:
    return f"{cost.hops} hop{'s' * (cost.hops > 1)} and {cost.nbytes:,} bytes from the busiest node"


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
