"""The schedules of a case's ranks, and the verifier's check of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from collective_cases import Case
from schedule_cases import chunks_of

from qccl import collectives as c
from qccl.collectives.analysis import postconditions as expect
from qccl.collectives.analysis.verify import verify
from qccl.collectives.chunks import DEFAULT_DEPTH
from qccl.collectives.schedule import Schedule

SPECS: dict[str, type[c.CollectiveSpec]] = {
    **{"allreduce": c.AllReduceSpec, "coalesced": c.CoalescedSpec, "reduce_scatter": c.ReduceScatterSpec},
    **{"all_gather": c.AllGatherSpec, "all_to_all": c.AllToAllSpec, "broadcast": c.BroadcastSpec},
    **{"reduce": c.ReduceSpec, "hierarchical_allreduce": c.HierarchicalSpec, "peer_exchange": c.PeerExchangeSpec},
}


def sources(case: Case) -> list[list[int]]:
    """By rank of a peer exchange, the ranks that send to it."""
    return [[peer for peer in range(case.ranks) if rank in case.graph[peer]] for rank in range(case.ranks)]


def by_sender(case: Case) -> list[tuple[int, ...]]:
    """The numbers of elements of an all-to-all."""
    return [case.row(rank) for rank in range(case.ranks)]


def spec_of(case: Case, rank: int, *, applied: bool = True) -> c.CollectiveSpec:
    count, own = case.count, {"op": case.op, "algorithm": case.algorithm}
    if case.name == "coalesced":
        own["each"] = case.counts
    elif case.name == "reduce_scatter":
        own = {"op": case.op, "counts": case.counts}
    elif case.name == "all_gather":
        own = {"counts": case.counts}
    elif case.name == "all_to_all":
        sent, received = case.row(rank), [row[rank] for row in by_sender(case)]
        count, own = sum(sent), {"send_counts": sent, "recv_counts": received}
    elif case.name == "broadcast":
        own = {"root": case.root, "algorithm": case.algorithm}
    elif case.name == "reduce":
        own["root"] = case.root
    elif case.name == "hierarchical_allreduce":
        own |= {name: getattr(case, name) for name in ("layout", "node_ids", "intra")}
    elif case.name == "peer_exchange":
        own = {"send_to": case.graph[rank], "receive_from": sources(case)[rank], "applied": applied}
    made = SPECS[case.name].from_arguments(count, case.dtype, case.codec, None, **own)
    in_levels = case.node_ids and case.name in ("reduce_scatter", "all_gather")
    return replace(made, node_ids=case.node_ids) if in_levels else made


def schedules(case: Case, *, depth: int = DEFAULT_DEPTH, applied: bool = True) -> list[Schedule]:
    """The schedules of all ranks; a peer exchange whose ranks have no model is not ``applied``."""
    how = {"in_place": case.in_place, "chunking": chunks_of(case.chunk, depth)}
    return [spec_of(case, rank, applied=applied).schedule(rank, case.ranks, **how) for rank in range(case.ranks)]


def check(case: Case, made: list[Schedule] | None = None) -> None:
    """Verify that the schedules do what the case says."""
    op, scale = ("sum", 1 / case.ranks) if case.op == "avg" else (case.op, 1.0)
    reduced, parts = {"op": op, "scale": scale}, {"counts": case.counts}
    wanted: dict[str, Callable[..., Any]] = {
        "reduce_scatter": partial(expect.reduce_scatter, **parts, **reduced),
        "all_gather": partial(expect.all_gather, **parts),
        "all_to_all": partial(expect.all_to_all, counts=by_sender(case)),
        "broadcast": partial(expect.broadcast, root=case.root),
        "reduce": partial(expect.reduce, root=case.root, **reduced),
        "peer_exchange": partial(expect.exchanged, receive_from=sources(case) if case.graph else []),
    }
    given = {"all_gather": partial(expect.given_parts, **parts), "peer_exchange": expect.given_replicas}
    more = {"given": given[case.name]} if case.name in given else {}
    expected = wanted.get(case.name, partial(expect.allreduce, **reduced))
    verify(schedules(case) if made is None else made, expect=expected, **more)
