"""The verifier accepts the schedules of all-reduce and rejects each kind of broken schedule for its own reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from schedule_cases import CODEC, Mutation, all_ranks, changed, one_shot, places, rejected, shifted, two_round

from qccl.analysis.verify import Postcondition, allreduce, verify
from qccl.codecs import MinMax, NoCodec
from qccl.collectives.allreduce import ALLREDUCE
from qccl.dtypes import DTYPES, FLOAT16, FLOAT32
from qccl.schedule import (
    Buffer,
    Decode,
    Encode,
    Exchange,
    Op,
    Reduce,
    Role,
    Schedule,
    Span,
    Transfer,
)

# -- accepted ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accepts_every_size_to_32_and_some_to_64(no_collector: None) -> None:
    """Beyond 32 powers of two, their neighbours, primes and multiples; beyond 16 only three with several chunks."""
    for size in (*range(1, 33), 33, 37, 45, 48, 61, 63, 64):
        chunks = 3 if size <= 16 or size in (24, 32, 64) else 1
        for name in ALLREDUCE:
            count = chunks * 8 * (size if name == "two_round" else 1) - 3
            verify(all_ranks(name, size, count, chunk_elements=8, depth=2, in_place=size % 2 == 0))


def test_accepts_random_configurations() -> None:
    draw = random.Random(20)
    for _ in range(150):
        size, bucket = draw.randint(1, 9), draw.choice([8, 16, "shard"])
        codec = draw.choice([MinMax(draw.randint(1, 8), bucket), MinMax(2, 16, "stochastic"), NoCodec()])
        scale, op = draw.choice([(1.0, "sum"), (1.0 / size, "sum"), (1.0, "min"), (1.0, "max")])
        schedules = all_ranks(
            draw.choice(list(ALLREDUCE)),
            size,
            draw.choice([0, 1, 2, 7, 8, 9, size, draw.randint(0, 5000)]),
            codec=codec,
            dtype=draw.choice(DTYPES),
            op=op,
            scale=scale,
            in_place=draw.random() < 0.5,
            chunk_elements=draw.choice([None, 1, 8, 100, 1024]),
            depth=draw.randint(1, 5),
        )
        verify(schedules, expect=partial(allreduce, op=op, scale=scale))


def test_accepts_defaults_at_full_size() -> None:
    for name in ALLREDUCE:
        verify(all_ranks(name, 4, 4 << 20, codec=MinMax()))


# -- rejected: the transfers do not fit together -----------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 3, -1])
def test_missing_receive(which: int) -> None:
    def drop(ops: list[Op]) -> None:
        i = places(ops, Exchange)[which]
        ops[i] = replace(ops[i], recvs=ops[i].recvs[1:])

    error = rejected(changed(two_round(), drop), r"rank \d, op \d+: send 9 to rank 1 \(12 bytes\) has no receive")
    assert "rank 1 receives only 9 times" in str(error)


def test_missing_send() -> None:
    def drop(ops: list[Op]) -> None:
        i = places(ops, Exchange)[-1]
        ops[i] = replace(ops[i], sends=ops[i].sends[:-1])

    assert rejected(changed(two_round(), drop), r"receive 9 from rank 1 \(12 bytes\) has no send").rank == 0


def test_receive_of_another_size() -> None:
    def shorten(ops: list[Op]) -> None:
        i = places(ops, Exchange)[0]
        transfer = ops[i].recvs[0]
        ops[i] = replace(
            ops[i],
            recvs=(Transfer(transfer.peer, Span(transfer.span.buffer, transfer.span.start, transfer.span.stop - 1)),),
        )

    rejected(changed(one_shot(2), shorten), r"rank 1, op 1: receive 0 from rank 0 is of 11 bytes, but .* sends 12")


def test_missing_rank() -> None:
    rejected(two_round()[:2], "the schedule at position 0 of 2 is for rank 0 of 3")


# -- rejected: groups in swapped order ---------------------------------------------------------------------------------


def test_swapped_groups_deliver_the_wrong_chunk() -> None:
    """Two groups alike in form: nothing blocks, but each gets the other's bytes."""

    def swap(ops: list[Op]) -> None:
        first, second = places(ops, Exchange)[:2]
        ops.insert(second, ops.pop(first))

    rejected(changed(two_round(), swap), r"combines elements .* with elements .* of rank 1")


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
    for rank in range(3):
        assert f"rank {rank}'s op" in str(error)


def forward(rank: int) -> Schedule:
    """Send on to the other of two ranks what was received from it."""
    span = Span("wire", 0, 12)
    ops = (Exchange((), (Transfer(1 - rank, span),)), Exchange((Transfer(1 - rank, span),), ()))
    return Schedule("forward", rank, 2, {"wire": Buffer(12, None, Role.WORK)}, ops)


def test_deadlock_under_mpi() -> None:
    """Each rank sends data that it has not received yet."""
    rejected([forward(0), forward(1)], "deadlock under MPI's rules: the transfer from rank", expect=lambda _: ())


# -- rejected: sums ----------------------------------------------------------------------------------------------------


def on_reduce(which: int, **changes: Callable[[Reduce], object]) -> Mutation:
    def mutate(ops: list[Op]) -> None:
        i = places(ops, Reduce)[which]
        ops[i] = replace(ops[i], **{name: change(ops[i]) for name, change in changes.items()})

    return mutate


def test_double_sum() -> None:
    twice = on_reduce(1, srcs=lambda op: (op.srcs[0], op.srcs[0]))
    assert rejected(changed(two_round(), twice), "counts rank 0 twice").rank == 1
    rejected(changed(one_shot(), on_reduce(0, srcs=lambda op: (*op.srcs, op.srcs[2]))), "counts rank 2 twice")


def test_accumulated_instead_of_stored() -> None:
    def accumulate(ops: list[Op]) -> None:
        i = places(ops, Decode)[0]
        ops[i] = replace(ops[i], accumulate=True)

    rejected(changed(two_round(in_place=True), accumulate), "counts rank 1 twice")
    rejected(changed(two_round(), accumulate), r"reads output\[.*was never written")


def test_missing_contribution() -> None:
    without = on_reduce(0, srcs=lambda op: op.srcs[1:], own_index=lambda op: 0)
    rejected(changed(two_round(depth=5), without), "rank 0: output.* ends without the contribution of rank 0")
    rejected(changed(two_round(), without), "too early: nothing has yet read a code of elements .* of rank 0")


def test_forgotten_scale() -> None:
    good = all_ranks("two_round", 2, 64, scale=0.5)
    rejected(
        changed(good, on_reduce(0, scale=lambda op: 1.0)), "wanted is sum x 0.5", expect=partial(allreduce, scale=0.5)
    )


def test_another_operation() -> None:
    rejected(two_round(), "ends as sum x 1.0; wanted is max x 1.0", expect=partial(allreduce, op="max"))


def test_other_bits_on_one_rank() -> None:
    """The same sum in another order of ranks is not the same bits."""
    reverse = on_reduce(2, srcs=lambda op: op.srcs[::-1])
    rejected(changed(one_shot(), reverse), r"rank 1: elements 16\.\.24 are not the same bits as on rank 0")


def test_unwritten_output() -> None:
    rejected(changed(one_shot(), lambda ops: ops.pop(places(ops, Reduce)[-1])), r"rank 1: .*was never written")


# -- rejected: too early ----------------------------------------------------------------------------------------------


def test_read_of_unwritten_span() -> None:
    def reduce_first(ops: list[Op]) -> None:
        ops.insert(places(ops, Exchange)[0], ops.pop(places(ops, Reduce)[0]))

    error = rejected(changed(two_round(), reduce_first), r"reads scatter\.recv\[\d+:\d+\], but .* was never written")
    assert (error.rank, error.op_index) == (1, 2)


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


def test_slot_encoded_into_too_early() -> None:
    def encode_ahead(ops: list[Op]) -> None:
        later = places(ops, Encode)[4]  # the first of chunk 2
        ops.insert(places(ops, Exchange)[0], ops.pop(later))

    rejected(changed(two_round(), encode_ahead), r"writes scatter\.send\[.*too early: .*written by op 0")


def test_slot_gathered_into_too_early() -> None:
    def decode_late(ops: list[Op]) -> None:
        ops.append(ops.pop(places(ops, Decode)[0]))

    rejected(changed(two_round(), decode_late), r"writes gather\.recv\[.*too early")


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


# -- rejected: spans ---------------------------------------------------------------------------------------------------


def shift_encode_source(ops: list[Op]) -> None:
    i = places(ops, Encode)[0]
    ops[i] = replace(ops[i], src=shifted(ops[i].src))


def shift_encode_wire(ops: list[Op]) -> None:
    i = places(ops, Encode)[0]
    ops[i] = replace(ops[i], wire=shifted(ops[i].wire))


def shift_receive(ops: list[Op]) -> None:
    i = places(ops, Exchange)[0]
    first, *rest = ops[i].recvs
    ops[i] = replace(ops[i], recvs=(Transfer(first.peer, shifted(first.span)), *rest))


def shift_last_receive(ops: list[Op]) -> None:
    """To the end of the buffer and one byte further."""
    i = places(ops, Exchange)[0]
    first, *rest = ops[i].recvs
    span = Span(first.span.buffer, 256 - len(first.span) + 1, 257)
    ops[i] = replace(ops[i], recvs=(Transfer(first.peer, span), *rest))


def shift_decode(ops: list[Op]) -> None:
    i = places(ops, Decode)[0]
    ops[i] = replace(ops[i], dst=shifted(ops[i].dst))


def lengthen_encode(ops: list[Op]) -> None:
    i = places(ops, Encode)[0]
    ops[i] = replace(ops[i], src=Span("input", ops[i].src.start, ops[i].src.stop + 1))


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (shift_encode_source, r"combines elements .*80\.\.88 of .* with elements 81\.\.89 of rank 1"),
        (shift_encode_wire, r"reads scatter\.send\[0:12\], but scatter\.send\[0:1\] was never written"),
        (shift_receive, r"reads scatter\.recv\[\d+:\d+\], but .* was never written"),
        (shift_last_receive, r"reaches outside its buffer: scatter\.recv\[245:257\] of 256"),
        (shift_decode, r"rank 1: reads output.* but output\[80:81\] was never written"),
        (on_reduce(0, out=lambda op: shifted(op.out)), "output.*was never written|ends as values"),
        (
            on_reduce(0, own=lambda op: shifted(op.own)),
            r"combines elements 40\.\.48 .* with elements 41\.\.49 of rank 1",
        ),
        (on_reduce(0, srcs=lambda op: (shifted(op.srcs[0], 1), op.srcs[1])), r"scatter\.recv.* was never written"),
        (lengthen_encode, r"is 12 bytes, but 9 elements of float32 \(input\[80:89\]\) are 24 bytes in MinMax"),
    ],
)
def test_off_by_one_span(mutate: Mutation, reason: str) -> None:
    rejected(changed(two_round(), mutate), reason)


def test_code_cut_in_two() -> None:
    """A slot that holds the end of one code and the start of another is not a code."""

    def split(ops: list[Op]) -> None:
        j = places(ops, Encode)[1]
        ops[j] = replace(ops[j], wire=Span("scatter.send", 12, 24))
        k = places(ops, Exchange)[0]
        first, second = ops[k].sends
        halves = Transfer(first.peer, Span("scatter.send", 1, 13)), Transfer(second.peer, Span("scatter.send", 12, 24))
        ops[k] = replace(ops[k], sends=halves)

    one_chunk = all_ranks("two_round", 3, 24, chunk_elements=8)
    rejected(changed(one_chunk, split), r"not one whole code: it holds bytes 1\.\.12 of .*, bytes 0\.\.1 of a code")


def test_inside_one_operation() -> None:
    def receive_over_send(ops: list[Op]) -> None:
        i = places(ops, Exchange)[0]
        first, *rest = ops[i].recvs
        ops[i] = replace(ops[i], recvs=(Transfer(first.peer, shifted(ops[i].sends[0].span, 4)), *rest))

    rejected(changed(two_round(), receive_over_send), "receives into scatter.send while it sends or receives the same")
    over = on_reduce(0, wire=lambda op: op.srcs[0])
    rejected(changed(two_round(), over), r"writes scatter\.recv\[.* while it still reads scatter\.recv")
    partly = on_reduce(0, out=lambda op: shifted(op.own, 4))
    rejected(changed(two_round(in_place=True), partly), "which overlap in part")


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (on_reduce(0, out=lambda op: Span("input", op.out.start, op.out.stop)), "writes input.*, the caller's input"),
        (on_reduce(0, out=lambda op: Span("nowhere", 0, 8)), "names a buffer 'nowhere'"),
        (on_reduce(0, out=lambda op: Span("output", 8, 8)), r"names an empty span, output\[8:8\]"),
        (on_reduce(0, own_index=lambda op: 3), "own_index 3"),
        (on_reduce(0, out=lambda op: None, own=lambda op: None), "neither own nor out"),
        (on_reduce(0, index=lambda op: 3), "encodes from element 3 on, inside a bucket"),
        (on_reduce(1, index=lambda op: 40), r"uses the random numbers of elements 40\.\.48 in round 1 again"),
        (on_reduce(0, codec=lambda op: MinMax(4, 8, "stochastic")), "with MinMax.*stochastic.*nearest.* made it"),
    ],
)
def test_bad_reduce(mutate: Mutation, reason: str) -> None:
    rejected(changed(two_round(), mutate), reason)


def test_transfer_to_itself() -> None:
    def talk_to_itself(ops: list[Op]) -> None:
        i = places(ops, Exchange)[0]
        ops[i] = replace(ops[i], sends=(Transfer(1, ops[i].sends[0].span),))

    rejected(changed(two_round(), talk_to_itself), "has a transfer with rank 1; peers are the other ranks")


def test_unused_code() -> None:
    def encode_more(ops: list[Op]) -> None:
        ops.append(Encode(CODEC, Span("input", 0, 8), Span("scatter.send", 0, 12), 0, round=2))

    rejected(
        changed(two_round(), encode_more), r"rank 1, op \d+: writes scatter\.send\[0:12\] .* nothing ever reads it"
    )


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
