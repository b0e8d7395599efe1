"""Totals of a rank's calls: exact numbers, equal to what is counted at the transport, and times that add up."""

from __future__ import annotations

import json
import math
import threading
import time

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import ranks
from sent_bytes import count_sent
from thread_ranks import on_ranks
from threads import hear

import qccl
from qccl.base.dtypes import FLOAT32
from qccl.codecs import get
from qccl.collectives import spec_of_plan
from qccl.collectives.schedule import Buffer, Encode, Exchange, Role, Schedule, Span, Transfer
from qccl.engine.host.engine import HostEngine
from qccl.observe.tallies import traffic

SECONDS = 60.0


def only(stats: qccl.observe.statistics.Stats) -> qccl.observe.statistics.CallStats:
    (found,) = stats.calls
    return found


# -- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", ["minmax4", "none", "topk:k=4", "cast:dtype=bfloat16"])
def test_bytes_are_those_at_the_transport(n, codec):
    def run(comm):
        sent, rows = count_sent(comm), []
        for count in (0, 1, 1001, 70_001):
            x = np.ones(count, np.float32)
            for call in (comm.quantized_allreduce, lambda x, codec: comm.quantized_broadcast(x, root=0, codec=codec)):
                before = sum(sent)
                call(x, codec=codec)
                rows.append(sum(sent) - before)
        comm.barrier()  # is not counted
        return rows, comm.stats()

    for rows, stats in qccl.run_ranks(n, run):
        assert [(each.collective, each.codec) for each in stats.calls] == [
            ("allreduce", get(codec).spec()),
            ("broadcast", get(codec).spec()),
        ]
        for i, each in enumerate(stats.calls):
            assert each.calls == 4 and each.elements == 71_003
            assert each.sent_nbytes == sum(rows[i::2])
            assert each.ratio is None if not each.sent_nbytes else each.ratio > 0.9
        assert stats.total.calls == 8 and stats.total.sent_nbytes == sum(rows)


NAMES = ["allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "hierarchical_allreduce"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_traffic_of_schedules(name, size):
    own = {"node_ids": [rank // 2 for rank in range(size)]} if name == "hierarchical_allreduce" else {}
    for codec, dtype in (("none", "float32"), ("none", "float16"), ("minmax4", "float32"), ("topk:k=4", "float16")):
        for count in (0, size, 840 * 1000):
            spec = spec_of_plan(name, count, dtype, codec, None, own)
            for rank in range(size):
                schedule = spec.schedule(rank, size, in_place=False)
                found = traffic(schedule)
                assert found.sent_nbytes == schedule.sent_nbytes()
                assert bool(found.raw_nbytes) == bool(found.sent_nbytes)
                if codec == "none":
                    assert found.raw_nbytes == found.sent_nbytes


def test_traffic_of_messages_with_several_codes_and_parts_of_codes():
    codec = get("minmax8:bucket=8")
    wire = codec.encoded_nbytes(8, FLOAT32)
    buffers = {"input": Buffer(16, FLOAT32, Role.INPUT), "w": Buffer(2 * wire, None, Role.WORK)}
    encodes = tuple(
        Encode(codec, Span("input", 8 * i, 8 * i + 8), Span("w", i * wire, (i + 1) * wire), 8 * i) for i in range(2)
    )
    for stop, elements in ((2 * wire, 16), (wire + wire // 2, 12)):
        exchange = Exchange((Transfer(1, Span("w", 0, stop)), Transfer(0, Span("w", 0, wire))), ())
        found = traffic(Schedule("s", 0, 2, buffers, (*encodes, exchange)))
        assert found == (4 * elements, stop)  # and nothing for what a rank sends to itself


def test_plans_coalesced_calls_and_state_are_counted():
    def run(comm):
        x = np.ones(1000, np.float32)
        plan = comm.plan("allreduce", 1000, codec="minmax8").bind(x)
        for _ in range(3):
            plan.run()
        plan.start().wait()
        comm.quantized_allreduce(x, codec="minmax8")
        comm.quantized_allreduce_coalesced([x, np.ones(24, np.float32)], codec="minmax8")
        comm.quantized_allreduce(x, codec="onebit+ef", key="k")
        return comm.stats()

    for stats in qccl.run_ranks(2, run):
        found = {(each.collective, each.codec.split(":")[0]): (each.calls, each.elements) for each in stats.calls}
        coalesced = next(key for key in found if "coalesced" in key[0])
        assert found.pop(coalesced) == (1, 1024)
        assert found == {("allreduce", "minmax8"): (5, 5000), ("allreduce", "onebit+ef"): (1, 1000)}


def test_a_call_that_fails_is_not_counted():
    def run(comm):
        x = np.ones(100, np.float32)
        comm.quantized_allreduce(x)
        with pytest.raises(qccl.MismatchError):
            comm.quantized_allreduce(np.ones(100 + comm.rank, np.float32))
        return comm.stats()

    assert [only(stats).calls for stats in qccl.run_ranks(2, run)] == [1, 1]


# -- resets, groups, forms -------------------------------------------------------------------------------------------


def test_a_reset_begins_anew_and_changes_nothing_else():
    def run(comm):
        x = np.ones(1000, np.float32)
        comm.quantized_allreduce(x)
        first = comm.stats(reset=True)
        empty = comm.stats()
        comm.quantized_allreduce(x)
        comm.quantized_allreduce(x)
        return first, empty, comm.stats(), list(comm._session.statistics.totals())

    for first, empty, last, totals in qccl.run_ranks(2, run):
        assert only(first).calls == 1 and empty.calls == () and only(last).calls == 2
        assert only(last).sent_nbytes == 2 * only(first).sent_nbytes
        assert empty.total.calls == 0 and empty.total.ratio is None and str(empty)
        assert [each.calls for each in totals] == [3]
        assert 0 <= empty.elapsed <= last.elapsed


@on_ranks(2)
def test_each_group_has_its_own(comm):
    comm.quantized_allreduce(np.ones(10, np.float32))
    sub = comm.split(0)
    sub.quantized_allreduce(np.ones(20, np.float32))
    found = only(comm.stats()).elements, only(sub.stats()).elements, comm.stats().group != sub.stats().group
    sub.close()
    assert found == (10, 20, True)


def test_forms():
    def run(comm):
        comm.quantized_allreduce(np.ones(100_000, np.float32), codec="minmax4")
        comm.quantized_allreduce(np.ones(3, np.float32), codec="none")
        return comm.stats()

    stats = qccl.run_ranks(2, run)[1]
    assert (stats.rank, stats.size) == (1, 2)
    assert json.loads(json.dumps(stats.as_dict()))["calls"][1]["codec"] == "none"
    title, header, *rows = str(stats).splitlines()
    assert "rank 1 of 2" in title and header.split()[:3] == ["collective", "codec", "calls"]
    assert [row.split()[0] for row in rows] == ["allreduce", "allreduce", "all"]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_statistics_after_the_end_and_of_no_calls():
    comms = []
    qccl.run_ranks(1, lambda comm: (comms.append(comm), comm.quantized_allreduce(np.ones(3, np.float32))))
    assert only(comms[0].stats()).calls == 1
    assert qccl.run_ranks(1, lambda comm: (comm.plan("allreduce", 3), comm.stats().calls)[1]) == [()]


# -- times -----------------------------------------------------------------------------------------------------------


def test_times_of_calls_that_the_program_waits_for():
    """Rank 1 comes later: rank 0 waits for so long, and nothing is hidden. Both have long and short calls."""
    pause = 0.3

    def run(comm):
        begun = time.monotonic()
        for count in (10, 300_000):
            if comm.rank:
                hear(comm._session.engine, 1)  # rank 0 has begun to wait
                time.sleep(pause)
            comm.quantized_allreduce(np.ones(count, np.float32), codec="minmax4")
        return only(comm.stats()), time.monotonic() - begun

    for rank, (found, elapsed) in enumerate(qccl.run_ranks(2, run)):
        assert found.hidden_seconds == pytest.approx(0, abs=1e-9)
        assert found.computing_seconds > 0
        assert found.seconds == pytest.approx(found.computing_seconds + found.waiting_seconds, rel=1e-6)
        assert found.seconds <= elapsed
        if rank == 0:
            assert found.waiting_seconds > 1.5 * pause  # in both calls


def test_times_of_calls_under_way_while_the_program_works(monkeypatch):
    """Rank 1 joins when rank 0 has worked for a while, then rank 0 waits: it counts each second once."""
    pause, waits, usual = 0.3, threading.Event(), HostEngine.run

    def wait(engine, execution, limit=math.inf):
        waits.set()
        usual(engine, execution, limit)

    monkeypatch.setattr(HostEngine, "run", wait)

    def run(comm):
        if comm.rank:
            assert waits.wait(SECONDS)
            time.sleep(pause)
        works = [comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True) for _ in range(3)]
        if comm.rank == 0:
            time.sleep(pause)
        begun = time.monotonic()
        for work in works:
            work.wait()
        return only(comm.stats()), time.monotonic() - begun

    found, waited = qccl.run_ranks(2, run)[0]
    assert found.calls == 3
    assert found.hidden_seconds >= 3 * 0.99 * pause  # of each call
    assert 0.5 * pause <= found.waiting_seconds <= waited  # not three times
    assert found.seconds >= 3 * 1.5 * pause


def test_short_calls_count_the_time_of_those_before():
    def run(comm):
        x = np.ones(20_000, np.float32)
        for _ in range(40):
            comm.quantized_allreduce(x, codec="minmax4")
        return only(comm.stats())

    for found in qccl.run_ranks(2, run):
        assert 0 < found.computing_seconds <= found.seconds
        assert 0 <= found.waiting_seconds <= found.seconds and math.isfinite(found.waiting_seconds)


# -- CUDA ------------------------------------------------------------------------------------------------------------


def test_on_cuda_calls_and_bytes_without_times(cupy):
    def call(comm, x):
        for _ in range(2):
            comm.quantized_allreduce(x, codec="minmax8", algorithm="two_round")

    def run(comm):
        x = fake_cuda.array(np.ones(5000, np.float32), comm.rank)
        call(comm, x)
        comm.check()
        return comm.stats()

    def on_host(comm):
        call(comm, np.ones(5000, np.float32))
        return only(comm.stats())

    for found, expected in zip(map(only, ranks(2, run)), qccl.run_ranks(2, on_host), strict=True):
        assert found.values()[:4] == expected.values()[:4]
        assert found.values()[4:] == (None,) * 4
    assert str(ranks(1, run)[0]).splitlines()[2].split()[-4:] == ["-"] * 4
