"""codec="auto": what ranks choose, that they choose alike, and that measuring changes nothing else."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from profiles import profile

import qccl
from qccl import measuring
from qccl.bench.verdict import findings
from qccl.collectives import spec_of_plan
from qccl.costs.group import GroupProfile, Kind
from qccl.errors import ArgumentError, CodecError, CollectiveTimeout, MismatchError, PeerLost
from qccl.host.rig import HostRig
from qccl.measuring import _rising
from qccl.records import read_record

COLLECTIVES = ["allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    """Enough for a choice; a good one is not needed here."""
    monkeypatch.setattr(measuring, "_LIMIT", 0.05)
    monkeypatch.setattr(measuring, "_SLICE", 0.005)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_choose_alike_and_have_the_bits_of_the_chosen_call(collective, size):
    count = 996

    def run(comm):
        plan = comm.plan(collective, count, codec="auto")
        assert comm.calls == 0, "measured calls have no numbers"
        assert not comm.state_dict()["keys"]
        spec = plan.spec
        named = {"algorithm": spec.algorithm} if hasattr(spec, "algorithm") else {}
        fixed = comm.plan(collective, count, codec=plan.codec, **named)
        found = []
        for each in (plan, fixed):
            x = np.random.default_rng(comm.rank).standard_normal(count, np.float32)
            part = x[: count // size].copy()
            y = each(part, np.empty_like(x)) if collective == "all_gather" else each(x)
            found.append(None if y is None else y.tobytes())
        assert found[0] == found[1]
        assert comm.calls == 2
        return spec.text(), plan.codec

    found = qccl.run_ranks(size, run)
    assert len(set(found)) == 1
    assert found[0][1] in ("none", "minmax8")


@pytest.mark.parametrize("count", [0, 1, 2, 1023, 5001])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_hard_values_are_those_of_the_chosen_codec(count, dtype):
    values = np.array([np.nan, np.inf, -np.inf, 1e-40, -0.0, 6e4, 1.0, -3.5])

    def run(comm):
        x = np.resize(values, count).astype(dtype)
        y = x.copy()
        choice = comm.plan("allreduce", count, dtype, codec="auto")
        with np.errstate(all="ignore"):
            comm.quantized_allreduce(x, codec="auto")
            comm.quantized_allreduce(y, codec=choice.codec, algorithm=choice.spec.algorithm)
        assert x.tobytes() == y.tobytes()
        return x.tobytes()

    assert len(set(qccl.run_ranks(2, run))) == 1


def test_bfloat16_has_curves_of_its_own():
    def run(comm):
        x = np.full(3000, 0x3F80, np.uint16)
        comm.quantized_allreduce(x, codec="auto", dtype="bfloat16")
        assert (x == 0x4000).all()
        return sorted(kind.dtype for kind in comm.profile().times)

    assert qccl.run_ranks(2, run)[0] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    "fast", [("none", "one_shot"), ("none", "two_round"), ("minmax8", "one_shot"), ("minmax8", "two_round")]
)
def test_a_loaded_profile_decides(fast):
    def run(comm):
        comm._adopt(profile(comm, fast))
        before = comm._session.numbers.sequence
        plan = comm.plan("allreduce", 5000, codec="auto")
        assert (plan.codec, plan.spec.algorithm) == fast
        assert comm._session.numbers.sequence == before, "nothing is measured"
        assert f"by the times of the group's profile: {fast[0]} by {fast[1]} 1 ms, " in plan.explain()
        assert comm.plan("allreduce", 5000, codec=fast[0]).spec.algorithm == fast[1]
        assert comm.plan("allreduce", 5000, codec="auto", algorithm="one_shot").spec.algorithm == "one_shot"
        xs = [np.ones(7, np.float32), np.ones(2000, np.float32)]
        comm.quantized_allreduce_coalesced(xs, codec="auto")
        assert all((x == 2).all() for x in xs)
        assert comm.profile().times == profile(comm, fast).times

    qccl.run_ranks(2, run)


def test_a_codec_behind_the_colon_is_the_most_that_is_lost():
    def run(comm):
        comm._adopt(profile(comm, ("minmax4", "two_round"), codec="minmax4"))
        assert comm.plan("allreduce", 5000, codec="auto:minmax4").codec == "minmax4"
        comm.plan("allreduce", 5000, codec="auto")
        assert Kind("allreduce", "float32", "minmax8") in comm.profile().times, "measured beside what was loaded"
        for wrong in ("auto:minmax99", "auto:nothing", "auto+ef", "automatic"):
            hint = "only 'auto' and 'auto:CODEC', in small letters" if wrong == "auto+ef" else "no codec|not possible"
            with pytest.raises(CodecError, match=hint):
                comm.plan("allreduce", 5000, codec=wrong)
        comm.barrier()

    qccl.run_ranks(2, run)


def test_a_codec_with_state_needs_a_key_and_leaves_no_other_state():
    def run(comm):
        x = np.ones(5000, np.float32)
        with pytest.raises(ArgumentError, match="needs a name for the array"):
            comm.quantized_allreduce(x, codec="auto:minmax4+ef")
        assert comm._session.numbers.sequence == 0
        comm.quantized_allreduce(x, codec="auto:minmax4+ef", key="x")
        used = comm.plan("allreduce", 5000, codec="auto:minmax4+ef", key="x").codec
        assert list(comm.state_dict()["keys"]) == (["x"] if used == "minmax4+ef" else [])
        return x.tobytes()

    assert len(set(qccl.run_ranks(2, run))) == 1


def test_a_call_is_measured_once_and_a_named_codec_never():
    def run(comm):
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

    qccl.run_ranks(2, run)


def test_calls_under_way_end_before_the_measurement():
    def run(comm):
        x, y = np.ones(100_000, np.float32), np.ones(100, np.float32)
        work = comm.quantized_allreduce(x, async_op=True)
        comm.quantized_allreduce(y, codec="auto")
        work.wait()
        assert (x == 2).all() and (y == 2).all()

    qccl.run_ranks(2, run)


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


def test_other_collectives_are_refused_before_anything_is_sent():
    def run(comm):
        x, y = np.ones(4, np.float32), np.ones(4, np.float32)
        calls = [
            lambda: comm.quantized_all_to_all(x, y, codec="auto"),
            lambda: comm.hierarchical_allreduce(x, codec="auto"),
            lambda: comm.peer_exchange(x, send_to=[], replicas={}, codec="auto"),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match=r"codec=.auto. is not possible in .* name a codec"):
                call()
        assert comm._session.numbers.sequence == 0
        comm.quantized_allreduce(x)

    qccl.run_ranks(2, run)


def test_one_rank_needs_no_profile():
    def run(comm):
        x = np.array([1.0, 2.5], np.float32)
        comm.quantized_allreduce(x, codec="auto")
        assert x.tolist() == [1.0, 2.5]
        assert comm.plan("allreduce", 5, codec="auto").codec == "none"
        with pytest.raises(ArgumentError, match="one rank has no profile"):
            comm.profile()

    qccl.run_ranks(1, run)


def test_ranks_with_other_profiles_notice():
    def run(comm):
        with pytest.raises(MismatchError, match="agree on the profile"):
            comm._adopt(profile(comm, ("none", "one_shot") if comm.rank else ("minmax8", "one_shot")))

    qccl.run_ranks(2, run)


def test_a_rank_without_the_profile_notices():
    def run(comm):
        with pytest.raises(MismatchError, match="agree on the profile"):
            if comm.rank:
                comm._adopt(profile(comm, ("none", "one_shot")))
            else:
                comm.quantized_allreduce(np.ones(4, np.float32))

    qccl.run_ranks(2, run)


def test_the_profile_of_another_group_changes_nothing():
    def run(comm):
        with pytest.raises(ArgumentError, match="this group has 2 ranks"):
            comm._adopt(GroupProfile((0, 0, 0), comm.transport.name))
        comm.quantized_allreduce(np.ones(4, np.float32))

    qccl.run_ranks(2, run)


def test_a_rank_that_names_a_codec_meanwhile_is_a_mismatch():
    def run(comm):
        with pytest.raises(MismatchError, match="measure allreduce of float32 with none and minmax8"):
            comm.quantized_allreduce(np.ones(4, np.float32), codec="minmax8" if comm.rank else "auto")

    qccl.run_ranks(2, run)


def test_a_rank_that_does_not_come_is_not_waited_for_forever():
    missed = threading.Event()

    def run(comm):
        if comm.rank:
            assert missed.wait(60)
            return
        with pytest.raises(CollectiveTimeout):
            comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        missed.set()

    qccl.run_ranks(2, run, timeout=0.3)


def test_a_rank_that_fails_while_measuring_tells_the_others(monkeypatch):
    timed, failing = HostRig.seconds, threading.local()

    def fail(rig, call, times):
        if failing.rank == 1:
            raise KeyboardInterrupt
        return timed(rig, call, times)

    monkeypatch.setattr(HostRig, "seconds", fail)

    def run(comm):
        failing.rank = comm.rank
        if comm.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        else:
            with pytest.raises(PeerLost, match="rank 1 gave up"):
                comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
        with pytest.raises(PeerLost):
            comm.barrier()

    qccl.run_ranks(2, run)


def test_groups_of_a_split_measure_on_their_own():
    def run(comm):
        comm.profile()
        half = comm.split(comm.rank % 2)
        x = np.ones(50, np.float32)
        half.quantized_allreduce(x, codec="auto")
        assert (x == 2).all()
        assert len(half.profile().nodes) == 2
        half.close()

    qccl.run_ranks(4, run)


def test_nodes_with_several_ranks_also_measure_two_levels():
    def run(comm):
        comm.nodes = (0, 0, 1, 1)
        plan = comm.plan("allreduce", 4096, codec="auto")
        assert "none by two levels" in plan.explain() and "minmax8 by two levels" in plan.explain()
        x = np.ones(4096, np.float32)
        plan(x)
        assert (x == 4).all()

    qccl.run_ranks(4, run)


def test_raw_pointers_choose_as_arrays_do():
    def run(comm):
        comm._adopt(profile(comm, ("minmax8", "two_round")))
        x = np.random.default_rng(comm.rank).standard_normal(5000, np.float32)
        y = x.copy()
        comm.quantized_allreduce(x, codec="auto")
        qccl.quantized_allreduce(y.ctypes.data, y.ctypes.data, y.size, "float32", "sum", comm, codec="auto")
        assert x.tobytes() == y.tobytes()

    qccl.run_ranks(2, run)


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


def test_a_timeout_that_is_too_short_to_measure(monkeypatch):
    """The call has no codec, now and later; the ranks go by the shortest of their timeouts."""

    def run(comm):
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

    qccl.run_ranks(2, run)


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
