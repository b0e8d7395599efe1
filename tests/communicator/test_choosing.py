"""codec="auto": what ranks choose, and that they choose alike (test_measuring.py: how they measure)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from profiles import profile
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError, CodecError, CollectiveTimeout, MismatchError
from qccl.communicator.profile import CallKind, GroupProfile

pytestmark = pytest.mark.usefixtures("short_measurements")

COLLECTIVES = ["allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


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
@on_ranks(2)
def test_a_loaded_profile_decides(comm, fast):
    comm._adopt(profile(comm, fast))
    before = comm._session.numbers.sequence
    plan = comm.plan("allreduce", 5000, codec="auto")
    assert (plan.codec, plan.spec.algorithm) == fast
    assert comm._session.numbers.sequence == before, "nothing is measured"
    assert f"by the times of the group's profile: {fast[0]} by {fast[1]} 1 ms, " in plan.explain()
    assert comm.plan("allreduce", 5000, codec=fast[0]).spec.algorithm == fast[1]
    assert comm.plan("allreduce", 5000, codec="minmax8+ef", key="x").spec.algorithm == "auto", "as without a profile"
    assert comm.plan("allreduce", 5000, codec="auto", algorithm="one_shot").spec.algorithm == "one_shot"
    xs = [np.ones(7, np.float32), np.ones(2000, np.float32)]
    comm.quantized_allreduce_coalesced(xs, codec="auto")
    assert all((x == 2).all() for x in xs)
    assert comm.profile().times == profile(comm, fast).times


@on_ranks(2)
def test_a_codec_behind_the_colon_is_the_most_that_is_lost(comm):
    comm._adopt(profile(comm, ("minmax4", "two_round"), codec="minmax4"))
    assert comm.plan("allreduce", 5000, codec="auto:minmax4").codec == "minmax4"
    comm.plan("allreduce", 5000, codec="auto")
    assert CallKind("allreduce", "float32", "minmax8") in comm.profile().times, "measured beside what was loaded"
    for wrong in ("auto:minmax99", "auto:nothing", "auto+ef", "automatic"):
        hint = "only 'auto' and 'auto:CODEC', in small letters" if wrong == "auto+ef" else "no codec|not possible"
        with pytest.raises(CodecError, match=hint):
            comm.plan("allreduce", 5000, codec=wrong)
    comm.barrier()


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


@on_ranks(2)
def test_other_collectives_are_refused_before_anything_is_sent(comm):
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


@on_ranks(1)
def test_one_rank_needs_no_profile(comm):
    x = np.array([1.0, 2.5], np.float32)
    comm.quantized_allreduce(x, codec="auto")
    assert x.tolist() == [1.0, 2.5]
    assert comm.plan("allreduce", 5, codec="auto").codec == "none"
    with pytest.raises(ArgumentError, match="one rank has no profile"):
        comm.profile()


@on_ranks(2)
def test_ranks_with_other_profiles_notice(comm):
    with pytest.raises(MismatchError, match="agree on the profile"):
        comm._adopt(profile(comm, ("none", "one_shot") if comm.rank else ("minmax8", "one_shot")))


@on_ranks(2)
def test_a_rank_without_the_profile_notices(comm):
    with pytest.raises(MismatchError, match="agree on the profile"):
        if comm.rank:
            comm._adopt(profile(comm, ("none", "one_shot")))
        else:
            comm.quantized_allreduce(np.ones(4, np.float32))


@on_ranks(2)
def test_the_profile_of_another_group_changes_nothing(comm):
    with pytest.raises(ArgumentError, match="this group has 2 ranks"):
        comm._adopt(GroupProfile((0, 0, 0), comm.transport.name))
    comm.quantized_allreduce(np.ones(4, np.float32))


@on_ranks(2)
def test_a_rank_that_names_a_codec_meanwhile_is_a_mismatch(comm):
    with pytest.raises(MismatchError, match="measure allreduce of float32 with none and minmax8"):
        comm.quantized_allreduce(np.ones(4, np.float32), codec="minmax8" if comm.rank else "auto")


@on_ranks(2, timeout=0.3)
def test_a_rank_that_does_not_come_is_not_waited_for_forever(comm, missed: threading.Event):
    if comm.rank:
        assert missed.wait(60)
        return
    with pytest.raises(CollectiveTimeout):
        comm.quantized_allreduce(np.ones(4, np.float32), codec="auto")
    missed.set()


@on_ranks(2)
def test_raw_pointers_choose_as_arrays_do(comm):
    comm._adopt(profile(comm, ("minmax8", "two_round")))
    x = np.random.default_rng(comm.rank).standard_normal(5000, np.float32)
    y = x.copy()
    comm.quantized_allreduce(x, codec="auto")
    qccl.quantized_allreduce(y.ctypes.data, y.ctypes.data, y.size, "float32", "sum", comm, codec="auto")
    assert x.tobytes() == y.tobytes()
