"""The simulator keeps to its rules and shows what chunks and windows are for; the trace file is what Perfetto reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from schedule_cases import one_rank

from qccl.analysis.events import Rules
from qccl.analysis.simulate import Costs, Timeline, simulate
from qccl.codecs import MinMax
from qccl.collectives.allreduce import ALLREDUCE
from qccl.dtypes import FLOAT32
from qccl.schedule import Buffer, Exchange, Role, Schedule, Span, Transfer, VerificationError
from qccl.trace import TraceEvent, write_trace

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
def test_encode_of_the_next_chunk_runs_during_the_transfer(rules: Rules) -> None:
    """In the middle of the pipeline every encode of round 1 starts before the previous chunk has gone."""
    schedules = all_ranks("two_round", 4, chunk_elements=40 * 1024)
    timeline = simulate(schedules, Costs(encode_rate=2e9), rules=rules)
    encodes = [e for e in timeline.on(1, "compute") if e.name.startswith("encode")]
    sends = [s for s in timeline.on(1, "send") if "scatter" in s.name]
    for k in range(1, 20):
        first_encode = encodes[3 * (k + 1)]
        last_send = sorted(sends, key=lambda s: s.stop)[3 * k + 2]
        assert first_encode.start < last_send.stop


@pytest.mark.parametrize("rules", ["mpi", "nccl"])
def test_a_window_of_slots_is_needed(rules: Rules) -> None:
    """Unless the transport copies what is sent, one slot per peer lets nothing overlap; two do; four are hardly better where nothing jitters."""
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


def test_simulated_trace_can_be_written(tmp_path: Path) -> None:
    timeline = simulate(all_ranks("two_round", 3, 1 << 18))
    write_trace(tmp_path / "trace.json", timeline.events)
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(r["ph"] == "X" for r in records) == len(timeline.events)
