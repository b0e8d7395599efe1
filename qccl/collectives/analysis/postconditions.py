"""The verifier's pre- and postconditions: the contents of buffers before and after each collective.

Part r of a vector has ``counts[r]`` elements and belongs to rank r.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from qccl.collectives.analysis.symbolic import Postcondition, Precondition
from qccl.collectives.schedule import Role, Schedule, Span, buffer_name

__all__ = ["all_gather", "all_to_all", "allreduce", "broadcast", "exchanged", "given_parts", "given_replicas"]
__all__ += ["reduce", "reduce_scatter"]


def allreduce(schedule: Schedule, *, op: str = "sum", scale: float = 1.0) -> Iterator[Postcondition]:
    """All outputs together, as one vector, hold the combination of all ranks."""
    first = 0
    for name, buffer in schedule.buffers.items():
        if buffer.role is Role.OUTPUT:
            yield Postcondition(Span(name, 0, buffer.size), range(schedule.size), first, op, scale)
            first += buffer.size


def reduce_scatter(
    schedule: Schedule, *, counts: Sequence[int], op: str = "sum", scale: float = 1.0
) -> Iterator[Postcondition]:
    """The own part of the result, in "output"; in place, "output" is the whole vector."""
    first = sum(counts[: schedule.rank])
    start = 0 if "input" in schedule.buffers else first
    yield Postcondition(Span("output", start, start + counts[schedule.rank]), range(schedule.size), first, op, scale)


def all_gather(schedule: Schedule, *, counts: Sequence[int]) -> Iterator[Postcondition]:
    """Every rank's part, in rank order."""
    for rank, count in enumerate(counts):
        first = sum(counts[:rank])
        yield Postcondition(Span("output", first, first + count), (rank,), first)


def given_parts(schedule: Schedule, *, counts: Sequence[int]) -> Iterator[Precondition]:
    """Before an all-gather: the own part, in "input", or in place in "output"."""
    if "input" in schedule.buffers:
        yield Precondition("input", (schedule.rank,), sum(counts[: schedule.rank]))
    else:
        yield Precondition("output", (schedule.rank,))


def all_to_all(schedule: Schedule, *, counts: Sequence[Sequence[int]]) -> Iterator[Postcondition]:
    """The parts that all ranks send to this one; rank r sends ``counts[r][j]`` elements to rank j."""
    start = 0
    for rank, parts in enumerate(counts):
        first, count = sum(parts[: schedule.rank]), parts[schedule.rank]
        yield Postcondition(Span("output", start, start + count), (rank,), first)
        start += count


def broadcast(schedule: Schedule, *, root: int) -> Iterator[Postcondition]:
    """The root's values."""
    yield Postcondition(Span("output", 0, schedule.buffers["output"].size), (root,))


def reduce(schedule: Schedule, *, root: int, op: str = "sum", scale: float = 1.0) -> Iterator[Postcondition]:
    """The sum, minimum or maximum of all ranks' values, times ``scale``, on the root; nothing on the others."""
    if schedule.rank == root:
        yield from allreduce(schedule, op=op, scale=scale)


def given_replicas(schedule: Schedule) -> Iterator[Precondition]:
    """Before a peer exchange: the values to send, and models that equal their replicas on other ranks."""
    yield Precondition("input", (schedule.rank,))
    for name, buffer in schedule.buffers.items():
        if buffer.role is Role.OUTPUT:  # "applied", or a replica
            yield Precondition(name, (schedule.size + (schedule.rank if buffer.index is None else buffer.index),))


def exchanged(schedule: Schedule, *, receive_from: Sequence[Collection[int]]) -> Iterator[Postcondition]:
    """After a peer exchange: each rank's code is added to its model and, with the same bits, to replicas."""
    count, n = schedule.buffers["input"].size, schedule.size
    if "applied" in schedule.buffers:
        yield Postcondition(Span("applied", 0, count), (schedule.rank, n + schedule.rank))
    for peer in receive_from[schedule.rank]:
        yield Postcondition(Span(buffer_name("replica", peer), 0, count), (peer, n + peer))
