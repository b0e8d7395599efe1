"""The verifier accepts the schedules of all-reduce and rejects each kind of broken schedule for its own reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from schedule_cases import CODEC, Mutation, all_ranks, changed, one_shot, places, rejected, shifted, two_round

from qccl.base.dtypes import FLOAT16, FLOAT32
from qccl.codecs import MinMax
from qccl.collectives.allreduce import ALLREDUCE, AllReduceSpec
from qccl.collectives.analysis.verify import Postcondition, allreduce, verify
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.schedule import Buffer, Decode, Encode, Exchange, Op, Reduce, Role, Schedule, Span, Transfer
from qccl.collectives.topology import for_nodes

# -- accepted ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accepts_every_size_to_32_and_some_to_64(no_collector: None) -> None:
    """Beyond 32 powers of two, their neighbours, primes and multiples; beyond 16 only three with several chunks."""
    for size in (*range(1, 33), 33, 37, 45, 48, 61, 63, 64):
        chunks = 3 if size <= 16 or size in (24, 32, 64) else 1
        for name in ALLREDUCE:
            count = chunks * 8 * (size if name == "two_round" else 1) - 3
            verify(all_ranks(name, size, count, chunk_elements=8, depth=2, in_place=size % 2 == 0))


def test_accepts_defaults_at_full_size() -> None:
    for name in ALLREDUCE:
        verify(all_ranks(name, 4, 4 << 20, codec=MinMax()))


# -- rejected ----------------------------------------------------------------------------------------------------------


def on(kind: type, which: int, **changes: Callable[[Any], object]) -> Mutation:
    """Change fields of one of the operations of a kind."""

    def mutate(ops: list[Op]) -> None:
        i = places(ops, kind)[which]
        ops[i] = replace(ops[i], **{name: change(ops[i]) for name, change in changes.items()})

    return mutate


def moved(op: Exchange, by: int = 1, start: int | None = None) -> tuple[Transfer, ...]:
    """Receives of which the first one gets its bytes elsewhere: ``by`` further, or from ``start`` on."""
    first, *rest = op.recvs
    by = by if start is None else start - first.span.start
    return (Transfer(first.peer, shifted(first.span, by)), *rest)


def shortened(op: Exchange) -> tuple[Transfer, ...]:
    first, *rest = op.recvs
    return (Transfer(first.peer, Span(first.span.buffer, first.span.start, first.span.stop - 1)), *rest)


def move(kind: type, which: int, to: Callable[[list[Op]], int]) -> Mutation:
    """Put an operation where another one is, ``to`` of the operations without it."""

    def mutate(ops: list[Op]) -> None:
        op = ops.pop(places(ops, kind)[which])
        ops.insert(to(ops), op)

    return mutate


def first(kind: type) -> Callable[[list[Op]], int]:
    return lambda ops: places(ops, kind)[0]


def more(op: Op) -> Mutation:
    return lambda ops: ops.append(op)


class Fault(NamedTuple):
    """A fault in one rank's schedule of an all-reduce, and the reason why it is rejected."""

    mutate: Mutation
    reason: str
    schedules: Callable[[], list[Schedule]] = two_round


FAULTS = {
    # the transfers do not fit together
    "a missing send": Fault(
        on(Exchange, -1, sends=lambda op: op.sends[:-1]), r"^rank 0.*receive 9 from rank 1 \(12 bytes\) has no send"
    ),
    "a receive of another size": Fault(
        on(Exchange, 0, recvs=shortened),
        r"rank 1, op 1: receive 0 from rank 0 is of 11 bytes, but .* sends 12",
        partial(one_shot, 2),
    ),
    "a transfer to itself": Fault(
        on(Exchange, 0, sends=lambda op: (Transfer(1, op.sends[0].span),)),
        "has a transfer with rank 1; peers are the other ranks",
    ),
    # nothing blocks, but each of two groups alike in form gets the other's bytes
    "two exchanges in swapped order": Fault(
        move(Exchange, 0, lambda ops: places(ops, Exchange)[0] + 1), r"combines elements .* with elements .* of rank 1"
    ),
    # sums
    "a code counted twice": Fault(
        on(Reduce, 1, srcs=lambda op: (op.srcs[0], op.srcs[0])), "^rank 1.*counts rank 0 twice"
    ),
    "the last code counted twice": Fault(
        on(Reduce, 0, srcs=lambda op: (*op.srcs, op.srcs[2])), "counts rank 2 twice", one_shot
    ),
    "added instead of stored, in place": Fault(
        on(Decode, 0, accumulate=lambda op: True), "counts rank 1 twice", partial(two_round, in_place=True)
    ),
    "added instead of stored": Fault(on(Decode, 0, accumulate=lambda op: True), r"reads output\[.*was never written"),
    "a missing contribution": Fault(
        on(Reduce, 0, srcs=lambda op: op.srcs[1:], own_index=lambda op: 0),
        "rank 0: output.* ends without the contribution of rank 0",
        partial(two_round, depth=5),
    ),
    "a code that nothing reads in time": Fault(
        on(Reduce, 0, srcs=lambda op: op.srcs[1:], own_index=lambda op: 0),
        "too early: nothing has yet read a code of elements .* of rank 0",
    ),
    # the same sum in another order of ranks is not the same bits
    "other bits on one rank": Fault(
        on(Reduce, 2, srcs=lambda op: op.srcs[::-1]),
        r"rank 1: elements 16\.\.24 are not the same bits as on rank 0",
        one_shot,
    ),
    "an output that is not written": Fault(
        lambda ops: ops.pop(places(ops, Reduce)[-1]), r"rank 1: .*was never written", one_shot
    ),
    # too early
    "a slot read before it is written": Fault(
        move(Reduce, 0, first(Exchange)), r"^rank 1, op 2: .*reads scatter\.recv\[\d+:\d+\], but .* was never written"
    ),
    # the first code of chunk 2
    "a slot encoded into too early": Fault(
        move(Encode, 4, first(Exchange)), r"writes scatter\.send\[.*too early: .*written by op 0"
    ),
    "a slot gathered into too early": Fault(move(Decode, 0, len), r"writes gather\.recv\[.*too early"),
    # spans
    "a shifted source": Fault(
        on(Encode, 0, src=lambda op: shifted(op.src)),
        r"combines elements .*80\.\.88 of .* with elements 81\.\.89 of rank 1",
    ),
    "a shifted code": Fault(
        on(Encode, 0, wire=lambda op: shifted(op.wire)),
        r"reads scatter\.send\[0:12\], but scatter\.send\[0:1\] was never written",
    ),
    "a shifted receive": Fault(
        on(Exchange, 0, recvs=moved), r"reads scatter\.recv\[\d+:\d+\], but .* was never written"
    ),
    "a receive that ends one byte behind its buffer": Fault(
        on(Exchange, 0, recvs=partial(moved, start=245)), r"reaches outside its buffer: scatter\.recv\[245:257\] of 256"
    ),
    "a shifted decode": Fault(
        on(Decode, 0, dst=lambda op: shifted(op.dst)), r"rank 1: reads output.* but output\[80:81\] was never written"
    ),
    "a shifted sum": Fault(on(Reduce, 0, out=lambda op: shifted(op.out)), "output.*was never written|ends as values"),
    "shifted own values": Fault(
        on(Reduce, 0, own=lambda op: shifted(op.own)), r"combines elements 40\.\.48 .* with elements 41\.\.49 of rank 1"
    ),
    "a shifted source of a sum": Fault(
        on(Reduce, 0, srcs=lambda op: (shifted(op.srcs[0], 1), op.srcs[1])), r"scatter\.recv.* was never written"
    ),
    "one element more": Fault(
        on(Encode, 0, src=lambda op: Span("input", op.src.start, op.src.stop + 1)),
        r"is 12 bytes, but 9 elements of float32 \(input\[80:89\]\) are 24 bytes in MinMax",
    ),
    # inside one operation
    "a receive over a send": Fault(
        on(Exchange, 0, recvs=lambda op: (Transfer(op.recvs[0].peer, shifted(op.sends[0].span, 4)), *op.recvs[1:])),
        "receives into scatter.send while it sends or receives the same",
    ),
    "a code over its source": Fault(
        on(Reduce, 0, wire=lambda op: op.srcs[0]), r"writes scatter\.recv\[.* while it still reads scatter\.recv"
    ),
    "a sum partly over its own values": Fault(
        on(Reduce, 0, out=lambda op: shifted(op.own, 4)), "which overlap in part", partial(two_round, in_place=True)
    ),
    "a sum into the input": Fault(
        on(Reduce, 0, out=lambda op: Span("input", op.out.start, op.out.stop)), "writes input.*, the caller's input"
    ),
    "an unknown buffer": Fault(on(Reduce, 0, out=lambda op: Span("nowhere", 0, 8)), "names a buffer 'nowhere'"),
    "an empty span": Fault(on(Reduce, 0, out=lambda op: Span("output", 8, 8)), r"an empty span, output\[8:8\]"),
    "an own index of no source": Fault(on(Reduce, 0, own_index=lambda op: 3), "own_index 3"),
    "neither own nor out": Fault(on(Reduce, 0, out=lambda op: None, own=lambda op: None), "neither own nor out"),
    "an index inside a bucket": Fault(on(Reduce, 0, index=lambda op: 3), "encodes from element 3 on, inside a bucket"),
    "random numbers used again": Fault(
        on(Reduce, 1, index=lambda op: 40), r"uses the random numbers of elements 40\.\.48 in round 1 again"
    ),
    "another codec": Fault(
        on(Reduce, 0, codec=lambda op: MinMax(4, 8, "stochastic")), "with MinMax.*stochastic.*nearest.* made it"
    ),
    "a code that is not used": Fault(
        more(Encode(CODEC, Span("input", 0, 8), Span("scatter.send", 0, 12), 0, round=2)),
        r"rank 1, op \d+: writes scatter\.send\[0:12\] .* nothing ever reads it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_for_its_own_reason(fault: str) -> None:
    mutate, reason, schedules = FAULTS[fault]
    rejected(changed(schedules(), mutate), reason)


@pytest.mark.parametrize("which", [0, 3, -1])
def test_a_missing_receive(which: int) -> None:
    drop = on(Exchange, which, recvs=lambda op: op.recvs[1:])
    error = rejected(changed(two_round(), drop), r"rank \d, op \d+: send 9 to rank 1 \(12 bytes\) has no receive")
    assert "rank 1 receives only 9 times" in str(error)


def test_a_missing_rank() -> None:
    rejected(two_round()[:2], "the schedule at position 0 of 2 is for rank 0 of 3")


def test_another_result_than_the_wanted_one() -> None:
    good, half = all_ranks("two_round", 2, 64, scale=0.5), partial(allreduce, scale=0.5)
    rejected(changed(good, on(Reduce, 0, scale=lambda op: 1.0)), "wanted is sum x 0.5", expect=half)
    rejected(two_round(), "ends as sum x 1.0; wanted is max x 1.0", expect=partial(allreduce, op="max"))


def by_pairs(schedules: list[Schedule], order: list[tuple[int, int]]) -> list[Schedule]:
    """Each Exchange split into one for each pair of ranks, in the order given."""

    def split(rank: int, exchange: Exchange) -> Iterator[Exchange]:
        for pair in order:
            if rank in pair:
                peer = sum(pair) - rank
                sends = tuple(transfer for transfer in exchange.sends if transfer.peer == peer)
                recvs = tuple(transfer for transfer in exchange.recvs if transfer.peer == peer)
                yield Exchange(sends, recvs)

    result = []
    for schedule in schedules:
        ops = [split(schedule.rank, op) if isinstance(op, Exchange) else (op,) for op in schedule.ops]
        result.append(replace(schedule, ops=tuple(op for some in ops for op in some)))
    return result


def test_swapped_groups_deadlock_under_nccl() -> None:
    """Groups of pairs 01, 12, 02: swapped on rank 0, each rank waits for the next one's other group."""

    def swap(ops: list[Op]) -> None:
        i, j = places(ops, Exchange)[:2]
        ops[i], ops[j] = ops[j], ops[i]

    good = by_pairs(one_shot(), [(0, 1), (1, 2), (0, 2)])
    verify(good)
    bad = changed(good, swap, ranks=(0,))
    verify(bad, rules=("mpi",))  # transfers of one rank are independent there
    error = rejected(bad, "deadlock under NCCL's rules: .*which waits for")
    assert all(f"rank {rank}'s op" in str(error) for rank in range(3))


def test_deadlock_under_mpi() -> None:
    """Each of two ranks sends on to the other what it has not received yet."""

    def forward(rank: int) -> Schedule:
        span = Span("wire", 0, 12)
        ops = (Exchange((), (Transfer(1 - rank, span),)), Exchange((Transfer(1 - rank, span),), ()))
        return Schedule("forward", rank, 2, {"wire": Buffer(12, None, Role.WORK)}, ops)

    rejected([forward(0), forward(1)], "deadlock under MPI's rules: the transfer from rank", expect=lambda _: ())


def test_slot_received_into_too_early() -> None:
    """Round 1 two chunks ahead of round 2 with two slots: chunk 2 arrives where chunk 0 waits to be summed."""

    def run_ahead(ops: list[Op]) -> None:
        reduce, exchange = places(ops, Reduce)[0], places(ops, Exchange)[3]
        assert ops[exchange].recvs[0].span.buffer == "scatter.recv"
        block = ops[exchange - 2 : exchange + 1]  # two encodes and the exchange
        del ops[exchange - 2 : exchange + 1]
        ops[reduce:reduce] = block

    bad = changed(two_round(), run_ahead, ranks=(0, 1, 2))
    error = rejected(bad, r"writes scatter\.recv\[.*too early: nothing has yet read a code of elements")
    assert isinstance(bad[error.rank].ops[error.op_index], Exchange)
    verify(changed(two_round(depth=3), run_ahead, ranks=(0, 1, 2)))  # three slots are enough


def test_sum_encoded_into_too_early() -> None:
    """With one slot, the sum of chunk 1 is made before that of chunk 0 is sent."""

    def reduce_ahead(ops: list[Op]) -> None:
        first, second = places(ops, Reduce)[:2]
        gather = ops.pop(first + 1)
        assert gather.sends[0].span.buffer == "gather.send"
        decodes = ops[first + 1 : first + 3]
        del ops[first + 1 : first + 3]
        ops[second - 2 : second - 2] = [gather, *decodes]

    rejected(changed(two_round(depth=1), reduce_ahead, (0, 1, 2)), r"writes gather\.send\[.*too early")


def test_code_cut_in_two() -> None:
    """A slot that holds the end of one code and the start of another is not a code."""

    def split(ops: list[Op]) -> None:
        on(Encode, 1, wire=lambda op: Span("scatter.send", 12, 24))(ops)
        halves = Span("scatter.send", 1, 13), Span("scatter.send", 12, 24)
        on(Exchange, 0, sends=lambda op: tuple(Transfer(s.peer, h) for s, h in zip(op.sends, halves, strict=True)))(ops)

    one_chunk = all_ranks("two_round", 3, 24, chunk_elements=8)
    rejected(changed(one_chunk, split), r"not one whole code: it holds bytes 1\.\.12 of .*, bytes 0\.\.1 of a code")


def test_decoded_as_another_type() -> None:
    schedules = two_round()
    buffers = dict(schedules[0].buffers) | {"output": Buffer(120, FLOAT16, Role.OUTPUT)}
    rejected([replace(schedules[0], buffers=buffers), *schedules[1:]], "of another length or type")


def test_wants_of_another_collective() -> None:
    """A gather of codes: every rank wants the other's values, from their own first element on."""

    def gather(rank: int) -> Schedule:
        mine, theirs = Span("wire", 0, 12), Span("wire", 64, 76)
        ops = (
            Encode(CODEC, Span("input", 0, 8), mine, rank * 8),
            Exchange((Transfer(1 - rank, mine),), (Transfer(1 - rank, theirs),)),
            Decode(CODEC, theirs, Span("output", 0, 8)),
        )
        values = {"input": Buffer(8, FLOAT32, Role.INPUT), "output": Buffer(8, FLOAT32, Role.OUTPUT)}
        return Schedule("gather", rank, 2, values | {"wire": Buffer(128, None, Role.WORK)}, ops)

    def wanted(schedule: Schedule) -> list[Postcondition]:
        return [Postcondition(Span("output", 0, 8), [1 - schedule.rank])]

    verify([gather(0), gather(1)], expect=wanted)
    rejected([gather(0), gather(1)], "without the contribution of rank 0")


# -- up to 1,024 ranks: 10 minutes and 6 GB, on request ----------------------------------------------------------------


@pytest.mark.every_size
@pytest.mark.parametrize("size", [127, 128, 256, 512, 1000, 1024])
def test_two_levels_with_many_ranks(size: int, no_collector: None) -> None:
    """As a call makes them on nodes of eight ranks; of 127 and 1,000 one node is smaller, or parts differ."""
    spec = AllReduceSpec.from_arguments(2 * size * 1024 - 3, "float32", MinMax(bits=4), None)
    chosen = for_nodes(spec, [rank // 8 for rank in range(size)])
    assert isinstance(chosen, HierarchicalSpec)
    verify([chosen.schedule(rank, size, in_place=rank % 2 == 0) for rank in range(size)])


@pytest.mark.every_size
@pytest.mark.parametrize("size", [127, 128, 256, 512, 1024])
@pytest.mark.parametrize("name", ["one_shot", "two_round"])
def test_one_level_with_many_ranks(name: str, size: int, no_collector: None) -> None:
    verify(all_ranks(name, size, 8 * (size if name == "two_round" else 1) - 3, chunk_elements=8, depth=2))
