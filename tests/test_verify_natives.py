"""The verifier on schedules with the engine's own collectives: hierarchical, sharded, on several groups."""

from __future__ import annotations

from dataclasses import replace

from schedule_cases import CODEC, rejected

from qccl.analysis.verify import verify
from qccl.dtypes import FLOAT32
from qccl.schedule import Buffer, Encode, Exchange, Leg, Native, Op, Reduce, Role, Schedule, Span


def hierarchical(rank: int, *, swap: bool = False, root: int = 0) -> Schedule:
    """Two nodes of two ranks: reduce to the leader, leaders exchange codes, broadcast."""
    node, leader = rank // 2, rank // 2 * 2
    inside = f"node {node}"
    values, out = Span("input", 0, 16), Span("output", 0, 16)
    total, mine, theirs = Span("node", 0, 16), Span("wire", 0, 24), Span("wire", 64, 88)
    ops: list[Op] = [Native("reduce", inside, values, total if rank == leader else None)]
    if rank == leader:
        peer = 2 - leader
        ops += [
            Encode(CODEC, total, mine, 0),
            Exchange((Leg(peer, mine),), (Leg(peer, theirs),)),
            Reduce(CODEC, (mine, theirs) if node == 0 else (theirs, mine), None, 0, None, out),
        ]
    ops.append(Native("broadcast", inside, out if rank == leader + root else None, out, root=root))
    if swap:
        ops.reverse()
    buffers = {
        "input": Buffer(16, FLOAT32, Role.INPUT),
        "output": Buffer(16, FLOAT32, Role.OUTPUT),
        "node": Buffer(16, FLOAT32, Role.WORK),
        "wire": Buffer(128, None, Role.WORK),
    }
    return Schedule("hierarchical", rank, 4, buffers, tuple(ops), {inside: (leader, leader + 1)})


def test_natives() -> None:
    good = [hierarchical(rank) for rank in range(4)]
    verify(good)
    rejected([*good[:3], replace(good[3], ops=good[3].ops[:1])], "Native 1 of group 'node 1' is missing on rank 3")
    rejected([*good[:3], hierarchical(3, root=1)], r"is broadcast \(sum, root 1\), on rank 2 broadcast \(sum, root 0\)")
    rejected([*good[:3], hierarchical(3, swap=True)], "is broadcast .*, on rank 2 reduce")
    rejected([*good[:3], replace(good[3], groups={})], "this rank or the root is not in it")


def sharded(rank: int, order: tuple[str, ...] = ("reduce_scatter", "all_gather")) -> Schedule:
    """All-reduce of three ranks by the engine: reduce-scatter, then all-gather."""
    shard = Span("shard", 0, 5)
    ops = {
        "reduce_scatter": Native("reduce_scatter", "all", Span("input", 0, 15), shard),
        "all_gather": Native("all_gather", "all", shard, Span("output", 0, 15)),
    }
    buffers = {
        "input": Buffer(15, FLOAT32, Role.INPUT),
        "output": Buffer(15, FLOAT32, Role.OUTPUT),
        "shard": Buffer(5, FLOAT32, Role.WORK),
    }
    return Schedule("sharded", rank, 3, buffers, tuple(ops[kind] for kind in order), {"all": (0, 1, 2)})


def test_natives_of_shards() -> None:
    verify([sharded(rank) for rank in range(3)])
    rejected([sharded(rank, ("all_gather", "reduce_scatter")) for rank in range(3)], "reads shard.*was never written")


def two_groups(rank: int, order: tuple[str, str]) -> Schedule:
    """The same all-reduce on two sub-communicators of both ranks."""
    whole = {"a": Span("output", 0, 4), "b": Span("output", 4, 8)}
    ops = tuple(Native("allreduce", name, whole[name], whole[name]) for name in order)
    buffers = {"output": Buffer(8, FLOAT32, Role.OUTPUT)}
    return Schedule("two groups", rank, 2, buffers, ops, {"a": (0, 1), "b": (0, 1)})


def test_natives_in_swapped_order() -> None:
    verify([two_groups(0, ("a", "b")), two_groups(1, ("a", "b"))])
    bad = [two_groups(0, ("a", "b")), two_groups(1, ("b", "a"))]
    verify(bad, rules=("mpi",))
    rejected(bad, "deadlock under NCCL's rules: .*Native of group")
