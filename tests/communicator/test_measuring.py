"""The measurement of a group's calls: which calls, how long at most, and that nothing else changes."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, PeerLost
from qccl.bench.verdict import findings
from qccl.collectives import spec_of_plan
from qccl.communicator import measuring
from qccl.communicator.measuring import _rising
from qccl.engine.host.rig import HostRig
from qccl.observe.records import read_record

pytestmark = pytest.mark.usefixtures("short_measurements")

COLLECTIVES = ["allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


@on_ranks(2)
def test_a_call_is_measured_once_and_a_named_codec_never(comm):
    numbers, x = comm._session.numbers, np.ones(100, np.float32)
    comm.quantized_allreduce(x, codec="minmax8")
    assert numbers.sequence == 1
    comm.quantized_allreduce(x, codec="auto")
    measured = numbers.sequence
    assert measured > 2 and comm.calls == 2
    for codec in ("auto", "auto", "minmax8"):
        comm.quantized_allreduce(x, codec=codec)
    comm.quantized_allreduce(np.ones(200, np.float32), codec="auto")
    assert numbers.sequence == measured + 4
    assert comm.plan("allreduce", 100, codec="minmax8").spec.algorithm == "auto", "by constants"


@on_ranks(2)
def test_calls_under_way_end_before_the_measurement(comm):
    x, y = np.ones(100_000, np.float32), np.ones(100, np.float32)
    work = comm.quantized_allreduce(x, async_op=True)
    comm.quantized_allreduce(y, codec="auto")
    work.wait()
    assert (x == 2).all() and (y == 2).all()


def test_random_codecs_draw_the_same_numbers_with_and_without_a_measurement():
    codec = "minmax2:rounding=stochastic"

    def run(comm, *, measures):
        if measures:
            comm.profile()
        x = np.linspace(0, 1, 1000, dtype=np.float32)
        comm.quantized_allreduce(x, codec=codec)
        return x.tobytes()

    plain = qccl.run_ranks(2, lambda comm: run(comm, measures=False))
    assert plain == qccl.run_ranks(2, lambda comm: run(comm, measures=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("a capture is under way")], ids=repr)
@pytest.mark.parametrize("method", ["seconds", "read", "fill"])
def test_a_rank_that_fails_while_measuring_tells_the_others(method, error, monkeypatch):
    usual, failing = getattr(HostRig, method), threading.local()

    def fail(rig, *how):
        if failing.rank == 1:
            raise error
        return usual(rig, *how)

    monkeypatch.setattr(HostRig, method, fail)

    def run(comm):
        failing.rank = comm.rank
        if comm.rank == 1:
            with pytest.raises(type(error)):
                comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        else:
            with pytest.raises(PeerLost, match="rank 1 gave up"):
                comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        with pytest.raises((PeerLost, EngineError), match="failed earlier"):
            comm.barrier()

    qccl.run_ranks(2, run)


@on_ranks(4)
def test_groups_of_a_split_measure_on_their_own(comm):
    comm.profile()
    half = comm.split(comm.rank % 2)
    x = np.ones(50, np.float32)
    half.quantized_allreduce(x, codec="auto")
    assert (x == 2).all()
    assert len(half.profile().nodes) == 2
    half.close()


@on_ranks(4)
def test_nodes_with_several_ranks_also_measure_two_levels(comm):
    comm.nodes = (0, 0, 1, 1)
    plan = comm.plan("allreduce", 4096, codec="auto")
    assert "none by two levels" in plan.explain() and "minmax8 by two levels" in plan.explain()
    x = np.ones(4096, np.float32)
    plan(x)
    assert (x == 4).all()


def test_times_are_smoothed_so_that_larger_calls_take_no_less():
    assert _rising([(1, 1.0), (2, 3.0), (3, 1.0), (4, 5.0)]) == ((1, 1.0), (2, 2.0), (3, 2.0), (4, 5.0))
    assert _rising([(1, 3.0), (2, 2.0), (3, 1.0)]) == ((1, 2.0), (2, 2.0), (3, 2.0))
    assert _rising([(1, 1.0)]) == ((1, 1.0),)


def test_every_way_of_every_collective_is_measured():
    for collective in COLLECTIVES:
        for nodes in ((0, 1, 2), (0, 0, 1)):
            spec = spec_of_plan(collective, 3, "float32", "none", None, {})
            calls = measuring.candidates(collective, spec.dtype, [spec.codec], nodes)
            assert calls, collective
            assert all(measuring._density(each, nodes) > 0 for each in calls.values())


@on_ranks(2)
def test_a_timeout_that_is_too_short_to_measure(comm, monkeypatch):
    """The call has no codec, now and later; the ranks go by the shortest of their timeouts."""
    comm.timeout = 50.0 if comm.rank else 1e6
    monkeypatch.setattr(measuring, "_OF_TIMEOUT", 2e-11)
    x, y = (np.random.default_rng(comm.rank).standard_normal(5000, np.float32) for _ in range(2))
    plan = comm.plan("allreduce", 5000, codec="auto:minmax4+ef", key="x")
    assert plan.codec == "none"
    assert re.search(
        r"without a codec, because calls were not measured: calls of two sizes need about \S+ s, and the timeout "
        r"permits 1e-09 s; set a longer comm.timeout before the first such call\.",
        plan.explain(),
    )
    comm.timeout = 60.0
    comm.quantized_allreduce(x, codec="auto:minmax4+ef", key="x")
    comm.quantized_allreduce(y, codec="none")
    assert x.tobytes() == y.tobytes()
    with pytest.raises(ArgumentError, match="there is no profile, because calls were not measured"):
        comm.plan("allreduce", 5, codec="auto")  # another kind
        comm.profile()
    assert not comm.state_dict()["keys"] and comm.calls == 2


def test_a_second_size_that_the_timeout_does_not_permit(monkeypatch):
    """The first calls have taken longer than the agreements before them let expect."""
    seconds = HostRig.seconds

    def late(rig, call, times):
        return seconds(rig, call, times) + 100.0

    monkeypatch.setattr(HostRig, "seconds", late)

    def run(comm):
        plan = comm.plan("allreduce", 5000, codec="auto")
        assert plan.codec == "none" and "and the timeout permits 30 s" in plan.explain()

    qccl.run_ranks(2, run)


def test_an_agreement_that_is_held_up(monkeypatch):
    """The first one seems to take 10 s; the measurement goes on, because the next one does not."""
    read, held = HostRig.read, list[float]()

    def hold(rig, *where):
        found = read(rig, *where)
        held.append(10.0)
        return found

    monkeypatch.setattr(HostRig, "read", hold)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(held[:1])))
    for text in qccl.run_ranks(2, lambda comm: comm.plan("allreduce", 5000, codec="auto").explain()):
        assert "by the times of the group's profile" in text


def test_measured_calls_neither_displace_records_nor_count(monkeypatch):
    monkeypatch.setattr(measuring, "_LIMIT", 0.4)

    def run(comm):
        x = np.ones(100, np.float32)
        for _ in range(20):
            comm.quantized_allreduce(x, codec="minmax8")
        before = comm.record().calls
        comm.quantized_allreduce(x, codec="auto")
        comm.quantized_reduce_scatter(x, codec="auto")
        found = comm.record().calls
        assert found[:20] == before[:20] or [call.text for call in found[:20]] == [call.text for call in before]
        texts = [re.split(r"[ (]", call.text)[0] for call in found[20:]]
        assert texts == ["measure", "allreduce", "measure", "reduce_scatter"]
        measured, after = found[20], found[21]
        assert after.sequence - measured.sequence > 40 and after.call == measured.call == 20
        assert measured.begun <= measured.ended <= after.begun and measured.state == "ended"
        assert sum(each.calls for each in comm.stats().calls) == 22
        for _ in range(1100):
            comm.barrier()
        assert {call.text for call in comm.record().calls} == {"barrier()"} and len(comm.record().calls) == 1024

    qccl.run_ranks(2, run)


def test_a_measurement_that_hangs_is_in_the_records(monkeypatch, tmp_path):
    """The other rank stops in the middle. Its record and those of the others name it."""
    seconds, numbers, stopped = HostRig.seconds, threading.local(), threading.Event()
    monkeypatch.setenv("QCCL_RECORDS", str(tmp_path))

    def stop(rig, call, times):
        numbers.calls = getattr(numbers, "calls", 0) + 1
        if numbers.calls == 20:
            if numbers.comm.rank:
                stopped.wait(60)
            else:
                numbers.comm.timeout = 1.0  # of this call, which rank 1 does not make
        return seconds(rig, call, times)

    monkeypatch.setattr(HostRig, "seconds", stop)

    def run(comm):
        numbers.comm = comm
        comm.quantized_allreduce(np.ones(100, np.float32))
        try:
            with pytest.raises((CollectiveTimeout, PeerLost)):
                comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        finally:
            stopped.set()
        return comm.record()

    records = qccl.run_ranks(2, run)
    for record in records:
        texts = [call.text.split("(")[0] for call in record.calls]
        assert texts[0] == "allreduce" and texts[1].startswith("measure allreduce of float32"), texts
        assert len(texts) <= 34 and record.calls[2].sequence > record.calls[1].sequence + 1
    assert records[0].calls[-1].state == "under way" and records[0].calls[-1].missing == (1,)
    written = read_record(tmp_path / next(path.name for path in tmp_path.iterdir() if "rank-0" in path.name))
    assert [call.sequence for call in written.calls] == [call.sequence for call in records[0].calls]
    found = findings({record.rank: record for record in records})
    assert found[0].ranks == (1,), found
