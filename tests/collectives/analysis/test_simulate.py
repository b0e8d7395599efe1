"""The simulator keeps to its rules and shows what chunks and windows are for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from schedule_cases import one_rank

from qccl.base.dtypes import FLOAT32
from qccl.base.trace import TraceEvent
from qccl.codecs import Codec, MinMax, NoCodec
from qccl.collectives.allreduce import ALLREDUCE, AllReduceSpec
from qccl.collectives.analysis.events import Rules
from qccl.collectives.analysis.simulate import Costs, Timeline, simulate
from qccl.collectives.reduce import ReduceSpec
from qccl.collectives.schedule import Buffer, Exchange, Role, Schedule, Span, Transfer, VerificationError
from qccl.collectives.topology import for_nodes

CODEC = MinMax(bits=8)
RULES: list[Rules] = ["mpi", "eager", "nccl"]
COUNT = 4 << 20  # 16 MiB
GIGABIT = Costs()


def all_ranks(name: str, size: int, count: int = COUNT, **options: int) -> list[Schedule]:
    return [one_rank(ALLREDUCE[name], rank, size, count, FLOAT32, CODEC, **options) for rank in range(size)]


def floor(schedules: list[Schedule], costs: Costs) -> float:
    """Seconds that the bytes need on the link of the rank that sends most."""
    return max(schedule.sent_nbytes() for schedule in schedules) / costs.link_rate


def overlap(a: TraceEvent, b: TraceEvent) -> float:
    return min(a.stop, b.stop) - max(a.start, b.start)


def encode_during_send(timeline: Timeline, rank: int) -> float:
    """Seconds in which the rank encoded while it sent."""
    encodes = [e for e in timeline.on(rank, "compute") if e.name.startswith("encode")]
    return sum(max(0.0, overlap(e, s)) for e in encodes for s in timeline.on(rank, "send"))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", sorted(ALLREDUCE))
def test_queues_hold_one_event_at_a_time(name: str, rules: Rules) -> None:
    timeline = simulate(all_ranks(name, 3, 1 << 20), Costs(latency=0.0), rules=rules)
    for rank in range(3):
        for queue in ("compute", "send", "recv"):
            events = list(timeline.on(rank, queue))
            assert events and all(a.stop <= b.start + 1e-12 for a, b in pairwise(events))
    assert timeline.total == max(e.stop for e in timeline.events)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_hide_the_computation(size: int, rules: Rules) -> None:
    """With one chunk the computation adds to the time of the link; with many it runs beside it."""
    costs = Costs(encode_rate=1e9, decode_rate=1e9)
    many, one = all_ranks("two_round", size), all_ranks("two_round", size, chunk_elements=COUNT)
    chunked, whole = simulate(many, costs, rules=rules), simulate(one, costs, rules=rules)
    assert floor(many, costs) <= chunked.total
    assert whole.total > 1.15 * chunked.total
    # Within one chunk, encoding for one peer still goes on while the bytes for another are sent.
    assert encode_during_send(chunked, 0) > encode_during_send(whole, 0)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("name", "per_chunk"), [("two_round", 3), ("one_shot", 1)])
def test_encode_of_the_next_chunk_runs_during_the_transfer(name: str, per_chunk: int, rules: Rules) -> None:
    """In the middle of the pipeline every encode of round 1 starts before the previous chunk has gone."""
    schedules = all_ranks(name, 4, chunk_elements=40 * 1024, depth=2)
    timeline = simulate(schedules, Costs(encode_rate=2e9), rules=rules)
    encodes = [e for e in timeline.on(1, "compute") if e.name.startswith("encode")]
    sends = [s for s in timeline.on(1, "send") if name == "one_shot" or "scatter" in s.name]
    for k in range(1, 20):
        first_encode = encodes[per_chunk * (k + 1)]
        last_send = sorted(sends, key=lambda s: s.stop)[3 * k + 2]
        assert first_encode.start < last_send.stop


@pytest.mark.parametrize("rules", ["mpi", "nccl"])
def test_a_window_of_slots_is_needed(rules: Rules) -> None:
    """Where the transport copies nothing, one slot per peer lets nothing overlap; two do; four are hardly better."""
    costs = Costs(encode_rate=1e9, decode_rate=1e9)
    one, two, four = (simulate(all_ranks("two_round", 4, depth=d), costs, rules=rules).total for d in (1, 2, 4))
    assert one > 1.05 * two
    assert two >= four > 0.9 * two


@pytest.mark.parametrize("size", [2, 4])
def test_slow_links_set_the_pace(size: int) -> None:
    """At 1 Gbit/s and with real rates of computation the time is that of the bytes, up to filling the pipeline."""
    schedules = all_ranks("two_round", size)
    assert 1.0 <= simulate(schedules, GIGABIT).total / floor(schedules, GIGABIT) < 1.12


def test_one_shot_takes_one_latency_less() -> None:
    slow = Costs(latency=1e-3)
    one, two = (simulate(all_ranks(name, 4, 256), slow).total for name in ("one_shot", "two_round"))
    assert two - one == pytest.approx(1e-3, rel=0.05)


def test_deadlock_is_an_error() -> None:
    span = Span("wire", 0, 8)
    buffers = {"wire": Buffer(8, None, Role.WORK)}
    ops = [(Exchange((), (Transfer(peer, span),)), Exchange((Transfer(peer, span),), ())) for peer in (1, 0)]
    with pytest.raises(VerificationError, match=r"2 events of all ranks never happen; verify\(\) says why"):
        simulate([Schedule("forward", rank, 2, buffers, ops[rank]) for rank in range(2)])


# -- representatives, and short messages over TCP ----------------------------------------------------------------------


def of_nodes(ranks: int, node_size: int, count: int, codec: Codec) -> list[Schedule]:
    """The all-reduce that a call makes on these nodes, for all ranks."""
    node_ids = [rank // node_size for rank in range(ranks)]
    spec = for_nodes(AllReduceSpec.from_arguments(count, "float32", codec, None), node_ids)
    return [spec.schedule(rank, ranks, in_place=False) for rank in range(ranks)]


TCP = Costs(message=11e-6, byte=0.3e-9, header=512, eager=8192)


@pytest.mark.parametrize("rules", ["mpi", "eager"])
@pytest.mark.parametrize(("ranks", "node_size"), [(2, 1), (3, 1), (8, 1), (4, 2), (6, 3), (8, 4), (4, 4)])
def test_one_node_stands_for_all(ranks: int, node_size: int, rules: Rules) -> None:
    costs = replace(TCP, node_size=node_size)
    for buckets, codec in ((1, CODEC), (12, CODEC), (250, MinMax(bits=4)), (40, NoCodec())):
        count = buckets * ranks * 1024
        every = of_nodes(ranks, node_size, count, codec)
        found, expected = (simulate(each, costs, rules=rules) for each in (every[:node_size], every))
        assert found.total == pytest.approx(expected.total, rel=1e-9)
        for rank in range(node_size):
            for queue in ("compute", "send", "recv"):
                mine, its = ([(e.name, e.args) for e in each.on(rank, queue)] for each in (found, expected))
                assert sorted(name for name, _ in mine) == sorted(name for name, _ in its)


def test_a_schedule_that_does_not_repeat_is_refused() -> None:
    """The root of a reduce stands for nobody else."""
    spec = ReduceSpec.from_arguments(5000, "float32", CODEC, None, root=0)
    with pytest.raises(VerificationError, match="has no send"):
        simulate([spec.schedule(0, 4, in_place=False)])


@pytest.mark.parametrize("rules", ["mpi", "eager"])
def test_ranks_of_a_node_share_its_link(rules: Rules) -> None:
    """Eight ranks, of which four send all they have through one link."""
    schedules = [one_rank(ALLREDUCE["two_round"], rank, 8, 1 << 20, FLOAT32, CODEC) for rank in range(4)]
    far = sum(
        len(s.span) for each in schedules for op in each.ops if isinstance(op, Exchange) for s in op.sends if s.peer > 3
    )
    assert simulate(schedules, Costs(node_size=4), rules=rules).total >= far / Costs().link_rate


def test_an_eager_send_does_not_wait_for_its_receiver() -> None:
    """A message longer than the slots: with MPI's rules each of the later ones waits for a place at the receiver."""
    schedules = all_ranks("two_round", 2, chunk_elements=64 << 10, depth=2)
    far = Costs(latency=20e-3)
    eager, mpi = (simulate(schedules, far, rules=rules).total for rules in ("eager", "mpi"))
    assert eager + 5 * far.latency < mpi


def test_headers_and_messages_cost_what_they_are() -> None:
    """A rank without data has a header to send to, and to receive from, each other rank."""
    schedules = all_ranks("one_shot", 5, 64)
    without = simulate(schedules, Costs(), rules="eager").total
    messages = simulate(schedules, Costs(message=1e-3), rules="eager").total
    assert messages - without == pytest.approx((2 * 4 + 4 + 4) * 1e-3, rel=0.01)  # headers, sends, receives
    joined = simulate(schedules, Costs(message=1e-3, eager=8192), rules="eager").total
    assert joined - without == pytest.approx((4 + 4) * 1e-3, rel=0.01)
    large = simulate(schedules, Costs(header=1_250_000), rules="eager").total
    assert large - without == pytest.approx(4 * 1_250_000 / Costs().link_rate, rel=0.01)


def test_ranks_that_share_a_processor_compute_longer() -> None:
    schedules, slow = all_ranks("one_shot", 2, 1 << 16), Costs(encode_rate=1e6, decode_rate=1e6)
    assert simulate(schedules, replace(slow, processors=0.25)).total == pytest.approx(
        4 * simulate(schedules, slow).total, rel=0.01
    )


def test_codecs_have_rates_of_their_own() -> None:
    """Values that are not encoded inside a node, and codes between nodes."""
    schedules = of_nodes(8, 4, 1 << 18, CODEC)
    usual = simulate(schedules, Costs(node_size=4)).total
    slow = simulate(schedules, Costs(node_size=4, rates={NoCodec(): (1e6, 1e6)})).total
    assert slow > 10 * usual
    assert simulate(schedules, Costs(node_size=4, rates={MinMax(bits=2): (1e6, 1e6)})).total == usual


def test_a_burst_passes_an_idle_link_at_once() -> None:
    """Of a limiter's bucket of 20,000 bytes; what is longer takes the time of the rest."""
    costs = Costs(link_rate=1e6, latency=0.0, overhead=0.0)
    for count in (1024, 64 << 10):
        schedules = all_ranks("one_shot", 2, count, chunk_elements=COUNT)
        usual, quick = (simulate(schedules, replace(costs, burst=burst)).total for burst in (0, 20_000))
        assert usual - quick == pytest.approx(min(20_000, schedules[0].sent_nbytes()) / 1e6, rel=1e-3)
